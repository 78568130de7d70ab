"""The plain top-level packages are ours alone, and what is in the tree is what is shipped and allowed."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NAMES = SETTINGS["tool"]["importlinter"]["root_packages"]


def test_no_other_distribution_owns_a_name_of_ours() -> None:
    """A package of the same name would be installed over ours without a word."""
    others = {
        found.name: {file.parts[0] for file in found.files or ()}
        for found in distributions()
        if found.name != "penstock"
    }
    assert others and {other: tops for other, tops in others.items() if tops & set(NAMES)} == {}


def test_the_contract_of_offline_work_names_the_whole_frontend() -> None:
    """A module that is added to `api` is forbidden to `offline` too, unless it is one of those that it may import."""
    name = "of the frontend, offline work knows only the dialect"
    (contract,) = [each for each in SETTINGS["tool"]["importlinter"]["contracts"] if each["name"] == name]
    found = {
        f"api.{path.stem}"
        for path in (ROOT / "api").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert set(contract["forbidden_modules"]) == found - {"api.__init__", "api.openai", "api.anthropic", "api.settings"}


def test_only_the_catalogue_spells_a_redis_name() -> None:
    """Keys and channels are made in one file."""
    spelled = [
        str(path.relative_to(ROOT))
        for name in NAMES
        for path in (ROOT / name).rglob("*.py")
        if re.search(r"[\"']penstock:", path.read_text(encoding="utf-8"))
    ]
    assert spelled == ["streaming/keys.py"]


def test_nothing_on_a_wire_is_pickled() -> None:
    """No module of ours can unpickle."""
    banned = re.compile(r"^\s*(import|from) (pickle|marshal|shelve|dill|joblib|cloudpickle)\b", re.MULTILINE)
    found = [path for name in NAMES for path in (ROOT / name).rglob("*.py") if banned.search(path.read_text("utf-8"))]
    assert found == []


def test_locks_are_hashed_and_name_no_index() -> None:
    """Every requirement has a hash; where it comes from is the installer's own configuration."""
    for lock in map(ROOT.joinpath, ("requirements.lock", "requirements-dev.lock", "requirements-audit.lock")):
        text = lock.read_text(encoding="utf-8")
        assert "://" not in text and "--index" not in text and "--find-links" not in text
        requirements = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
        assert requirements and text.count("--hash=sha256:") >= len(requirements)


def test_no_file_names_an_address_packages_come_from() -> None:
    """Neither hosts of package indexes nor paths of one machine are in the project."""
    hosts = re.compile("(" + "|".join(["pypi" + r"\.org", "python" + r"hosted\.org", "registry" + r"\.npmjs"]) + ")")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:  # an exported tree without git: look at everything that is ours
        found = [path for name in [*NAMES, "docs", "tests"] for path in (ROOT / name).rglob("*")]
    else:
        found = [ROOT / name for name in tracked.stdout.splitlines()]
    paths = [path for path in found if path.is_file()]
    named = [str(path) for path in paths if hosts.search(path.read_text(encoding="utf-8", errors="replace"))]
    assert paths and named == []
