"""Requests of a trace, in BurstGPT's columns, APEX's JSON lines or Penstock's own records, and lengths of workloads.

APEX's lines: {"StartTimeOffset": ns, "ContextTokens": n, "GeneratedTokens": n}. BurstGPT's columns: Timestamp (s),
Model, Request tokens, Response tokens, Total tokens, Log Type; newer files add Session ID and Elapsed time. A row
without response tokens is a request that failed: counted, never sent.
"""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.text import fault_of
from planner.facts.catalogue import PlanError, nearest
from planner.load import RequestLengths
from telemetry.records.reader import Evidence, ReportedRequest, Skipped, evidence_of, read_file, read_records

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


class Malformed(PlanError):
    """A row that cannot be read, with its number and what is wrong."""


@dataclass(slots=True)
class Trace:
    """A file, or records in a folder or file, as an iterable of requests; `failed` counts the rows that were left out
    on the way. The name of a file ends in .jsonl if it has JSON lines."""

    path: Path
    plain: bool = False
    """Whether a CSV may have the columns LENGTHS instead: requests without a time."""
    failed: int = 0

    def __iter__(self) -> Iterator[TraceRow]:
        """Rows in the order of the file; of records, by their arrival. Raises Malformed, OSError, PlanError."""
        if is_records(self.path):
            rows, self.failed = rows_of(records_in(self.path).requests)
            yield from rows
            return
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
        prompt, answer = each.prompt, each.answer
        if longest and prompt + answer > longest:
            answer = min(answer, longest - 1)
            prompt = min(prompt, longest - answer)
        yield replace(each, at=each.at / scale, prompt=prompt, answer=answer)


# --- records ---------------------------------------------------------------------------------------------------------


def records_in(path: Path, begin: float = 0.0, since: str | None = None) -> Evidence:
    """The records of a folder or of one file, from a time on, which `since` says in words. Raises PlanError."""
    skipped, read = Skipped(), read_records if path.is_dir() else read_file
    try:
        found = evidence_of(read(path, begin, float("inf"), skipped))
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from None
    if skipped.unreadable and not found.requests:
        raise PlanError(skipped.unreadable[0])
    if not found.requests:
        lost = f" ({skipped.torn} lines are no records)" if skipped.torn else ""
        raise PlanError(f"{path} has no record of a request{f' since {since}' if since else ''}{lost}")
    return found


def is_records(path: Path) -> bool:
    """Whether a file or folder has records, by its first line."""
    if path.is_dir():
        return True
    if path.suffix != ".jsonl":
        return False
    with path.open("rb") as file:
        return b'"kind"' in next(iter(file), b"")


def rows_of(requests: Iterable[ReportedRequest]) -> tuple[list[TraceRow], int]:
    """The requests as a trace, by their arrival, and how many are left out because they had no answer."""
    requests = list(requests)
    answered = [each for each in requests if each.completed and each.record.completion_tokens > 0]
    arrived = [((each.stamps.received or each.record.ended_us) / 1e6, each.record) for each in answered]
    begin = min((at for at, _ in arrived), default=0.0)
    rows = [
        TraceRow(at - begin, max(1, own.prompt_tokens), own.completion_tokens, own.lane or "standard", own.model)
        for at, own in arrived
    ]
    return sorted(rows, key=lambda row: row.at), len(requests) - len(rows)


# --- workloads -------------------------------------------------------------------------------------------------------

MAX_ROWS = 100_000
"""Rows that are read of a file."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths, and where they come from."""

    name: str
    source: str
    lengths: RequestLengths
    requests: int = 0
    """That its protocol asks at each batch size or rate; 0: it says none."""


@cache
def workloads() -> dict[str, Workload]:
    """The named ones."""
    text = (Path(__file__).parent / "facts" / "workloads.toml").read_text(encoding="utf-8")
    return {
        name: Workload(name, row["source"], RequestLengths(row["prompt"], row["answer"]), row.get("requests", 0))
        for name, row in tomllib.loads(text).items()
    }


def workload(name: str) -> Workload:
    """A named workload, or the lengths in a file. Raises PlanError.

    A file is a CSV with the columns `prompt` and `answer`, a CSV in BurstGPT's columns, a `.jsonl` in APEX's form, or
    has records, as a folder does; of all but the first, failed requests are left out.
    """
    found, path = workloads().get(name.lower()), Path(name)
    if found is not None:
        return found
    if path.exists():
        try:
            kind = "records" if is_records(path) else "file"
            mix = mix_of(((row.prompt, row.answer) for row in Trace(path, plain=True)), f"{path}")
        except Malformed as error:
            raise PlanError(f"--workload {error}") from None
        except OSError as error:
            raise PlanError(f"--workload {path}: {error.strerror or error}") from None
        return Workload(path.name, f"the {kind} {path}", mix)
    if path.suffix or "/" in name:
        raise PlanError(f"--workload {name}: there is no such file")
    raise PlanError(f"no workload {name!r} is known: {nearest(name, workloads())}, or give a file of lengths")


def mix_of(rows: Iterable[tuple[int, int]], what: str) -> RequestLengths:
    """The lengths whose means are those of the rows, at most MAX_ROWS of them. Raises PlanError."""
    mix = tuple(islice(rows, MAX_ROWS))
    if not mix:
        raise PlanError(f"{what} has no request with an answer")
    prompt, answer = (max(1, round(sum(each) / len(mix))) for each in zip(*mix, strict=True))
    return RequestLengths(prompt, answer, mix)
