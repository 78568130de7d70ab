"""The one form of all measurements: what is shown, what is kept, what is judged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from bench.report import Column, Ratio, Report, as_json, load, table, write

REPORT = Report(
    name="example",
    title="An [example]",
    command="penstock bench example",
    settings={"concurrency": [1, 64]},
    columns=(Column("system", "system"), Column("tokens", "tokens/s", 0), Column("ttft", "TTFT p50, ms", 2)),
    rows=[{"system": "ours", "tokens": 12345.6, "ttft": 1.5}, {"system": "a|b", "tokens": 7, "ttft": None}],
    ratios=(Ratio(what="ours / theirs", value=5.25, at_least=5), Ratio(what="the rest", value=0.5, at_most=0.3)),
    notes=("One core each.",),
)


def test_the_file_keeps_what_the_table_shows(tmp_path: Path) -> None:
    rows = [*REPORT.rows, {"system": "b", "tokens": 1, "tokens_of_rounds": [1.0, 2.0], "ttft": None}]
    ratio = Ratio(what="a", value=2.0, at_most=3, rounds=(1.0, 2.0, 4.0))
    found = msgspec.structs.replace(REPORT, rows=rows, ratios=(*REPORT.ratios, ratio))
    kept = load(write(tmp_path / "results" / "example.json", found.small))
    assert kept.rows == [REPORT.rows[0], {"system": "a|b", "tokens": 7}, {"system": "b", "tokens": 1}]
    assert kept.ratios[:2] == REPORT.ratios and kept.ratios[2].figure == ratio.figure
    assert (kept.columns, kept.settings, kept.notes) == ((), REPORT.settings, REPORT.notes)
    assert kept.cores >= 1 and len(kept.date) == 10


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Ratio(what="", value=5.0, at_least=5), "reached"),
        (Ratio(what="", value=4.9, at_least=5), "missed"),
        (Ratio(what="", value=3.0, at_most=3), "reached"),
        (Ratio(what="", value=3.1, at_most=3), "missed"),
        (Ratio(what="", value=None, at_most=3), "missed"),
        (Ratio(what="", value=1.0), ""),
        (Ratio(what="", value=3.2, at_most=3, interval=(3.1, 3.3)), "missed"),
        (Ratio(what="", value=3.2, at_most=3, interval=(2.9, 3.3)), "undecided"),
        (Ratio(what="", value=4.8, at_least=5, interval=(4.7, 4.9)), "missed"),
        (Ratio(what="", value=4.8, at_least=5, interval=(4.7, 5.1)), "undecided"),
        (Ratio(what="", value=None, at_most=3, interval=(2.9, 3.3)), "missed"),
    ],
)
def test_a_goal_is_reached_at_its_limit_and_never_without_a_figure(ratio: Ratio, verdict: str) -> None:
    assert ratio.verdict == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.9, 1.0, "reached"),
        (0.9, 1.03, "reached"),
        (1.0, 1.1, "undecided"),
        (1.03, 1.1, "undecided"),
        (1.04, 1.1, "missed"),
    ],
)
def test_an_interval_that_contains_the_goal_decides_nothing(low: float, high: float, verdict: str) -> None:
    ratio = Ratio(what="this / base", value=1.05, at_most=1.03, interval=(low, high), rounds=(0.5, 1.05, 2.0))
    assert ratio.verdict == verdict
    assert ratio.figure == f"1.05 (interval {low:.2f} to {high:.2f})"


def test_a_figure_beyond_its_rounds_is_no_median_of_them() -> None:
    """A file that holds such a one can still be read."""
    for value in (2.9, 3.1, None):
        assert Ratio.held(None, "ours / theirs", value, rounds=(3.1, 2.9)).value == value
    for value in (2.8, 3.2):
        with pytest.raises(ValueError, match="ours / theirs"):
            Ratio.held(None, "ours / theirs", value, rounds=(3.1, 2.9))
        old = Ratio(what="ours / theirs", value=value, rounds=(3.1, 2.9))
        assert msgspec.json.decode(as_json(old), type=Ratio) == old


def test_what_is_undecided_is_said_to_be_so() -> None:
    """In the table and in the file; it is neither reached nor does it fail the program."""
    ratio = Ratio(what="this / base", value=1.0, at_most=1.03, interval=(0.9, 1.1))
    found = msgspec.structs.replace(REPORT, ratios=(ratio,))
    with (console := Console(width=120)).capture() as caught:
        console.print(table(found))
    for shown in (caught.get(), as_json(found).decode()):
        assert "undecided" in shown and "reached" not in shown
    assert not found.missed and REPORT.missed
    assert msgspec.structs.replace(ratio, interval=(1.1, 1.2)).verdict == "missed"
