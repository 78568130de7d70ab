"""Request records of jobs that a script ended (cancelled in the queue, expired, given up), from their job records."""

from __future__ import annotations

from collections import Counter

from streaming.jobs.records import JobRecord
from streaming.jobs.terminal import Generated
from telemetry.records.schema import RequestRecord


def request_record(record: JobRecord, by: str) -> RequestRecord:
    """The record of a job that has ended. `by`: the process that swept.

    A sweep does not read bodies, so the time at which the API process received the request is not known.
    """
    stamps, job, end = record.stamps, record.job, record.terminal
    outcomes = Counter([attempt.outcome for attempt in record.attempts])
    generated, failure = (end.generated, end.failure) if end else (Generated(), None)
    return RequestRecord(
        id=job.id,
        ended_us=stamps.ended or record.done_ms * 1000,
        state=record.state.value,
        model=job.model,
        lane=job.priority.value,
        tenant=job.tenant,
        by=by,
        code=failure.code if failure else "",
        cancelled_by=end.cancelled_by if end else "",
        accepted_us=stamps.accepted or 0,
        started_us=stamps.started or 0,
        claimed_us=stamps.claimed or 0,
        released_us=generated.released,
        scheduled_us=generated.scheduled,
        first_us=generated.first,
        last_us=generated.last,
        clock_us=generated.clock_us,
        shown_us=generated.shown,
        shown_claimed_us=generated.shown_claimed,
        kept_us=generated.kept,
        prompt_tokens=end.usage.prompt if end else 0,
        completion_tokens=end.usage.completion if end else 0,
        cached_tokens=end.usage.cached if end else 0,
        attempts=record.attempt,
        lost=outcomes["lost"],
        handed_back=outcomes["handed_back"] + outcomes["returned"],
        preempted=outcomes["preempted"],
    )
