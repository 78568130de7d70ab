"""Job events: the server-sent events of /v1/jobs/{id}/events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from api.openai import cursor
from api.openai.cursor import Cursor
from api.openai.errors import wait_fields
from api.openai.rendering import Facts, Waiting, event_data, finish_reasons, job_object, to_json, token_logprobs
from penstock.tools import AnswerPart
from streaming.fleet.process import without_host
from streaming.jobs.codec import Delta
from streaming.jobs.job import PastAttempt
from streaming.jobs.records import JobRecord


class JobEvent(NamedTuple):
    """One server-sent event of /v1/jobs/{id}/events; `id` is the cursor to resume after it, None: not in the log."""

    name: str
    id: Cursor | None
    data: dict[str, Any]

    def encode(self) -> bytes:
        cursor = b"" if self.id is None else b"id: %b\n" % str(self.id).encode()
        return b"event: %b\n%bdata: %b\n\n" % (self.name.encode(), cursor, to_json(self.data))


def queued_event(epoch: int, waiting: Waiting) -> JobEvent:
    return JobEvent("queued", cursor.queued(epoch), _position(waiting))


def position_event(waiting: Waiting) -> JobEvent:
    """Render the job's new position in its lane."""
    return JobEvent("queue.position", None, _position(waiting))


def _position(waiting: Waiting) -> dict[str, Any]:
    return {"position": waiting.before, **wait_fields(waiting.wait)}


def started_event(event_id: Cursor, ordinal: int, record: JobRecord) -> JobEvent:
    """Render the beginning of a job's run number `ordinal`: its attempt, and which attempt it goes on from, after how
    long a pause."""
    run = record.runs[ordinal - 1].run
    now, before = record.attempts_by_run.get(run), record.attempt_before(run)
    data: dict[str, Any] = {"worker": without_host(now.worker if now else run.worker), "attempt": ordinal}
    if now and before:
        pause_ms = max(0, now.started_ms - before.ended_ms)
        data["previous"] = {"worker": without_host(before.worker), "outcome": before.outcome, "pause_ms": pause_ms}
    return JobEvent("started", event_id, data)


def interrupted_event(attempt: PastAttempt) -> JobEvent:
    """Render the end of an attempt after which the job waits for another worker."""
    return JobEvent("interrupted", None, {"worker": without_host(attempt.worker), "outcome": attempt.outcome})


def delta_event(facts: Facts, event_id: Cursor, delta: Delta, parts: Iterable[AnswerPart] | None = None) -> JobEvent:
    """Render a delta. `parts`: what of it is text and what are calls; None: all of it is text."""
    data: dict[str, Any] = {"index": delta.index, "text": delta.text, "tokens": delta.n}
    if delta.served_by:
        data["served_by"] = delta.served_by
    if parts is not None:
        data |= event_data(facts.job.id, delta.index, parts)
    if delta.extras:
        data["extras"] = delta.extras
    if facts.logprobs:
        data["logprobs"] = token_logprobs(delta.logprobs)
    return JobEvent("delta", event_id, data)


def reset_event(epoch: int) -> JobEvent:
    """Tell the reader to discard what it has: it differs from what is stored, and the two must not be spliced."""
    return JobEvent("stream.reset", Cursor(epoch, cursor.START), {"epoch": epoch})


def terminal_event(record: JobRecord) -> JobEvent:
    """Render the last event, named after the final state. It omits the result, whose tokens were in the deltas."""
    data = job_object(record) | {"finish_reasons": finish_reasons(record)}
    readable = record.terminal is None or record.terminal.state is record.state
    return JobEvent(record.state.value if readable else "error", cursor.latest_of(record), data)
