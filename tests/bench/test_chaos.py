"""Two rows of the fault matrix in short: the harness plays them, and the promise holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.__main__ import main
from bench.chaos.report import failed_in, merged, small, what_failed
from bench.chaos.rows import ROWS
from bench.chaos.stage import FaultRow, FaultTestbed, play_row
from bench.report import as_json

pytestmark = pytest.mark.slow

KNOWN = {row.id: row for row in ROWS}


@pytest.mark.parametrize("row_id", ["F04", "F10b"])
async def test_nothing_is_lost_or_doubled_by_a_kill(row_id: str, tmp_path: Path) -> None:
    """The store dies while jobs run and wait; an API process and a worker die at once. Every client gets every token
    once, and one end."""
    outcome = await play_row(replace(KNOWN[row_id], trials=1), tmp_path)
    assert outcome.passed, what_failed(outcome)
    assert outcome.trials == 1 and outcome.stalls


def run(date: str = "d", **passed: bool) -> dict[str, Any]:
    faults = [
        {"id": row, "date": date, "passed": ok, "wrong": [] if ok else ["slow"], "trials": 1}
        for row, ok in passed.items()
    ]
    return {"date": date, "passed": all(passed.values()), "faults": faults}


def test_no_repetition_hides_a_failure() -> None:
    """The file has every failure of a row and what came of it in the end, each with its figures and its day."""
    first = run(F01=True, F06=False)
    assert failed_in(first) == ["F06"] and not merged(first, run(F06=False))["passed"]
    both = merged(merged(first, run("e", F06=False)), run("f", F06=True))
    assert both["passed"] and [fault["id"] for fault in both["faults"]] == ["F01", "F06"]
    row = both["faults"][1]
    assert (row["date"], row["wrong"]) == ("f", [])
    assert [(play["passed"], play["wrong"], play["date"]) for play in row["before"]] == [
        (False, ["slow"], "d"), (False, ["slow"], "e"),
    ]  # fmt: skip
    later = merged(both, run("g", F01=True, F06=True), whole=True)
    assert later["date"] == "g" and len(later["faults"][1]["before"]) == 2
    assert [len(fault.get("before", ())) for fault in small(later)["faults"]] == [0, 2], "the file keeps them too"


def test_again_plays_nothing_where_nothing_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "chaos.json"
    assert main(["--again", "--out", str(out)]) == 2
    out.write_bytes(as_json(run(F01=True)))
    assert main(["--again", "--out", str(out)]) == 0 and "no row failed" in capsys.readouterr().out
    assert main(["--again", "--rows", "F01", "--out", str(out)]) == 2
    out.write_bytes(as_json(run(F01=True, F06=False)))
    assert main(["--again", "--list", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "F06" in said and "F01 " not in said


async def test_a_fault_that_does_not_bite_is_repeated_and_then_fails_the_row(tmp_path: Path) -> None:
    """A trial counts only if its fault did something; after too many that did nothing the row has failed."""
    bites: list[bool] = []

    async def play(stage: FaultTestbed) -> None:
        for number in stage.tries():
            stage.fault("nothing")
            stage.bit(bites[number], "nobody was there")

    row = FaultRow("F00", "none", "nothing", 2, play, 10)
    bites[:] = [False, True, False, True]
    outcome = await play_row(row, tmp_path / "some")
    assert outcome.passed and (outcome.trials, outcome.missed) == (2, 2)
    bites[:] = [False] * 9
    outcome = await play_row(row, tmp_path / "none")
    assert not outcome.passed and outcome.missed == row.most_missed + 1
