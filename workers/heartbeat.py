"""Heartbeat of a worker: how it hears what became of its jobs and their readers; and peers that share its servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
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
from workers.settings import WorkerSettings
from workers.writer import Writer

log = logging.getLogger(__name__)


CHECK_INTERVAL_S = 5.0
MAX_SILENT_CHECKS = 3
"""Checks in a row without a subscriber after which an address counts as abandoned: 10 to 15 s."""


class Heartbeat:
    """Three kinds of loops of one worker: the beats of each partition, the messages to it, and the look at readers."""

    def __init__(
        self,
        client: RedisClient,
        lease: Lease,
        held: HeldJobs,
        claimer: Claimer,
        writers: Sequence[Writer],
        room: asyncio.Event,
        settings: WorkerSettings,
        *,
        on_cancelled: Callable[[str, str], None],
        on_cordon: Callable[[str], None],
        drop: Callable[[str, str], None],
        lose: Callable[[int], None],
    ) -> None:
        """
        Args:
            room: set on a wake-up, so that the claimer looks for jobs.
            on_cancelled: called with the id of a job that was cancelled, and by whom.
            on_cordon: called with the reason.
            drop: called with the id of a job that is no longer this worker's, and why.
            lose: called with a partition whose lease another process has fenced.
        """
        self._client, self._lease, self._held, self._claimer = client, lease, held, claimer
        self._writers, self._room, self._settings = writers, room, settings
        self._on_cancelled, self._on_cordon, self._drop, self._lose = on_cancelled, on_cordon, drop, lose
        self._silent: dict[str, int] = {}
        """By reply address, checks in a row in which it had no subscriber."""

    async def keep_beating(self, partition: int) -> None:
        """Renew the lease, and hear of what pub/sub lost."""
        strays: set[tuple[str, int]] = set()
        taken: set[tuple[str, int]] = set()

        async def beat() -> None:
            nonlocal strays, taken
            held = await self._lease.beat(partition)
            strays = await self._hand_back_strays(partition, strays, held)
            taken = self._drop_taken(partition, taken, held)
            self._held.checkpoint(partition, self._writers[partition], self._settings.checkpoint_frames)
            for job_id, job in held.items():
                if job.cancelled:
                    self._on_cancelled(job_id, job.cancelled_by)

        expected = ExpectedErrors(
            Unavailable, log.warning, f"the lease in partition {partition} could not be renewed, trying again: %s"
        )
        await run_periodically(beat, self._client.settings.lease_ms / 3000, expected, wait_first=True)

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
        return taken - before

    async def keep_listening(self) -> None:
        """Obey messages until cancelled; subscribe again after an interruption, which may lose some: then polling finds
        the jobs, the heartbeat finds the cancels, and readers ask again."""
        expected = ExpectedErrors(Unavailable, log.warning, "control channel interrupted, subscribing again: %s")
        await run_periodically(self._listen, self._settings.poll_ms / 1000, expected)

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

    async def keep_looking(self) -> None:
        """Drop reply addresses of held jobs that have no subscriber any more, for ever.

        Every address of a job costs a copy of its rows in the log. The worker drops an address only after several
        checks in a row, on every Redis server, found no subscriber; they are far enough apart for a process that lost
        its connection to reconnect. A process that reconnects later reads what it missed from the log, sees that its
        address was dropped, and follows the job again.
        """
        expected = ExpectedErrors(Unavailable, log.debug, "who listens cannot be asked: %s")
        await run_periodically(self._look, CHECK_INTERVAL_S, expected, wait_first=True)

    async def _look(self) -> None:
        addresses = {address for attempt in self._held.attempts.values() for address in attempt.addresses} - {SILENT}
        if addresses:
            self._silent = silent_checks(self._silent, await self._client.listeners(sorted(addresses)))
            for address in [each for each, checks in self._silent.items() if checks >= MAX_SILENT_CHECKS]:
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


def silent_checks(before: Mapping[str, int], listening: Mapping[str, int]) -> dict[str, int]:
    """The checks in a row in which each address had no subscriber. `listening`: subscribers of every address in use;
    the counts of other addresses are dropped."""
    return {address: before.get(address, 0) + 1 for address, count in listening.items() if count == 0}


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
