"""The progress line: how long a phase will still take, and only where that can be known."""

from __future__ import annotations

import io
import os
from functools import partial
from pathlib import Path

import pytest
from terminals import Terminal

from cli import output as progress_module
from cli.output import ProgressLine, remaining_s, short
from telemetry.records.reader import Skipped, create, read_records


@pytest.mark.parametrize(
    ("spent_s", "first", "share", "rest"),
    [
        (10.0, 0.0, 0.25, 30.0),
        (10.0, 0.5, 0.75, 10.0),  # what was there before it began took no time
        (1.0, 0.0, 0.5, None),  # too early to say
        (10.0, 0.25, 0.25, None),  # nothing has moved
        (10.0, 0.0, 1.0, None),
        (10.0, 0.0, 0.0, None),
    ],
)
def test_the_rest_follows_from_the_pace(spent_s: float, first: float, share: float, rest: float | None) -> None:
    assert remaining_s(spent_s, first, share) == rest


def test_times_are_short() -> None:
    assert [short(each) for each in (0.2, 59.6, 99, 150, 7260)] == ["1 s", "60 s", "99 s", "2 min", "2 h 1 min"]


def test_a_terminal_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the time that the phase has taken; a new phase begins anew."""
    clock = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    line = ProgressLine(Terminal(), {})
    line.amount("fetching", 10_000_000, 100_000_000)
    assert line._line().endswith("0.0 s")
    clock[0] = 104.0
    line.amount("fetching", 50_000_000, 100_000_000)
    assert line._line().endswith("50.0/100.0 MB  4.0 s, about 5 s left")
    line.phase("checking")
    assert line._line() == "checking  0.0 s"


def test_reading_records_says_how_much_is_read(tmp_path: Path) -> None:
    """In bytes, to the end, whatever the window leaves out."""
    for number, size in enumerate((100, 300)):
        path, descriptor = create(tmp_path, 1_800_000_000.0 + number, "worker", number)
        path.write_bytes(b"x" * size)
        os.close(descriptor)
    told: list[tuple[int, int]] = []
    assert list(read_records(tmp_path, 0.0, 1e11, Skipped(), lambda *both: told.append(both))) == []
    assert told == [(0, 400), (100, 400), (400, 400)]
    line = ProgressLine(io.StringIO(), {}, quiet=True)
    list(read_records(tmp_path, 0.0, 1e11, Skipped(), partial(line.amount, "reading records")))
