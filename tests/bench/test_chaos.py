"""Four rows of the fault matrix in short: the harness plays them, and the promise holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.__main__ import main
from bench.chaos.report import as_document, failed_in, merged, small, what_failed
from bench.chaos.rows import ROWS
from bench.chaos.stage import FaultRow, FaultTestbed, play_row
from bench.report import as_json

pytestmark = pytest.mark.slow

KNOWN = {row.id: row for row in ROWS}


@pytest.mark.parametrize(("row_id", "trials"), [("F01", 1), ("F04", 1), ("F10b", 2), ("F38", 2)])
async def test_nothing_is_lost_or_doubled_by_a_kill(row_id: str, trials: int, tmp_path: Path) -> None:
    """A worker dies; the store dies while jobs run and wait; an API process and a worker die at once; upstream servers
    die. Every client gets every token once, and one end."""
    outcome = await play_row(replace(KNOWN[row_id], trials=trials), tmp_path)
    assert outcome.passed, what_failed(outcome)
    assert outcome.trials == trials and outcome.stalls
    assert str(tmp_path).encode() not in as_json(as_document([outcome], outcome.seconds))


def run(**passed: bool) -> dict[str, Any]:
    figures = {"trials": 1, "lost": 0, "doubled": 0, "wrong_ends": 0, "stall_p50_ms": None, "measured": {"a": 1}}
    faults = [
        {"id": row, "title": row, "injected": "x", "passed": ok, "wrong": [] if ok else ["slow"], **figures}
        for row, ok in passed.items()
    ]
    ok = all(passed.values())
    return {"date": "d", "cores": 2, "python": "p", "seconds": 1, "passed": ok, "faults": faults}


def test_rows_that_failed_are_repeated_into_the_same_run() -> None:
    """The file says which, and that they had failed."""
    first = run(F01=True, F06=False)
    assert failed_in(first) == ["F06"]
    both = merged(first, run(F06=True))
    assert both["passed"] and both["seconds"] == 2 and both["faults"][1]["before"][0]["wrong"] == ["slow"]
    assert not merged(first, run(F06=False))["passed"]


def test_a_repetition_does_not_hide_a_failure() -> None:
    """The file has every failure of a row and what came of it in the end, each with its figures."""
    (row,) = merged(merged(run(F06=False), run(F06=False)), run(F06=True))["faults"]
    assert row["passed"] and row["wrong"] == []
    assert [(play["passed"], play["wrong"], play["trials"], play["date"]) for play in row["before"]] == 2 * [
        (False, ["slow"], 1, "d")
    ]


def test_a_later_run_keeps_every_failure_of_the_one_whose_place_it_takes() -> None:
    """The figures and the day are its own; a row that was never played again stays as it was."""
    later = merged(run(F01=True, F06=False), {**run(F01=True, F06=True), "date": "e", "busy": 4}, whole=True)
    assert (later["date"], later["seconds"], later["passed"]) == ("e", 1, True)
    row = later["faults"][1]
    assert row["passed"] and [(play["date"], play["wrong"]) for play in row["before"]] == [("d", ["slow"])]
    assert later["busy"] == 4
    some = merged(later, run(F06=False))
    assert [fault["id"] for fault in some["faults"]] == ["F01", "F06"] and not some["passed"] and some["date"] == "e"
    assert [len(fault.get("before", [])) for fault in some["faults"]] == [0, 1]


def test_a_row_that_failed_is_told_of_however_often_it_is_played_again() -> None:
    again = merged(merged(run(F01=True, F06=False), run(F06=True)), run(F06=True))
    assert [play["wrong"] for play in again["faults"][1]["before"]] == [["slow"]]


def on(machine: dict[str, Any], **passed: bool) -> dict[str, Any]:
    """A run on a machine that each of its rows names."""
    found = {**run(**passed), **machine}
    return {**found, "faults": [{**fault, **machine} for fault in found["faults"]]}


def test_a_row_that_was_repeated_elsewhere_says_where() -> None:
    """Its figures are not those of the machine that the run names."""
    little, large = ({"cores": cores, "python": "3.11.7", "busy": busy} for cores, busy in ((2, 4), (16, 0)))
    first = on(little, F01=True, F06=False, F07=False)
    both = merged(first, on(large, F06=True))
    machines = [(row["cores"], row["busy"]) for row in both["faults"]]
    assert (both["cores"], machines) == (2, [(2, 4), (16, 0), (2, 4)])
    assert (both["faults"][1]["before"][0]["cores"], both["faults"][1]["before"][0]["busy"]) == (2, 4)
    whole = merged(first, on(large, F01=True, F06=True, F07=True), whole=True)
    kept = small(both)["faults"]
    assert [row.get("cores") for row in kept] == [None, 16, None] and kept[1]["busy"] == 0
    assert merged(small(both), on(large, F08=True))["faults"][0]["busy"] == 4, "a row that is not repeated is the run's"
    failures = [play for row in whole["faults"] for play in row.get("before", ())]
    assert whole["cores"] == 16 and [(play["id"], play["cores"]) for play in failures] == [("F06", 2), ("F07", 2)]


async def test_a_written_row_names_its_machine(tmp_path: Path) -> None:
    async def play(stage: FaultTestbed) -> None:
        stage.fault("nothing")

    outcome = await play_row(FaultRow("F00", "none", "nothing", 1, play, 10), tmp_path)
    found = as_document([outcome], 1.0, 4)
    assert found["busy"] == 4
    assert all(found["faults"][0][name] == found[name] for name in ("cores", "python", "busy", "date", "commit"))


def test_the_file_keeps_what_says_something() -> None:
    row, failed = small(merged(run(F01=True, F06=False), run(F06=True)))["faults"]
    assert row == {"id": "F01", "title": "F01", "passed": True, "trials": 1, "measured": {"a": 1}}
    assert failed["before"][0]["passed"] is False and failed["before"][0]["wrong"] == ["slow"]


def test_a_failure_keeps_its_own_day() -> None:
    """Not that of the run into which its row was repeated."""
    first = run(F01=True, F06=False)
    failed = run(F06=False)
    failed["faults"][0]["date"] = "e"
    last = merged(merged(first, failed), run(F06=True))
    assert [earlier["date"] for earlier in last["faults"][1]["before"]] == ["d", "e"]


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


def test_every_row_says_what_it_proves() -> None:
    """Names are unique; each row has a sentence, trials, a short form, and a reason for what it may refuse."""
    assert len({row.id for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.proves.endswith(".") and row.short <= row.trials and row.budget.why, row.id
