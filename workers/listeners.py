"""Detector of abandoned reply addresses: those of API processes that are gone, to which the worker stops sending.

Every address of a job costs a copy of its rows in the log. The worker drops an address only after several checks in a
row, on every Redis server, found no subscriber; they are far enough apart for a process that lost its connection to
reconnect. A process that reconnects later reads what it missed from the log, sees that its address was dropped, and
follows the job again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from penstock.loops import ExpectedErrors, run_periodically
from streaming.errors import Fenced, Unavailable
from streaming.jobs.lease import SILENT, Lease
from streaming.redis.client import RedisClient
from workers.held_jobs import HeldJobs

log = logging.getLogger(__name__)

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
    """Drops reply addresses of held jobs that have no subscriber any more."""

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
