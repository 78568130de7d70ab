"""Drain of a worker: it claims nothing more, finishes what it can, hands back the rest, and gives up its lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from penstock.loops import wait_any
from streaming.errors import Fenced, Unavailable
from streaming.jobs.lease import Lease
from workers.choices import ChoiceStarter
from workers.claimer import Claimer
from workers.held_jobs import HeldJobs
from workers.record import Recorder
from workers.writer import Writer

log = logging.getLogger(__name__)


class Drain:
    """The end of one worker, or of its lease in one partition."""

    def __init__(
        self,
        partitions: Sequence[int],
        lease: Lease,
        held: HeldJobs,
        starter: ChoiceStarter,
        claimer: Claimer,
        writers: Sequence[Writer],
        recorder: Recorder,
        room: asyncio.Event,
        drain_s: float,
        on_cordon: Callable[[str], None],
    ) -> None:
        """
        Args:
            room: set when a job has ended, or when the lease of a partition was taken.
            drain_s: time for the jobs that run to finish.
            on_cordon: called with the reason when a lease was taken and others are left.
        """
        self._partitions, self._lease, self._held, self._starter = partitions, lease, held, starter
        self._claimer, self._writers, self._recorder, self._room = claimer, writers, recorder, room
        self._drain_s, self._on_cordon = drain_s, on_cordon
        self._leaving = False
        self._lost: set[int] = set()
        """Partitions where the lease was taken."""
        self._losing = asyncio.Event()

    def lose(self, partition: int) -> None:
        """The lease of a partition was taken: others run its jobs. What is held elsewhere is drained, not abandoned."""
        if self._leaving or partition in self._lost:  # leaving: a heartbeat met the lease that was just given up
            return
        self._lost.add(partition)
        for attempt in self._held.of(partition):
            self._starter.let_go(self._held.attempts.pop(attempt.job.id), goes_on=True)
            self._recorder.lost(attempt.job.id)
        self._losing.set()
        self._room.set()
        if self._has_leases:
            self._on_cordon(f"its lease in partition {partition} was taken")

    @property
    def _has_leases(self) -> bool:
        return not self._lost.issuperset(self._partitions)

    async def after(self, stop: asyncio.Event, claiming: asyncio.Task[None]) -> None:
        """Take nothing more, let what runs finish within the grace time, hand back the rest, give up the lease."""
        await wait_any(stop, self._losing)
        self._claimer.end()
        if self._has_leases:
            await claiming  # what it is claiming now is still ours
        log.info("draining: %d jobs to finish within %.0f s", len(self._held.attempts), self._drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while self._held.attempts and self._has_leases:
                    self._room.clear()
                    await self._room.wait()
        if self._has_leases:
            await self._hand_back()
            self._leaving = True
            await self._leave()
        if self._lost:
            raise Fenced(f"the lease of this worker was taken from it in partitions {sorted(self._lost)}")

    async def _leave(self) -> None:
        try:
            while held := await self._lease.leave():
                log.warning("still holding %d jobs that ended while leaving; looking again", held)
                await asyncio.sleep(0.05)
        except Unavailable as error:
            log.warning("the lease is left to lapse: %s", error)

    async def _hand_back(self) -> None:
        self._held.hand_back()
        for attempt in self._held.handed_back:
            self._starter.let_go(attempt, goes_on=True)
        for partition, writer in zip(self._partitions, self._writers, strict=True):
            if partition not in self._lost:
                await writer.flushed()
        for attempt in self._held.handed_back:
            try:
                await self._lease.release(attempt.job.id, attempt.number, self._held.parked_frames(attempt))
            except Fenced:
                self.lose(attempt.partition)  # others have it already
                self._recorder.lost(attempt.job.id)
            except Unavailable as error:
                log.warning("a job is left to lapse with its lease: %s", error, extra={"job": attempt.job.id})
            self._recorder.released(attempt.job.id)
        if self._held.handed_back:
            log.info("handed back %d unfinished jobs", len(self._held.handed_back))
