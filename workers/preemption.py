"""Preemption: takes running batch jobs out of the engine for jobs of the interactive lane, and puts them back.

It also puts back the jobs that an engine gives back because what computes them is away, and those of a worker that
drains. Such a job waits in its lane with all that it has generated, and any worker continues it: its reader sees a
pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from penstock.engine import Capabilities, Failure
from penstock.loops import ExpectedErrors, backoff, retry, spawn
from streaming.errors import Fenced, Unavailable
from streaming.jobs.job import Job, JobState, is_continuable
from streaming.jobs.lease import HANDED_BACK, PREEMPTED, RETURNED, Lease
from streaming.order import Priority
from telemetry.logs import EventLog
from workers.attempt import Attempt
from workers.choices import ChoiceStarter
from workers.held_jobs import HeldJobs
from workers.record import Recorder
from workers.slot_shares import MAX_PARKED_DELTAS, MAX_VICTIMS, RunningJob, choose_victims, preemptible

log = logging.getLogger(__name__)
events = EventLog(__name__)

MAX_FREED_SLOTS = 4
"""Slots that one claim may ask to be freed: several workers may answer the same burst."""
RETRY_INTERVAL_S = 0.25
"""How often a job of lane interactive that waits at the gate looks for batch jobs that may be preempted by now."""
GIVEN_UP = Failure("upstream_error", "The engine has given this job back too often without a new token.", 502)
MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.02, 0.25
MAX_RETURNS = 20
"""An engine gives a job back while what computes it is away, which costs no attempt. A job that is given back so often
may itself be what brings that down."""
MAX_KNOWN = 4096
"""Jobs whose counts are kept."""


class Preemption:
    """Preempts jobs of one worker. Each job that it takes stays this worker's until the store has put it back."""

    def __init__(
        self,
        lease: Lease,
        held: HeldJobs,
        starter: ChoiceStarter,
        recorder: Recorder,
        capabilities: Capabilities,
        on_fenced: Callable[[int], None],
    ) -> None:
        """`on_fenced`: called with the partition in which this worker has lost its lease."""
        self._lease, self._held, self._starter, self._recorder = lease, held, starter, recorder
        self._capabilities, self._on_fenced = capabilities, on_fenced
        self.tasks: set[asyncio.Task[None]] = set()
        """One for each job that is being put back."""
        self._returns: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """By job that the engine gave back: how often without a new delta, and its number of deltas then."""
        self._retry_at = 0.0

    def freeable_slots(self) -> int:
        """How many slots of the engine could be freed now, at most MAX_FREED_SLOTS."""
        if not self._starter.batch_texts:
            return 0
        return min(MAX_FREED_SLOTS, sum(job.texts for job in preemptible(self._running(), time.monotonic())))

    def make_room(self, jobs: Sequence[Job]) -> None:
        """Preempt batch jobs, if these jobs of lane interactive, which begin now, find the slots taken. Each job needs
        one slot at once: its other choices wait their turn. No text loses its slot to a tokenizer's task."""
        if texts := sum([job.task is None or job.task.computes for job in jobs]):
            self.free(self._starter.texts + texts - self._starter.stats().slots)

    def free(self, texts: int) -> int:
        """Preempt jobs until `texts` slots are free; returns how many jobs. The engine frees them with its step."""
        if texts <= 0:  # most claims find room: the running jobs are not listed for them
            return 0
        victims = choose_victims(self._running(), texts, time.monotonic())
        for job_id in victims:
            reason = f"lane interactive needs {texts} places"
            events.write("a job is preempted", job=job_id, worker=self._lease.name, reason=reason)
            self._recorder.preempted()
            self._take_out(job_id, PREEMPTED)
        return len(victims)

    def hand_back(self, attempt: Attempt) -> bool:
        """Put back a job that the engine gives back. Returns False, and has it end, if it was stopped, or if it was
        given back too often."""
        job_id = attempt.job.id
        if attempt.stopped:
            return False
        count, deltas = self._returns.pop(job_id, (0, attempt.seq))
        count = 1 if attempt.seq > deltas else count + 1
        self._returns[job_id] = count, attempt.seq
        if len(self._returns) > MAX_KNOWN:
            self._returns.popitem(last=False)
        if count > MAX_RETURNS:
            attempt.stop(JobState.FAILED, GIVEN_UP)
            return False
        events.write("the engine gives a job back", job=job_id, worker=self._lease.name)
        self._take_out(job_id, RETURNED)
        return True

    def _take_out(self, job_id: str, outcome: str) -> None:
        """Take a job out of the engine, and begin to put it back."""
        attempt = self._held.park(job_id)
        self._starter.let_go(attempt)
        self._recorder.released(job_id, outcome)
        spawn(self.put_back(attempt, outcome), self.tasks)

    def make_way(self, attempt: Attempt) -> None:
        """Preempt jobs one by one until the gate lets a job of lane interactive begin, at most MAX_VICTIMS of them;
        none if all of them together would not make enough room."""
        if attempt.last_start or not attempt.waits:
            return
        victims = {job.id for job in preemptible(self._running(), time.monotonic())[:MAX_VICTIMS]}
        if not victims or not self._starter.would_start(attempt, victims):
            return
        for _ in victims:
            if attempt.last_start or not attempt.waits or not self.free(1):
                return
            self._starter.start_waiting()

    def retry_preemption(self, now: float) -> None:
        """Try once more for the first job of lane interactive that waits at the gate: by now, batch jobs may have run
        for long enough. The engine calls this within a step, so it is done later. `now`: monotonic seconds."""
        if now < self._retry_at:
            return
        self._retry_at = now + RETRY_INTERVAL_S
        for attempt in self._starter.waiting.values():
            waits = attempt.job.task is None and not attempt.last_start
            if waits and attempt.job.priority is Priority.INTERACTIVE:
                asyncio.get_running_loop().call_soon(self.make_way, attempt)
                return

    def _running(self) -> list[RunningJob]:
        now = [attempt for attempt in self._held.attempts.values() if not (attempt.over or attempt.stopped)]
        return [
            RunningJob(
                attempt.job.id,
                attempt.job.priority,
                attempt.stamps.released,
                attempt.started,
                bool(attempt.claim.earlier_runs),
                is_continuable(attempt.job, self._capabilities),
                attempt.seq,
            )
            for attempt in now
        ]

    async def put_back(self, attempt: Attempt, outcome: str) -> None:
        """Put the job back with its tokens. Until the store has done it, the job counts as held here. For a long job of
        a worker that leaves, the store keeps the worker's log instead; one that goes on would trim it."""
        is_left_in_log = outcome == HANDED_BACK and attempt.seq > MAX_PARKED_DELTAS
        frames = [] if is_left_in_log else self._held.parked_frames(attempt)
        release = partial(self._lease.release, attempt.job.id, attempt.run_number, frames, outcome=outcome)
        expected = ExpectedErrors(Unavailable, log.warning, "a job cannot be put back, trying again: %s")
        try:
            await retry(release, expected, backoff(MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S))
        except Fenced:
            self._on_fenced(attempt.partition)
        finally:
            self._held.unpark(attempt)
