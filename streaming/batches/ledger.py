"""Batch ledger on disk: an append-only log of the result of each line, and an index of the lines in the input (plan).

The plan is written once, after the input was read. The process that holds the batch's lease writes results into a
segment of its own: answers into `<epoch>.results`, then one row per answer into `<epoch>.index`. A row is valid once it
is complete, so a process may be killed at any point; every turn has its own segment, so a process that has lost the
lease cannot damage another's. The answer of a line is that of the first row, in the order of turns, that ends it.
This module knows no Redis and no request format. All of it blocks: call it from a thread.
"""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from penstock.files import write_file
from penstock.text import MARK
from streaming.errors import NewerMessage
from streaming.jobs.codec import Usage

ROW = struct.Struct("<IBBHQIIII")
REASONING = struct.Struct("<I")
CHECK_BYTES = 4
ROW_BYTES = ROW.size + CHECK_BYTES
"""Bytes of a row without tokens of reasoning. One with them says so in its second byte of flags, and has their number
behind its other counts; rows of earlier versions have none."""
PLAN = "plan"
NO_TOKENS = Usage()


class LineOutcome(IntEnum):
    """Outcome of a line in a row."""

    DONE = 1
    """The answer is a result."""
    FAILED = 2
    """The answer is an error."""
    RETRIED = 3
    """The line's job failed; it is retried as a new job."""
    WITHDRAWN = 4
    """The line's job was cancelled in the queue; it will be put again as a new job."""

    @property
    def ends(self) -> bool:
        return self in (LineOutcome.DONE, LineOutcome.FAILED)


class AnswerRow(NamedTuple):
    """Position of a line's answer in the segments."""

    line: int
    outcome: LineOutcome
    attempt: int
    epoch: int
    offset: int
    length: int
    usage: Usage
    """Tokens of its job."""


class InputPlan:
    """Index of the input's lines, by their place among the lines that are not blank (from 0)."""

    def __init__(self) -> None:
        self.numbers = array("I")
        """Line numbers in the file, from 1."""
        self.offsets, self.lengths = array("Q"), array("I")
        self.order = array("I")
        """Distinct lines, in the order in which they are computed."""
        self.duplicate_of = array("I")
        """The line whose answer each one gets: itself, or an equal one before it."""
        self.tokens = array("I")
        """Estimates."""
        self.meant: dict[str, str] = {}
        """By alias that a line names, its model when the input was read."""

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, number: int, offset: int, length: int) -> int:
        """Add a line, as a duplicate of none; returns its place."""
        place = len(self.numbers)
        self.numbers.append(number)
        self.offsets.append(offset)
        self.lengths.append(length)
        self.duplicate_of.append(place)
        self.tokens.append(0)
        return place

    def read(self, source: BinaryIO, line: int) -> bytes:
        """Read a line of the input."""
        source.seek(self.offsets[line])
        return source.read(self.lengths[line])

    def copies(self) -> array[int]:
        """Count how many lines get the answer of each."""
        counts = array("I", bytes(4 * len(self)))
        for original in self.duplicate_of:
            counts[original] += 1
        return counts

    @property
    def _arrays(self) -> tuple[array[int], ...]:
        """As a plan is stored."""
        return self.numbers, self.offsets, self.lengths, self.order, self.duplicate_of, self.tokens

    def save(self, folder: Path) -> None:
        """Raises OSError."""
        aliases = [msgspec.msgpack.encode(self.meant)] if self.meant else []
        write_file(folder / PLAN, msgspec.msgpack.encode([each.tobytes() for each in self._arrays] + aliases))

    @classmethod
    def load(cls, folder: Path) -> InputPlan:
        """Raises FileNotFoundError before the input was read, NewerMessage for a plan that only a newer version can
        read: it leaves the batch to a process of that version."""
        plan = cls()
        data = (folder / PLAN).read_bytes()
        stored = msgspec.msgpack.decode(data, type=list[bytes])
        size = len(plan._arrays)
        if len(stored) > size + 1:
            raise NewerMessage(data)
        for each, column in zip(plan._arrays, stored[:size], strict=True):
            each.frombytes(column)
        if len(stored) > size:  # earlier versions have no aliases
            plan.meant = msgspec.msgpack.decode(stored[size], type=dict[str, str])
        return plan


class Segment:
    """Writer of one turn's answers and rows. Nothing is durable before `commit`."""

    def __init__(self, folder: Path, epoch: int) -> None:
        # A store that lost data may issue an epoch again: never write to an older segment.
        last = max((int(path.stem) for path in folder.glob("*.results")), default=0)
        self._folder, self._epoch = folder, max(epoch, last + 1)
        self._results: BinaryIO | None = None
        self._index: BinaryIO | None = None
        self._offset = 0
        self._answers: list[bytes] = []
        self._rows: list[AnswerRow] = []

    def add(
        self, line: int, outcome: LineOutcome, attempt: int = 0, answer: bytes = b"", usage: Usage = NO_TOKENS
    ) -> None:
        """Buffer one row with its answer, which is stored unchanged."""
        self._rows.append(AnswerRow(line, outcome, attempt, self._epoch, self._offset, len(answer), usage))
        self._answers.append(answer)
        self._offset += len(answer)

    def commit(self) -> list[AnswerRow]:
        """Write and fsync the answers, then their rows; returns the rows that are durable now. Raises OSError."""
        rows, self._rows = self._rows, []
        answers, self._answers = self._answers, []
        if not rows:
            return []
        if self._results is None or self._index is None:
            self._results = (self._folder / f"{self._epoch:08d}.results").open("xb", buffering=0)
            self._index = (self._folder / f"{self._epoch:08d}.index").open("xb", buffering=0)
        if data := b"".join(answers):
            _write(self._results, data)
        _write(self._index, b"".join(map(_packed, rows)))
        return rows

    def close(self) -> None:
        """Close the files; rows that were not committed are lost."""
        for file in (self._results, self._index):
            if file is not None:
                file.close()


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    os.fsync(file.fileno())


def _packed(row: AnswerRow) -> bytes:
    used = row.usage
    counts = row.offset, row.length, used.prompt, used.completion, used.cached
    data = ROW.pack(row.line, row.outcome, used.reasoning > 0, row.attempt, *counts)
    if used.reasoning:
        data += REASONING.pack(used.reasoning)
    return data + zlib.crc32(data).to_bytes(CHECK_BYTES, "little")


def rows_of(folder: Path, epoch: int) -> list[AnswerRow]:
    """Read the complete rows of one segment; stops at a row that a killed process left incomplete."""
    data = (folder / f"{epoch:08d}.index").read_bytes()
    rows = []
    at = 0
    while at + ROW_BYTES <= len(data):
        line, outcome, reasoned, attempt, offset, length, *tokens = ROW.unpack_from(data, at)
        end = at + ROW.size + (REASONING.size if reasoned else 0)
        check = data[end : end + CHECK_BYTES]
        if zlib.crc32(data[at:end]).to_bytes(CHECK_BYTES, "little") != check:
            break
        tokens += REASONING.unpack_from(data, at + ROW.size) if reasoned else ()
        rows.append(AnswerRow(line, LineOutcome(outcome), attempt, epoch, offset, length, Usage(*tokens)))
        at = end + CHECK_BYTES
    return rows


class Ledger:
    """State of all lines from all segments: how each ended, and how often it was tried."""

    def __init__(self, lines: int) -> None:
        self.ends: list[AnswerRow | None] = [None] * lines
        self.attempts = array("H", bytes(2 * lines))
        """Number of each line's current job."""
        self.failures = array("H", bytes(2 * lines))
        """How many of its jobs failed and were tried again."""

    @classmethod
    def load(cls, folder: Path, lines: int) -> Ledger:
        """Raises OSError."""
        ledger = cls(lines)
        for path in sorted(folder.glob("*.index")):
            ledger.take(rows_of(folder, int(path.stem)))
        return ledger

    def take(self, rows: Sequence[AnswerRow]) -> list[AnswerRow]:
        """Apply durable rows; returns those that ended their line. The first row that ends a line counts."""
        ended = []
        for row in rows:
            if row.line >= len(self.ends):
                continue
            if row.outcome.ends:
                if self.ends[row.line] is None:
                    self.ends[row.line] = row
                    ended.append(row)
            elif row.attempt > self.attempts[row.line]:
                self.attempts[row.line] = row.attempt
                self.failures[row.line] += row.outcome is LineOutcome.RETRIED
        return ended


def read_answer(folder: Path, row: AnswerRow) -> bytes:
    """Read an answer by its row. Raises OSError."""
    with (folder / f"{row.epoch:08d}.results").open("rb") as file:
        file.seek(row.offset)
        return file.read(row.length)


def lines_of(source: BinaryIO, longest: int) -> Iterator[tuple[int, int, bytes]]:
    """Iterate over the lines that are not blank: number (from 1), offset and bytes. A line longer than `longest` bytes
    is truncated. Newlines and carriage returns end a line: text may hold other separators. A byte order mark at the
    start belongs to no line."""
    number, offset = 0, len(MARK) if source.read(len(MARK)) == MARK else 0
    source.seek(offset)
    while data := source.readline(longest + 1):
        if b"\r" in data and len(parts := data.splitlines(keepends=True)) > 1:
            if not data.endswith(b"\n"):
                parts.pop()  # it may go on
            for part in parts:
                number += 1
                if part.strip():
                    yield number, offset, part
                offset += len(part)
            source.seek(offset)
            continue
        number += 1
        length = len(data)
        while not data.endswith(b"\n") and (more := source.readline(1 << 20)):
            length += len(more)
            if more.endswith(b"\n"):
                break
        if data.strip():
            yield number, offset, data
        offset += length
