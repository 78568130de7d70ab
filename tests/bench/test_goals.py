"""The goals: every one is used, every name that is used is one, and a change is printed beside the figure."""

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


def test_a_goal_says_why_and_a_change_what_it_was() -> None:
    for name, goal in goals().items():
        assert goal.why.endswith("."), name
        assert all(change.was and change.why.endswith(".") and change.until <= goal.since for change in goal.changes), (
            name
        )


def test_what_a_goal_was_before_is_printed_beside_the_figure() -> None:
    changed = Ratio.held("batch.interference_bare", "x", 0.5)
    assert "until 2026-11-21: not divided by the bare engine's" in changed.goal and changed.verdict == "reached"
    assert Ratio.held("jobs.arq", "x", 1.9).goal == "at least 2"
    assert Ratio.held(None, "x", 1.9).verdict == ""


@pytest.mark.parametrize("bounds", ["", "at_most = 1.0\nat_least = 1.0\n"])
def test_a_goal_is_a_bound_on_one_side(bounds: str, tmp_path: Path) -> None:
    (tmp_path / "goals.toml").write_text(f'[a.b]\nsince = 2026-11-21\nwhy = "Because."\n{bounds}')
    with pytest.raises(ValueError, match=r"a\.b: a goal has"):
        goals(tmp_path / "goals.toml")
