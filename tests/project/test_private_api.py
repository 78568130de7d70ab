"""What the product uses of its libraries beyond their documented API.

The versions are pinned exactly. To upgrade one of them: look at what the files below use of it, change the pin in
pyproject.toml, the lock and this file, and run the whole suite.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("penstock", "api", "workers", "scheduler", "offline", "planner", "streaming", "telemetry", "cli")
PINNED = {
    "uvicorn": ("0.54.0", "api/stream/connection.py"),
    "redis": ("8.1.0", "streaming/redis/connection.py, streaming/redis/topology.py"),
    "prometheus-client": ("0.26.0", "telemetry/metrics.py"),
}
"""Versions, and the files that use what is not documented."""
USED = {
    ("streaming/redis/connection.py", "_writer"),
    ("telemetry/metrics.py", "_buckets"),
    ("telemetry/metrics.py", "_sum"),
}
PRIVATE_USE = re.compile(r"(?<!\bself)(?<!\bcls)\.(_[a-z]\w*)")


@pytest.mark.parametrize("library", PINNED)
def test_the_pinned_version_is_installed_and_locked(library: str) -> None:
    pinned, files = PINNED[library]
    assert version(library) == pinned, f"compare what {files} use of both versions"
    assert f'"{library}=={pinned}"' in (ROOT / "pyproject.toml").read_text("utf-8")
    lock = (ROOT / "requirements.lock").read_text("utf-8")
    assert re.search(rf"^{library}=={re.escape(pinned)} ", lock, re.MULTILINE)


def test_no_other_private_name_of_a_library_is_used() -> None:
    """Of another object: `connection._writer`. What is the product's own is defined in the same file; `_asdict`
    and `_replace` are public methods of named tuples."""
    used = set[tuple[str, str]]()
    for path in (path for package in PRODUCT for path in (ROOT / package).rglob("*.py")):
        text = path.read_text("utf-8")
        assert not re.search(r"^ *(?:from|import) \S*\b_[a-z]", text, re.MULTILINE), f"{path} imports a private module"
        own = {"_exit", "_asdict", "_replace", *re.findall(r"def (_\w+)\(", text)}
        used |= {(path.relative_to(ROOT).as_posix(), name) for name in PRIVATE_USE.findall(text) if name not in own}
    assert used == USED
