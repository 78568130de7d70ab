"""Take work from dead hands: fence lapsed workers, put their jobs back, expire what waited too long.

Any process may sweep, as often as it likes: each sweep is one atomic script per partition.
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
"""Per sweep, so that a script never holds the server for long."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep did."""

    lapsed_workers: int = 0
    requeued: int = 0
    expired: int = 0
    given_up: int = 0
    spared: int = 0
    """Workers whose lease was renewed, since they could not do it while the store was away."""

    def __bool__(self) -> bool:
        return any((self.lapsed_workers, self.requeued, self.expired, self.given_up, self.spared))


class Reaper:
    """One per process: it remembers how far the store's own count of sweeps had come."""

    def __init__(self, wire: RedisClient, metrics: Metrics | None = None) -> None:
        self._wire, self._metrics = wire, metrics
        self._ticks = dict.fromkeys(wire.partitions, 0)

    async def sweep(self) -> Swept:
        """Raises Unavailable."""
        settings = self._wire.settings
        args = (MAX_WORKERS, MAX_JOBS, settings.max_attempts, LOG_KEEP_S, settings.lease_ms)
        answers = await self._wire.calls([("reap", p, args) for p in self._wire.partitions])
        for partition, answer in zip(self._wire.partitions, answers, strict=True):
            await self._compare(partition, answer[-1])
        swept = Swept(*(sum(column) for column in zip(*(answer[:-1] for answer in answers), strict=True)))
        if swept:
            self._tell(swept)
        return swept

    def _tell(self, swept: Swept) -> None:
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
        """A tick that is not later than the last one seen: the store was set back. Every event id changes its epoch."""
        seen = self._ticks[partition]
        if tick <= seen:
            epoch = await self._wire.call("rewound", partition, seen)
            log.error("the store has lost data of partition %d; its streams begin epoch %d", partition, epoch + 1)
            tick = seen + 1
        self._ticks[partition] = max(tick, seen)

    async def keep_sweeping(self, every_s: float) -> None:
        """Sweep for ever, whatever Redis does; well within a lease, so that a longer gap says that nobody could."""
        every_s = min(every_s, self._wire.settings.lease_ms / 4000)
        expected = ExpectedErrors(Unavailable, log.debug, "no sweep: %s")
        await run_periodically(self.sweep, every_s, expected, wait_first=True)
