"""Two rows of the fault matrix in short: the harness plays them, and the promise holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.chaos.play import play_row
from bench.chaos.report import as_json, what_failed
from bench.chaos.rows import ROWS

KNOWN = {row.id: row for row in ROWS}


@pytest.mark.parametrize("row_id", ["F01", "F10b"])
async def test_nothing_is_lost_or_doubled_by_a_kill(row_id: str, tmp_path: Path) -> None:
    """A worker dies; an API process and a worker die at once: every client gets every token once, and one end."""
    outcome = await play_row(replace(KNOWN[row_id], trials=2), tmp_path)
    assert outcome.passed, what_failed(outcome)
    assert outcome.trials == 2 and outcome.stalls
    assert str(tmp_path).encode() not in as_json([outcome], outcome.seconds)
