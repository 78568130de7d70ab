"""The goals: every one is used, and every name that is used is one."""

import re
from pathlib import Path

import pytest

from bench.report import FILE, Ratio, goals

BENCH = FILE.parent
PROGRAMS = "|".join({name.split(".")[0] for name in goals()})
USED = re.compile(rf'"((?:{PROGRAMS})\.[a-z0-9_]+)"')


def test_every_goal_is_used_and_every_use_is_a_goal() -> None:
    """Those of the rivals are put together from their names."""
    texts = [path.read_text() for path in BENCH.rglob("*.py")]
    used = {name for text in texts for name in USED.findall(text) if not name.endswith((".json", ".toml", ".py"))}
    made = {f"jobs.{rival}{of}" for rival in ("celery", "arq", "taskiq") for of in ("", "_cpu", "_put")}
    assert used | made == goals().keys()


def test_a_figure_is_held_against_the_goal_of_its_name() -> None:
    assert (Ratio.held("jobs.arq", "x", 1.9).goal, Ratio.held("jobs.arq", "x", 1.9).verdict) == ("at least 2", "missed")
    assert Ratio.held(None, "x", 1.9).verdict == ""


@pytest.mark.parametrize("bounds", ["", "at_most = 1.0\nat_least = 1.0\n"])
def test_a_goal_is_a_bound_on_one_side(bounds: str, tmp_path: Path) -> None:
    (tmp_path / "goals.toml").write_text(f'[a.b]\nsince = 2026-11-21\nwhy = "Because."\n{bounds}')
    with pytest.raises(ValueError, match=r"a\.b: a goal has"):
        goals(tmp_path / "goals.toml")
