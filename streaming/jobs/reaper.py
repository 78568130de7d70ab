"""Reaper: fences workers whose lease has lapsed, requeues their jobs, and expires jobs that waited too long.

Any process may sweep at any time: each sweep is one atomic script per partition.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from runtime.loops import ExpectedErrors, run_periodically
from streaming.errors import Unavailable
from streaming.jobs.lease import LOG_KEEP_S
from streaming.redis.client import RedisClient
from telemetry.metrics import Metrics

log = logging.getLogger(__name__)

MAX_WORKERS = 4
MAX_JOBS = 256
"""Per sweep, because a script blocks the server."""


@dataclass(frozen=True, slots=True)
class Swept:
    """Counts of one sweep."""

    lapsed_workers: int = 0
    requeued: int = 0
    expired: int = 0
    given_up: int = 0
    spared: int = 0
    """Workers whose lease was extended, because they could not renew it while the store was unavailable."""

    def __bool__(self) -> bool:
        return any((self.lapsed_workers, self.requeued, self.expired, self.given_up, self.spared))


class Reaper:
    """Reaper of one process; remembers each partition's count of sweeps, to detect that the store lost data."""

    def __init__(self, client: RedisClient, metrics: Metrics | None = None) -> None:
        self._client, self._metrics = client, metrics
        self._ticks = dict.fromkeys(client.partitions, 0)

    async def sweep(self, *, ended: str = "") -> Swept:
        """Sweep all partitions once. Raises Unavailable.

        Args:
            ended: lease of a worker whose process has ended, as its supervisor has seen: the lease lapses now.
        """
        settings = self._client.settings
        args = (MAX_WORKERS, MAX_JOBS, settings.max_attempts, LOG_KEEP_S, settings.lease_ms, ended)
        answers = await self._client.calls([("reap", p, args) for p in self._client.partitions])
        for partition, answer in zip(self._client.partitions, answers, strict=True):
            await self._compare(partition, answer[-1])
        swept = Swept(*(sum(column) for column in zip(*(answer[:-1] for answer in answers), strict=True)))
        if swept:
            self._report(swept)
        return swept

    def _report(self, swept: Swept) -> None:
        if swept.spared:
            log.warning("the store was away: %d workers keep their jobs for one more lease", swept.spared)
        if swept.lapsed_workers or swept.expired:
            log.warning(
                "%d workers lapsed: %d jobs back in the queue, %d given up; %d jobs expired in the queue",
                swept.lapsed_workers,
                swept.requeued,
                swept.given_up,
                swept.expired,
            )
        if self._metrics is not None:
            self._metrics.lapsed_workers.inc(swept.lapsed_workers)
            self._metrics.lease_reclaims.inc(swept.requeued)
            self._metrics.given_up.inc(swept.given_up)
            self._metrics.deadline_misses.labels("queue").inc(swept.expired)

    async def _compare(self, partition: int, tick: int) -> None:
        """Begin a new epoch of the partition if its tick is not later than the last one seen: the store lost data."""
        seen = self._ticks[partition]
        if tick <= seen:
            epoch = await self._client.call("rewound", partition, seen)
            log.error("the store has lost data of partition %d; its streams begin epoch %d", partition, epoch + 1)
            tick = seen + 1
        self._ticks[partition] = max(tick, seen)

    async def keep_sweeping(self, every_s: float) -> None:
        """Sweep in a loop until cancelled, at least four times per lease: `reap` takes a gap of half a lease as an
        outage of the store."""
        every_s = min(every_s, self._client.settings.lease_ms / 4000)
        expected = ExpectedErrors(Unavailable, log.debug, "no sweep: %s")
        await run_periodically(self.sweep, every_s, expected, wait_first=True)
