"""docs/walk.md lists every folder of the source."""

from __future__ import annotations

import re
from pathlib import Path

from bench.document import summary

ROOT = Path(__file__).parents[2]
PACKAGES = ("penstock", "api", "workers", "scheduler", "offline", "planner", "streaming", "telemetry", "runtime", "cli")


def test_the_walk_lists_every_folder_of_the_source() -> None:
    """Each once, and none that is gone. What stands in a list is compared with the source as all tables are."""
    listed = re.findall(r"<!-- files: ([a-z/]+) -->", (ROOT / "docs" / "walk.md").read_text(encoding="utf-8"))
    sources = [path for name in PACKAGES for kind in ("*.py", "*.lua") for path in (ROOT / name).rglob(kind)]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in sources if path.name != "__init__.py"}
    assert sorted(listed) == sorted(folders)


def test_a_summary_is_the_first_sentence(tmp_path: Path) -> None:
    module, script = tmp_path / "a.py", tmp_path / "a.lua"
    module.write_text('"""What it is,\nin two lines. More. \n\nAnd more."""\n')
    script.write_text(
        "#!lua flags=allow-oom\n-- Renews a lease. ARGV: worker, lease in ms\n-- Returns: 1\nlocal a = 1\n"
    )
    assert (summary(module), summary(script)) == ("What it is, in two lines.", "Renews a lease.")
