"""Request records of a worker: one for each job whose end the store has taken from it.

A record is built when the job is over, and written once the store has its end: a job that another worker ends, or that
a script has ended before, gets its record there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from streaming.jobs.lease import HANDED_BACK, PREEMPTED, RETURNED
from streaming.jobs.records import JobRecord
from streaming.jobs.request_records import request_record
from streaming.jobs.terminal import Terminal
from telemetry.records.schema import RequestRecord
from telemetry.records.writer import NO_RECORDS, RecordSink
from workers.attempt import Attempt


class RequestRecords:
    """One per worker process."""

    def __init__(self, model: str, sink: RecordSink = NO_RECORDS, process: str = "") -> None:
        """`process`: the worker's name in `penstock ps`."""
        self._model, self._sink, self._process = model, sink, process
        self._built: dict[str, RequestRecord] = {}
        """By job, while the store has not answered."""

    def ended(self, attempt: Attempt, end: Terminal, ended_us: int) -> None:
        """Build the record of a job that is over; `ended_us`: Redis time, 0 while it is not known here."""
        if self._sink is not NO_RECORDS:
            self._built[end.job] = record_of(attempt, end, ended_us or wall_us(), self._model, self._process)

    def unreadable(self, end: Terminal, ended_us: int) -> None:
        """Build the record of a job that cannot be read, and fails."""
        self._built[end.job] = RequestRecord(
            id=end.job,
            ended_us=ended_us or wall_us(),
            state=end.state.value,
            model=self._model,
            by=self._process,
            code=end.failure.code if end.failure else "",
        )

    def ended_by_script(self, record: JobRecord) -> None:
        """Write the record of a job that a script ended, which this process's sweep has found."""
        self._sink.write(request_record(record, self._process))

    def released(self, job_id: str) -> None:
        """Another worker will end the job."""
        self._built.pop(job_id, None)

    def written(self, ends: Iterable[Terminal]) -> None:
        """Write the records of jobs whose ends the store has taken."""
        for end in ends:
            if (record := self._built.pop(end.job, None)) is not None:
                self._sink.write(record)


def wall_us() -> int:
    """This machine's time in microseconds."""
    return int(time.time() * 1_000_000)


def record_of(attempt: Attempt, end: Terminal, ended_us: int, model: str, process: str) -> RequestRecord:
    """The record of a job that this worker ends."""
    job, claim, generated, usage = attempt.job, attempt.claim, end.generated, end.usage
    outcomes = [each.outcome for each in claim.earlier]
    return RequestRecord(
        id=job.id,
        ended_us=ended_us,
        state=end.state.value,
        model=model,
        lane=job.priority.value,
        tenant=job.tenant,
        by=process,
        code=end.failure.code if end.failure else "",
        cancelled_by=end.cancelled_by,
        received_us=job.received_us,
        accepted_us=claim.accepted_us,
        started_us=claim.started_us or claim.claimed_us,
        claimed_us=claim.claimed_us,
        released_us=generated.released,
        scheduled_us=generated.scheduled,
        first_us=generated.first,
        last_us=generated.last,
        clock_us=generated.clock_us,
        shown_us=generated.shown,
        shown_claimed_us=generated.shown_claimed,
        kept_us=generated.kept,
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        cached_tokens=usage.cached,
        continued_tokens=sum(attempt.past_tokens),
        choices=job.choices,
        stream=job.stream,
        attempts=claim.attempt,
        lost=outcomes.count("lost"),
        handed_back=outcomes.count(HANDED_BACK) + outcomes.count(RETURNED),
        preempted=outcomes.count(PREEMPTED),
    )
