"""The one form of all measurements: goals, each of which is used, and what is judged by them."""

from __future__ import annotations

import re

import msgspec
import pytest

from bench.report import FILE, Ratio, as_json, goals


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Ratio(what="", value=5.0, at_least=5), "reached"),
        (Ratio(what="", value=4.9, at_least=5), "missed"),
        (Ratio(what="", value=3.0, at_most=3), "reached"),
        (Ratio(what="", value=3.1, at_most=3), "missed"),
        (Ratio(what="", value=None, at_most=3), "missed"),
        (Ratio(what="", value=1.0), ""),
        (Ratio(what="", value=2.8, at_most=3, interval=(2.5, 3.0)), "reached"),
        (Ratio(what="", value=3.2, at_most=3, interval=(3.0, 3.3)), "undecided"),
        (Ratio(what="", value=3.2, at_most=3, interval=(3.1, 3.3)), "missed"),
        (Ratio(what="", value=3.2, at_most=3, interval=(2.9, 3.3)), "undecided"),
        (Ratio(what="", value=4.8, at_least=5, interval=(4.7, 4.9)), "missed"),
        (Ratio(what="", value=4.8, at_least=5, interval=(4.7, 5.1)), "undecided"),
        (Ratio(what="", value=None, at_most=3, interval=(2.9, 3.3)), "missed"),
    ],
)
def test_a_goal_is_reached_at_its_limit_and_never_without_a_figure(ratio: Ratio, verdict: str) -> None:
    assert ratio.verdict == verdict


def test_a_figure_beyond_its_rounds_is_no_median_of_them() -> None:
    """A file that holds such a one can still be read."""
    for value in (2.9, 3.1, None):
        assert Ratio.held(None, "ours / theirs", value, rounds=(3.1, 2.9)).value == value
    for value in (2.8, 3.2):
        with pytest.raises(ValueError, match="ours / theirs"):
            Ratio.held(None, "ours / theirs", value, rounds=(3.1, 2.9))
        old = Ratio(what="ours / theirs", value=value, rounds=(3.1, 2.9))
        assert msgspec.json.decode(as_json(old), type=Ratio) == old


BENCH = FILE.parent
PROGRAMS = "|".join({name.split(".")[0] for name in goals()})
USED = re.compile(rf'"((?:{PROGRAMS})\.[a-z0-9_]+)"')


def test_every_goal_is_used_and_every_use_is_a_goal() -> None:
    """Those of the rivals are put together from their names."""
    texts = [path.read_text() for path in BENCH.rglob("*.py")]
    files = (".json", ".toml", ".py", ".md")
    used = {name for text in texts for name in USED.findall(text) if not name.endswith(files)}
    made = {f"jobs.{rival}{of}" for rival in ("celery", "arq", "taskiq") for of in ("", "_cpu", "_put")}
    assert used | made == goals().keys()
