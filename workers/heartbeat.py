"""Heartbeat of a worker, the messages that steer it, readers that are gone, and peers that share its servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from penstock.loops import ExpectedErrors, run_periodically
from streaming.errors import Fenced, Unavailable
from streaming.fleet.process import HEARTBEAT_INTERVAL_S, Process
from streaming.fleet.processes import Fleet
from streaming.jobs.codec import Cancel, Control, Cordon, Follow, Hold, Wake
from streaming.jobs.lease import SILENT, HeldJob, Lease
from streaming.redis.client import RedisClient
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


class ControlListener:
    """Listener of one worker. An interruption may lose messages: then polling finds the jobs, the heartbeat finds the
    cancels, and readers ask again."""

    def __init__(
        self,
        lease: Lease,
        held: HeldJobs,
        claimer: Claimer,
        room: asyncio.Event,
        retry_delay_s: float,
        *,
        on_cancelled: Callable[[str, str], None],
        on_cordon: Callable[[str], None],
    ) -> None:
        """
        Args:
            room: set on a wake-up, so that the claimer looks for jobs.
            on_cancelled: called with the id of a job, and who cancelled it.
            on_cordon: called with the reason.
        """
        self._lease, self._held, self._claimer, self._room = lease, held, claimer, room
        self._retry_delay_s, self._on_cancelled, self._on_cordon = retry_delay_s, on_cancelled, on_cordon

    async def keep_listening(self) -> None:
        """Obey until cancelled; subscribe again after an interruption."""
        expected = ExpectedErrors(Unavailable, log.warning, "control channel interrupted, subscribing again: %s")
        await run_periodically(self._listen, self._retry_delay_s, expected)

    async def _listen(self) -> None:
        async for control in self._lease.controls():
            self.obey(control)

    def obey(self, control: Control) -> None:
        """Obey one message."""
        match control:
            case Wake():
                self._room.set()
            case Cancel(job_id, by):
                self._on_cancelled(job_id, by)
            case Follow(job_id, address):
                if attempt := self._held.attempts.get(job_id):
                    attempt.follow(address)
                else:
                    self._claimer.note_follow(job_id, address)
            case Cordon(reason):
                self._on_cordon(reason)
            case Hold(for_ms):
                self._claimer.hold(for_ms)


CHECK_INTERVAL_S = 5.0
MAX_SILENT_CHECKS = 3
"""Checks in a row without a subscriber after which an address counts as abandoned: 10 to 15 s."""


class Listeners:
    """Counts the checks in a row in which each address had no subscriber."""

    def __init__(self, checks: int = MAX_SILENT_CHECKS) -> None:
        self._max_checks = checks
        self._silent: dict[str, int] = {}

    def given_up(self, listening: Mapping[str, int]) -> list[str]:
        """Record one check. Returns the addresses that are now abandoned.

        Args:
            listening: number of subscribers of every address in use; the counts of other addresses are dropped.
        """
        self._silent = {address: self._silent.get(address, 0) + 1 for address, count in listening.items() if count == 0}
        return [address for address, checks in self._silent.items() if checks >= self._max_checks]


def in_use(addresses: Iterable[Iterable[str]], silent: str) -> list[str]:
    """All distinct addresses except `silent`, the placeholder of a job without readers."""
    return sorted({address for each in addresses for address in each if address != silent})


class ListenerWatch:
    """Drops reply addresses of held jobs that have no subscriber any more.

    Every address of a job costs a copy of its rows in the log. The worker drops an address only after several checks in
    a row, on every Redis server, found no subscriber; they are far enough apart for a process that lost its connection
    to reconnect. A process that reconnects later reads what it missed from the log, sees that its address was dropped,
    and follows the job again.
    """

    def __init__(self, client: RedisClient, lease: Lease, held: HeldJobs, lose: Callable[[int], None]) -> None:
        """
        Args:
            lose: called with a partition whose lease another process has fenced.
        """
        self._client, self._lease, self._held, self._lose = client, lease, held, lose
        self._listeners = Listeners()

    async def keep_looking(self) -> None:
        """Check in a loop, and drop addresses without a subscriber."""
        expected = ExpectedErrors(Unavailable, log.debug, "who listens cannot be asked: %s")
        await run_periodically(self._look, CHECK_INTERVAL_S, expected, wait_first=True)

    async def _look(self) -> None:
        if addresses := in_use((attempt.addresses for attempt in self._held.attempts.values()), SILENT):
            for address in self._listeners.given_up(await self._client.listeners(addresses)):
                await self.unfollow(address)

    async def unfollow(self, address: str) -> None:
        held = [attempt for attempt in self._held.attempts.values() if address in attempt.addresses]
        log.info("nobody listens at %s any more: %d jobs send nothing more there", address, len(held))
        for partition in self._client.partitions:
            if there := [attempt for attempt in held if attempt.partition == partition]:
                for attempt in there:  # before the write: a process that follows the job after it sends us a message
                    attempt.unfollow(address)
                try:
                    await self._lease.unfollow(partition, address, [attempt.job.id for attempt in there])
                except Fenced:
                    self._lose(partition)
                except Unavailable:
                    for attempt in there:
                        attempt.follow(address)
                    raise


def peers_of(me: Process, others: list[Process]) -> int:
    """How many workers of the same pool may run requests, this one included. Those that start run none yet, and those
    that drain still do."""
    lives = {
        each.life for each in others if (each.model, each.shape) == (me.model, me.shape) and each.state != "starting"
    }
    return len(lives | {me.life})


async def keep_counting(fleet: Fleet, me: Process, share: Callable[[int], None]) -> NoReturn:
    """Call `share` with the number every few seconds; while the store does not answer, the last one stays."""

    async def count() -> None:
        share(peers_of(me, await fleet.processes("worker")))

    expected = ExpectedErrors(Unavailable, log.warning, "the other workers cannot be counted: %s", once=True)
    await run_periodically(count, HEARTBEAT_INTERVAL_S, expected)
