"""`make fuzz` passes only when everything was tried, judged and right."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.fuzz import FuzzReport, main, problems

SOUND = {
    "complete": True,
    "operations": {"total": 39, "selected": 39, "tested": 39},
    "test_cases": {"generated": 1500, "with_failures": 0, "errored": 0},
    "failures": [],
}
LOGS = {"api": '{"level":"warning","message":"hm"}\n'}


def report(**changes: object) -> FuzzReport:
    return msgspec.convert(SOUND | changes, FuzzReport)


def test_a_run_without_a_fault_is_no_finding() -> None:
    """Two runs count together; one of them may leave operations out."""
    part = report(operations={"total": 39, "selected": 36, "tested": 36})
    assert problems([report(), part], LOGS, 2000) == []


@pytest.mark.parametrize(
    ("changes", "logs", "words"),
    [
        ({"failures": [{"title": "Server error", "count": 2, "operations": ["GET /"]}]}, LOGS, "Server error: 2"),
        ({"complete": False}, LOGS, "did not end well"),
        ({"test_cases": {"generated": 1500, "with_failures": 0, "errored": 1}}, LOGS, "1 cases could not be judged"),
        ({"operations": {"total": 39, "selected": 39, "tested": 38}}, LOGS, "only 38 of 39"),
        ({"operations": {"total": 39, "selected": 38, "tested": 38}}, LOGS, "no run had all"),
        ({"test_cases": {"generated": 499, "with_failures": 0, "errored": 0}}, LOGS, "499 cases, fewer than"),
        ({}, {"api": '{"level":"error","message":"request failed"}'}, "api logged"),
    ],
)
def test_anything_else_is(changes: dict[str, object], logs: dict[str, str], words: str) -> None:
    """Each in words."""
    (found,) = problems([report(**changes)], logs, 500)
    assert words in found


def test_without_the_tool_it_says_how_to_get_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And starts nothing."""
    assert main(["--tool", str(tmp_path / "none")]) == 2
    assert "make fuzz" in capsys.readouterr().out
