"""Wait sampler: measures how long a sample of the jobs that this process accepted waited, to calibrate the estimates.

It reads the record of a sampled job until the job has started. The record holds when the first worker claimed it, so a
late look costs no accuracy. For each source it takes at most one job a second and watches MAX_WATCHED at once.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from api.openai.wait import Wait
from api.waits.calibration import EstimateSource, Prediction, WaitErrors
from penstock.loops import ExpectedErrors, run_periodically
from streaming.errors import Unavailable
from streaming.jobs.job import JobState
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord

log = logging.getLogger(__name__)

MAX_WATCHED = 32
"""Waiting jobs watched for each source."""
SAMPLE_INTERVAL_S = 1.0
"""Least time between two sampled jobs of one source, and between two looks."""
RECHECK_SHARE = 0.1
"""A job that still waits is looked at again after this share of its age."""
CLOCK_SLACK_S = 1.0
"""A wait that is longer by more than this than the job has been watched is not one: its record is corrupt, or the
store's clock was set."""


@dataclass(slots=True)
class _Watched:
    prediction: Prediction
    told: Wait
    since: float
    look_at: float


class WaitSampler:
    """Watches sampled jobs and teaches their waits to `errors`."""

    def __init__(self, reader: JobReader, errors: WaitErrors) -> None:
        self._reader, self._errors = reader, errors
        self._watched: dict[str, _Watched] = {}
        self._counts: Counter[EstimateSource] = Counter()
        self._sampled_at: dict[EstimateSource, float] = {}

    def note(self, job_id: str, prediction: Prediction, told: Wait, limit_ms: int | None = None) -> None:
        """Consider a job for the sample; it was accepted just now, and its client was told this wait. `limit_ms`: it
        expires then."""
        now, source = time.monotonic(), prediction.source
        if now - self._sampled_at.get(source, float("-inf")) < SAMPLE_INTERVAL_S or self._counts[source] >= MAX_WATCHED:
            return
        self._sampled_at[source] = now
        ends_s = prediction.seconds if limit_ms is None else min(prediction.seconds, limit_ms / 1000)
        self.watch(job_id, prediction, told, now + max(SAMPLE_INTERVAL_S, ends_s))

    def watch(self, job_id: str, prediction: Prediction, told: Wait, look_at: float) -> None:
        """Look at a job from then on (monotonic time) until it has started."""
        if job_id not in self._watched:
            self._counts[prediction.source] += 1
        self._watched[job_id] = _Watched(prediction, told, time.monotonic(), look_at)

    @property
    def watched(self) -> int:
        """Jobs watched."""
        return len(self._watched)

    def due(self, now: float) -> list[str]:
        """The jobs to look at."""
        return [job_id for job_id, watched in self._watched.items() if watched.look_at <= now]

    async def keep_measuring(self) -> None:
        """Look at the watched jobs for ever."""
        expected = ExpectedErrors(Unavailable, log.debug, "waits are not measured: %s")
        await run_periodically(self.look, SAMPLE_INTERVAL_S, expected)

    async def look(self) -> None:
        """Read the jobs that are due, and learn from those that have started. Raises Unavailable."""
        now = time.monotonic()
        due = self.due(now)
        records = await self._reader.records(due, bodies=False, resultless=due) if due else []
        for job_id, record in zip(due, records, strict=True):
            watched = self._watched[job_id]
            measured = None if record is None else measured_wait(record, watched.prediction.seconds)
            if measured is not None:
                if measured.seconds <= now - watched.since + CLOCK_SLACK_S:
                    self._errors.learn(watched.prediction, watched.told, measured.seconds, bound=measured.bound)
            elif record is not None and not record.state.final:
                watched.look_at = now + max(SAMPLE_INTERVAL_S, RECHECK_SHARE * (now - watched.since))
                continue
            del self._watched[job_id]
            self._counts[watched.prediction.source] -= 1


class MeasuredWait(NamedTuple):
    """How long a job waited."""

    seconds: float
    bound: bool = False
    """It would have waited longer."""


def measured_wait(record: JobRecord, predicted_s: float) -> MeasuredWait | None:
    """Return how long a job waited; None while it waits.

    A job that ended in the queue would have waited longer still. If it expired, or waited for longer than predicted,
    its wait is a bound; else it says nothing (None): its client cancelled it early.
    """
    if record.started_ms:
        return MeasuredWait(max(0, record.started_ms - record.created_ms) / 1000)
    waited_s = max(0, record.done_ms - record.created_ms) / 1000
    if record.state is JobState.EXPIRED or (record.state.final and waited_s > predicted_s):
        return MeasuredWait(waited_s, bound=True)
    return None
