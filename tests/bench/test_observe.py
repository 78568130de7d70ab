"""What it costs to see inside: who is loaded when, what is judged, and one small run on real processes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from bench import report
from bench.browser import missing
from bench.load.plan import StreamReading
from bench.observe.__main__ import CONSOLE, OFF, ON, TRACED, ObservedLoad, main, order, ratios, rows
from bench.observe.paint import PaintRound, paint_ratios
from bench.stats import Spread


def turn(cpu_s: float) -> ObservedLoad:
    none = Spread()
    reading = StreamReading(
        requests=1, wrong={}, tokens=1000, seconds=1.0, ttft=none, itl=none, e2e=none, own_cpu=0.0
    )  # fmt: skip
    return ObservedLoad(reading, {"api-1": cpu_s, "worker-1": 0.01}, 2000)


def test_each_is_loaded_once_a_round_and_none_always_first() -> None:
    """A steady drift cancels out: every second round runs backwards."""
    rounds = [order(number) for number in range(8)]
    assert all(sorted(each) == sorted((OFF, ON, CONSOLE, TRACED)) for each in rounds)
    assert all(one == other[::-1] for one, other in list(pairwise(rounds))[::2])
    assert len(Counter(each[0] for each in rounds)) == 4


def test_ratios_are_of_the_same_round() -> None:
    """Each round's own, so that a slow round does not count against one of the two."""
    turns = {
        OFF: [turn(0.05), turn(0.11)],
        ON: [turn(0.056), turn(0.122)],
        CONSOLE: [turn(0.056), turn(0.122)],
        TRACED: [turn(0.08), turn(0.17)],
    }
    on, traced, console = ratios(turns)
    assert on.value == pytest.approx(1.1) and traced.value == pytest.approx(1.5) and console.value == 1.0
    assert (on.verdict, console.verdict) == ("missed", "reached")
    off = rows(turns)[0]
    assert off["what"] == OFF and off["cpu_us_per_token"] == pytest.approx(45.0)


def test_the_slowest_page_is_judged_beside_the_bare_page_of_its_round() -> None:
    """A machine that is slow for a moment is slow with both."""
    quick, slow = PaintRound(20.0, [30.0, 50.0]), PaintRound(100.0, [250.0, 200.0])
    paint, times = paint_ratios([quick, quick, slow])
    assert (paint.value, times.value) == (50.0, 2.5) and paint.rounds == (50.0, 50.0, 250.0)
    assert paint_ratios([PaintRound(20.0, [310.0, 50.0])])[0].verdict == "missed"


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    """Every answer is right, and everything is measured."""
    main(["--c", "4", "--each", "1", "--rounds", "1", "--out", str(tmp_path)])
    found = report.load(tmp_path / "observe.json")
    assert [row["what"] for row in found.rows] == [OFF, ON, CONSOLE, TRACED]
    assert all(row["errors"] == 0 and row["cpu_us_per_token"] > 0 for row in found.rows) and len(found.ratios) == (
        3 if missing() else 5
    )
