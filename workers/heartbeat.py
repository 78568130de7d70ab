"""Heartbeat of a worker: renews its lease, and compares the jobs it holds with those that the store says it holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from penstock.loops import ExpectedErrors, run_periodically
from streaming.errors import Unavailable
from streaming.jobs.lease import HeldJob, Lease
from workers.claimer import Claimer
from workers.held_jobs import HeldJobs

log = logging.getLogger(__name__)


class Heartbeat:
    """One loop for each partition."""

    def __init__(
        self,
        lease: Lease,
        held: HeldJobs,
        claimer: Claimer,
        interval_s: float,
        *,
        checkpoint: Callable[[int], None],
        on_cancelled: Callable[[str, str], None],
        drop: Callable[[str, str], None],
    ) -> None:
        """
        Args:
            checkpoint: called with the partition after each beat.
            on_cancelled: called with the id of a job that was cancelled, and by whom.
            drop: called with the id of a job that is no longer this worker's, and why.
        """
        self._lease, self._held, self._claimer, self._interval_s = lease, held, claimer, interval_s
        self._checkpoint, self._on_cancelled, self._drop = checkpoint, on_cancelled, drop

    async def keep_beating(self, partition: int) -> None:
        """Renew the lease, and hear of what pub/sub lost."""
        strays: set[tuple[str, int]] = set()
        taken: set[tuple[str, int]] = set()

        async def beat() -> None:
            nonlocal strays, taken
            held = await self._lease.beat(partition)
            strays = await self._hand_back_strays(partition, strays, held)
            taken = self._drop_taken(partition, taken, held)
            self._checkpoint(partition)
            for job_id, job in held.items():
                if job.cancelled:
                    self._on_cancelled(job_id, job.cancelled_by)

        message = f"the lease in partition {partition} could not be renewed, trying again: %s"
        await run_periodically(
            beat, self._interval_s, ExpectedErrors(Unavailable, log.warning, message), wait_first=True
        )

    async def _hand_back_strays(
        self, partition: int, before: set[tuple[str, int]], held: Mapping[str, HeldJob]
    ) -> set[tuple[str, int]]:
        """A claim whose answer was lost leaves jobs the server counts as ours and we know nothing of: hand back those
        seen so twice while no claim was under way, which may only be slow. Returns those seen now, with their runs."""
        if self._claimer.may_bring(partition):
            return set()
        strays = {(job_id, job.number) for job_id, job in held.items() if not self._held.holds(job_id, job.number)}
        for job_id, number in strays & before:
            log.warning("handing back a job whose claim was never answered", extra={"job": job_id})
            await self._lease.release(job_id, number)
        return strays - before

    def _drop_taken(
        self, partition: int, before: set[tuple[str, int]], held: Mapping[str, HeldJob]
    ) -> set[tuple[str, int]]:
        """Jobs of ours that the server, twice running, does not count as ours (it has lost the claim): stop them."""
        ours = self._held.of(partition)
        kept = {(job_id, job.number) for job_id, job in held.items()}
        lost = [attempt for attempt in ours if (attempt.job.id, attempt.number) not in kept and not attempt.over]
        taken = {(attempt.job.id, attempt.number) for attempt in lost}
        for job_id, _ in taken & before:
            self._drop(job_id, "the store no longer counts it as this worker's")
            self._claimer.note_end(job_id)
        return taken - before
