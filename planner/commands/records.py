"""Records of a Penstock as inputs of a plan: what its engines served, and the trace of its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import TypeAlias

from planner.facts.catalogue import PlanError
from planner.fit import NO_LIMIT, ServedText, by_worker
from planner.simulator.engine import EngineShape
from planner.simulator.trace import TraceRow
from telemetry.records.reader import Evidence, ReportedRequest, Skipped, evidence_of, read_file, read_records

DEFAULT_STEP_TOKENS, EMBEDDED_STEP_TOKENS = 512, 128
"""Prompt tokens of one step of the simulated and of the embedded engine, unless they are set otherwise."""


RecordsSource: TypeAlias = Callable[[Path | None, str | None], tuple[Path, float]]
"""Where the records are, and from which Unix time on they count, by --records and --since. Raises PlanError."""


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


def of_model(requests: Iterable[ReportedRequest], model: str | None) -> list[ReportedRequest]:
    """The requests of one model. Raises PlanError if none is named and there are several, or if there is no such."""
    found = [each for each in requests if each.record.model]
    names = sorted({each.record.model for each in found})
    if model is None and len(names) > 1:
        raise PlanError(f"the records are of {', '.join(names)}: name one with --model")
    if model is not None and model not in names:
        raise PlanError(f"the records have no request of {model}; they are of {', '.join(names) or 'no model'}")
    return [each for each in found if model in (None, each.record.model)]


def served_of(requests: Iterable[ReportedRequest]) -> list[ServedText]:
    """The texts of the requests that ended in their first attempt: several for a request with several choices."""
    return list(chain.from_iterable(map(_texts, requests)))


def _texts(request: ReportedRequest) -> list[ServedText]:
    record = request.record
    begun = record.scheduled_us or record.released_us
    arrived = record.received_us or record.accepted_us
    timed = 0 < arrived <= begun <= record.first_us <= record.last_us
    if not request.completed or record.attempts != 1 or not timed or record.completion_tokens < 1:
        return []
    choices = max(1, record.choices)
    heard = request.stamps.first_sent or record.first_us
    text = ServedText(
        record.by, arrived / 1e6, begun / 1e6, record.first_us / 1e6, record.last_us / 1e6, heard / 1e6,
        max(1, record.prompt_tokens - record.cached_tokens), max(1, record.completion_tokens // choices),
        record.lane or "standard", record.tenant,
    )  # fmt: skip
    return [text] * choices


def limits_of(
    evidence: Evidence, served: Sequence[ServedText], step_tokens: int, *, by_slot: bool = False
) -> EngineShape:
    """What an engine takes at once, as its worker's samples say; without them, what one was seen to hold. `by_slot`: it
    is llama.cpp."""
    workers = by_worker(served)
    samples = [each for (name, _), rows in evidence.samples.items() if name in workers for each in rows]
    seen = (_at_once([(each.begun_s, each.last_s) for each in texts]) for texts in workers.values())
    slots = max((each.slots for each in samples), default=0) or max(seen, default=1)
    kv_tokens = max((each.kv_tokens for each in samples), default=0) or NO_LIMIT
    return EngineShape(kv_tokens, slots, step_tokens, by_slot=by_slot)


def workers_of(served: Sequence[ServedText]) -> int:
    """How many workers served at the same time, at most: each from its first text to its last."""
    return _at_once([(texts[0].begun_s, max(each.last_s for each in texts)) for texts in by_worker(served).values()])


def _at_once(spans: Sequence[tuple[float, float]]) -> int:
    """The most spans that overlap."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    return max(accumulate(change for _, change in changes), default=1)


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
        TraceRow(
            at - begin, max(1, each.prompt_tokens), each.completion_tokens, each.lane or "standard", each.model
        )
        for at, each in arrived
    ]  # fmt: skip
    return sorted(rows, key=lambda row: row.at), len(requests) - len(rows)
