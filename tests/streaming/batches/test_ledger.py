"""The ledger of a batch: torn anywhere it says nothing false, and turns that were overtaken spoil nothing."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest

from streaming.batches.ledger import (
    PLAN,
    REASONING,
    ROW_BYTES,
    InputPlan,
    Ledger,
    LineOutcome,
    Segment,
    lines_of,
    read_answer,
)
from streaming.errors import NewerMessage
from streaming.jobs.codec import Usage


def written(folder: Path, epoch: int, rows: dict[int, bytes], outcome: LineOutcome = LineOutcome.DONE) -> None:
    segment = Segment(folder, epoch)
    for line, answer in rows.items():
        segment.add(line, outcome, 0, answer, Usage(3, 2, 1))
    segment.commit()
    segment.close()


def read(folder: Path, lines: int) -> list[bytes | None]:
    ledger = Ledger.load(folder, lines)
    return [None if end is None else read_answer(folder, end) for end in ledger.ends]


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    """Every column; a missing plan is no plan."""
    with pytest.raises(FileNotFoundError):
        InputPlan.load(tmp_path)
    plan = InputPlan()
    for number in (1, 3, 4):
        plan.add(number, 100 * number, number)
    plan.duplicate_of[2], plan.tokens[0] = 0, 7
    plan.order.extend([1, 0])
    plan.save(tmp_path)
    again = InputPlan.load(tmp_path)
    assert [list(again.numbers), list(again.offsets), list(again.lengths)] == [[1, 3, 4], [100, 300, 400], [1, 3, 4]]
    assert [list(again.order), list(again.duplicate_of), list(again.tokens)] == [[1, 0], [0, 1, 0], [7, 0, 0]]
    assert list(again.copies()) == [2, 1, 0] and again.meant == {}
    plan.meant = {"small": "llama"}
    plan.save(tmp_path)
    assert InputPlan.load(tmp_path).meant == plan.meant


def test_a_plan_of_a_newer_version_is_left_to_it(tmp_path: Path) -> None:
    """What it says of the lines may change their answers."""
    InputPlan().save(tmp_path)
    columns = msgspec.msgpack.decode((tmp_path / PLAN).read_bytes())
    newer = [*columns, msgspec.msgpack.encode({"a": "b"}), b"more"]
    (tmp_path / PLAN).write_bytes(msgspec.msgpack.encode(newer))
    with pytest.raises(NewerMessage):
        InputPlan.load(tmp_path)


def test_the_first_turn_that_ended_a_line_is_right(tmp_path: Path) -> None:
    """One that was overtaken and still writes changes no answer that was given."""
    overtaken = Segment(tmp_path, 1)
    overtaken.add(0, LineOutcome.DONE, 0, b"first")
    overtaken.commit()
    written(tmp_path, 2, {0: b"later", 1: b"second's"})
    overtaken.add(2, LineOutcome.DONE, 0, b"late but alone")
    overtaken.commit()
    overtaken.close()
    assert read(tmp_path, 3) == [b"first", b"second's", b"late but alone"]


def test_attempts_and_failures_are_counted(tmp_path: Path) -> None:
    """A withdrawn line gets a new job without having failed."""
    segment = Segment(tmp_path, 1)
    segment.add(0, LineOutcome.RETRIED, 1)
    segment.add(0, LineOutcome.WITHDRAWN, 2)
    segment.add(1, LineOutcome.WITHDRAWN, 1)
    segment.commit()
    segment.close()
    ledger = Ledger.load(tmp_path, 2)
    assert (list(ledger.attempts), list(ledger.failures), ledger.ends) == ([2, 1], [1, 0], [None, None])


def test_a_store_that_counts_its_turns_again_spoils_no_segment(tmp_path: Path) -> None:
    """After a loss of data an epoch may come twice."""
    written(tmp_path, 7, {0: b"old"})
    written(tmp_path, 3, {0: b"new", 1: b"more"})
    assert read(tmp_path, 2) == [b"old", b"more"]


def with_reasoning(folder: Path) -> bytes:
    """Write rows of which every second one has tokens of reasoning; the index."""
    segment = Segment(folder, 1)
    for line in range(4):
        segment.add(line, LineOutcome.DONE, 0, b"answer", Usage(3, 20, 1, 10 * (line % 2)))
    segment.commit()
    segment.close()
    return (folder / "00000001.index").read_bytes()


def test_tokens_of_reasoning_come_back(tmp_path: Path) -> None:
    """Rows with and without them stand side by side, and those without are as they were in earlier versions."""
    data = with_reasoning(tmp_path)
    assert len(data) == 4 * ROW_BYTES + 2 * REASONING.size and data[5] == 0
    ends = Ledger.load(tmp_path, 4).ends
    assert [end and end.usage for end in ends] == [Usage(3, 20, 1, 10 * (line % 2)) for line in range(4)]


def test_a_row_with_reasoning_counts_once_it_is_whole(tmp_path: Path) -> None:
    """Cut at every byte, and spoilt at every byte."""
    data = with_reasoning(tmp_path)
    index = tmp_path / "00000001.index"
    ends = [ROW_BYTES, 2 * ROW_BYTES + 4, 3 * ROW_BYTES + 4, 4 * ROW_BYTES + 8]
    for length in range(len(data)):
        index.write_bytes(data[:length])
        assert sum(end is not None for end in Ledger.load(tmp_path, 4).ends) == sum(end <= length for end in ends)
        index.write_bytes(data[:length] + bytes([data[length] ^ 0x10]) + data[length + 1 :])
        assert sum(end is not None for end in Ledger.load(tmp_path, 4).ends) == sum(end <= length for end in ends)


def test_lines_end_at_newlines_alone() -> None:
    """Blank ones are skipped but counted; other separators are text; a long one is cut."""
    source = io.BytesIO("a\n\n\u2028b\x85\r\n  \n".encode() + b"x" * 50 + b"\nlast")
    found = list(lines_of(source, 20))
    read = [(number, data.strip()) for number, _, data in found]
    assert read == [(1, b"a"), (3, "\u2028b\x85".encode()), (5, b"x" * 21), (6, b"last")]
    for number, offset, data in found:
        source.seek(offset)
        assert source.read(len(data)) == data, number
