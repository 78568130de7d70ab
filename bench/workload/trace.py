"""A trace of requests in the columns of BurstGPT: read, write, slice, scale.

Columns: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type; newer files add Session ID and
Elapsed time. A row without response tokens is a request that failed: counted, never sent.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
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
    session: str = ""


class Malformed(ValueError):
    """A row that cannot be read, with its number and what is wrong."""


@dataclass(slots=True)
class Trace:
    """A file as an iterable of requests; `failed` counts the rows that were left out on the way."""

    path: Path
    failed: int = 0

    def __iter__(self) -> Iterator[TraceRow]:
        """Rows in the order of the file. Raises Malformed, OSError."""
        with self.path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
                raise Malformed(f"{self.path}: no column {', '.join(map(repr, missing))}")
            for number, row in enumerate(rows, 2):
                request = _request(row, f"{self.path}, line {number}")
                if request.answer > 0:
                    yield request
                else:
                    self.failed += 1


def _request(row: dict[str, str], where: str) -> TraceRow:
    try:
        at = float(row["Timestamp"])
        prompt, answer = int(float(row["Request tokens"])), int(float(row["Response tokens"]))
    except (TypeError, ValueError) as error:
        raise Malformed(f"{where}: {error}") from None
    if at < 0 or prompt < 0 or answer < 0:
        raise Malformed(f"{where}: a number is negative")
    lane = LANES.get(row["Log Type"].strip(), "standard")
    return TraceRow(at, max(1, prompt), answer, lane, row["Model"].strip(), row.get("Session ID") or "")


def write(path: Path, requests: Iterable[TraceRow]) -> int:
    """Write a trace that `Trace` reads; returns the number of rows. A lane BurstGPT does not know is an API log."""
    types = {lane: kind for kind, lane in LANES.items()}
    count = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([*COLUMNS, "Session ID"])
        for count, each in enumerate(requests, 1):  # noqa: B007 - the last one is the answer
            total = each.prompt + each.answer
            kind = types.get(each.lane, API)
            rows.writerow([f"{each.at:.3f}", each.model, each.prompt, each.answer, total, kind, each.session])
    return count


def cut(
    requests: Iterable[TraceRow], *, begin: float = 0.0, end: float = float("inf"), scale: float = 1.0, longest: int = 0
) -> Iterator[TraceRow]:
    """The requests of [begin, end) seconds, `scale` times as fast, so that the first may come at 0; lengths cut to a
    context of `longest` tokens, the prompt first (0: as they are)."""
    for each in requests:
        if begin <= each.at < end:
            yield _clipped(replace(each, at=(each.at - begin) / scale), longest)


def _clipped(request: TraceRow, longest: int) -> TraceRow:
    if not longest or request.prompt + request.answer <= longest:
        return request
    answer = min(request.answer, longest - 1)
    return replace(request, prompt=min(request.prompt, longest - answer), answer=answer)
