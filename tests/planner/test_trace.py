"""Traces that are read, scaled and cut to a context."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.trace import COLUMNS, Malformed, Trace, TraceRow, cut


def trace(folder: Path, *rows: str) -> Trace:
    path = folder / "t.csv"
    path.write_text("\n".join([",".join(COLUMNS), *rows, ""]))
    return Trace(path)


def test_failed_rows_are_counted_and_not_sent(tmp_path: Path) -> None:
    """As BurstGPT has them: no response tokens. Its log types are our classes."""
    found = trace(tmp_path, "0,ChatGPT,10,20,30,Conversation log", "5,GPT-4,9,0,9,API log", "7,GPT-4,8,4,12,API log")
    assert [(x.at, x.prompt, x.answer, x.lane, x.model) for x in found] == [
        (0.0, 10, 20, "interactive", "ChatGPT"),
        (7.0, 8, 4, "standard", "GPT-4"),
    ]
    assert found.failed == 1


def test_a_cut_is_scaled_and_clipped() -> None:
    found = list(cut([TraceRow(10.0, 100, 100)], scale=2, longest=120))
    assert found == [TraceRow(5.0, 20, 100)]


def test_json_lines_of_apex(tmp_path: Path) -> None:
    """Nanoseconds; a line without an answer is a failure."""
    path = tmp_path / "t.jsonl"
    lines = [(0, 10, 5), (1_500_000_000, 20, 0), (2_000_000_000, 0, 7)]
    path.write_text(
        "".join(f'{{"StartTimeOffset": {at}, "ContextTokens": {n}, "GeneratedTokens": {g}}}\n' for at, n, g in lines)
    )
    trace = Trace(path)
    assert list(trace) == [TraceRow(0.0, 10, 5), TraceRow(2.0, 1, 7)] and trace.failed == 1


APEX = '{"StartTimeOffset": 0, "ContextTokens": 10, "GeneratedTokens": 5}\n'
TABLE = ",".join(COLUMNS) + "\n0,sim,10,5,15,Conversation log\n"


@pytest.mark.parametrize(("name", "text"), [("t.jsonl", APEX), ("t.csv", TABLE)])
def test_a_byte_order_mark_is_ignored_and_another_encoding_is_named(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert [row.prompt for row in Trace(path)] == [10]
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(Malformed, match="UTF-16"):
        list(Trace(path))
