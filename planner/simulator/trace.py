"""Requests of a trace, in BurstGPT's columns or APEX's JSON lines.

APEX's lines: {"StartTimeOffset": ns, "ContextTokens": n, "GeneratedTokens": n}. BurstGPT's columns: Timestamp (s),
Model, Request tokens, Response tokens, Total tokens, Log Type; newer files add Session ID and Elapsed time. A row
without response tokens is a request that failed: counted, never sent.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.text import fault_of

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
LENGTHS = ("prompt", "answer")
CONVERSATION, API = "Conversation log", "API log"
LANES = {CONVERSATION: "interactive", API: "standard"}
"""People wait for a conversation; a program that calls the API can wait a little."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One row. `at` in seconds since the trace began."""

    at: float
    prompt: int
    answer: int
    lane: str = "interactive"
    model: str = "ChatGPT"


class ApexLine(msgspec.Struct, frozen=True):
    """One line of APEX's form."""

    StartTimeOffset: Annotated[int, msgspec.Meta(ge=0)]
    """Nanoseconds since the trace began."""
    ContextTokens: Annotated[int, msgspec.Meta(ge=0)]
    GeneratedTokens: Annotated[int, msgspec.Meta(ge=0)]


class Malformed(ValueError):
    """A row that cannot be read, with its number and what is wrong."""


@dataclass(slots=True)
class Trace:
    """A file as an iterable of requests; `failed` counts the rows that were left out on the way. Its name ends in
    .jsonl if it has JSON lines."""

    path: Path
    plain: bool = False
    """Whether a CSV may have the columns LENGTHS instead: requests without a time."""
    failed: int = 0

    def __iter__(self) -> Iterator[TraceRow]:
        """Rows in the order of the file. Raises Malformed, OSError."""
        try:
            for request in self._lines() if self.path.suffix == ".jsonl" else self._rows():
                if request.answer > 0:
                    yield request
                else:
                    self.failed += 1
        except UnicodeDecodeError:
            raise Malformed(f"{self.path}: it is {fault_of(self.path.read_bytes())}") from None

    def _lines(self) -> Iterator[TraceRow]:
        with self.path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                try:
                    found = msgspec.json.decode(line, type=ApexLine)
                except msgspec.DecodeError as error:
                    raise Malformed(f"{self.path}, line {number}: {error}") from None
                yield TraceRow(found.StartTimeOffset / 1e9, max(1, found.ContextTokens), found.GeneratedTokens)

    def _rows(self) -> Iterator[TraceRow]:
        with self.path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            try:
                names = rows.fieldnames or ()
                is_plain = self.plain and set(LENGTHS) <= set(names)
                if not is_plain and (missing := [name for name in COLUMNS if name not in names]):
                    other = f"; or write the columns {','.join(LENGTHS)}" if self.plain else ""
                    raise Malformed(f"{self.path}: no column {', '.join(map(repr, missing))}{other}")
                for row in rows:
                    yield _request(row, is_plain, f"{self.path}, line {rows.line_num}")
            except csv.Error as error:
                raise Malformed(f"{self.path}, line {rows.line_num + 1}: {error}") from None


def _request(row: dict[str, str], is_plain: bool, where: str) -> TraceRow:
    try:
        at = 0.0 if is_plain else float(row["Timestamp"])
        prompt, answer = (int(float(row[name])) for name in (LENGTHS if is_plain else COLUMNS[2:4]))
    except (TypeError, ValueError, OverflowError) as error:
        raise Malformed(f"{where}: {error}") from None
    if at < 0 or prompt < 0 or answer < 0 or not math.isfinite(at):
        raise Malformed(f"{where}: a number is negative or not finite")
    lane = LANES.get((row.get("Log Type") or "").strip(), "standard")
    return TraceRow(at, max(1, prompt), answer, lane, (row.get("Model") or "").strip())


def cut(requests: Iterable[TraceRow], *, scale: float = 1.0, longest: int = 0) -> Iterator[TraceRow]:
    """The requests `scale` times as fast; lengths cut to a context of `longest` tokens, the prompt first (0: as they
    are)."""
    for each in requests:
        yield _clipped(replace(each, at=each.at / scale), longest)


def _clipped(request: TraceRow, longest: int) -> TraceRow:
    if not longest or request.prompt + request.answer <= longest:
        return request
    answer = min(request.answer, longest - 1)
    return replace(request, prompt=min(request.prompt, longest - answer), answer=answer)
