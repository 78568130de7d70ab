"""The progress line: how long a phase will still take, and only where that can be known."""

from __future__ import annotations

import io
import os
from functools import partial
from pathlib import Path

import pytest

from cli.progress import ProgressLine, remaining_s
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
