"""Reaper: fences workers whose lease has lapsed, requeues their jobs, and expires jobs that waited too long.

Any process but an offline one may sweep at any time: each sweep is one atomic script per partition. The sweeping
process also writes the spans of jobs that scripts ended (workers/record.py writes those of the jobs that they end).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.loops import ExpectedErrors, run_periodically
from penstock.text import counted
from streaming.errors import Unavailable
from streaming.ids import partition_of
from streaming.jobs.lease import LOG_KEEP_S
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord, was_cut_short
from streaming.jobs.spans import write_end
from streaming.redis.client import Call, RedisClient
from telemetry.metrics import Metrics
from telemetry.tracing import NO_TRACING, Tracing

log = logging.getLogger(__name__)

MAX_WORKERS = 4
MAX_JOBS = 256
"""Jobs that expire, or enter their lanes, per sweep, because a script blocks the server."""
MAX_SALVAGED = 64
"""Jobs whose tokens one process stores at a time, with one pass over each log."""
MAX_SCRIPT_ENDS = 256
"""Jobs that scripts ended, in one partition, whose requests one process records at a time."""


@dataclass(frozen=True, slots=True)
class Lapse:
    """The end of one worker's lease in one partition, and what became of the jobs that it held there."""

    worker: str
    """Its name in `penstock ps`; its lease if it has none."""
    requeued: Sequence[str]
    given_up: Mapping[str, str]
    """By id: the reason."""
    cancelled: Sequence[str]

    @property
    def jobs(self) -> Sequence[str]:
        return [*self.requeued, *self.given_up, *self.cancelled]


@dataclass(frozen=True, slots=True)
class Swept:
    """Counts of one sweep."""

    lapsed_workers: int = 0
    """Counted in the first partition: a worker has a lease in each, and its death ends all of them."""
    expired: int = 0
    spared: int = 0
    """Workers whose lease was extended, because they could not renew it while the store was unavailable: the most of
    any partition."""
    lapses: tuple[Lapse, ...] = ()
    """In the first partition, and in others those of workers that held jobs there."""
    full: bool = False
    """As many jobs entered their lanes, in some partition, as one sweep lets in."""

    @property
    def requeued(self) -> int:
        return sum(len(lapse.requeued) for lapse in self.lapses)

    @property
    def given_up(self) -> Sequence[str]:
        """The reason of each job that was given up."""
        return [reason for lapse in self.lapses for reason in lapse.given_up.values()]


class Reaper:
    """Reaper of one process; remembers each partition's count of sweeps, to detect that the store lost data."""

    def __init__(
        self,
        client: RedisClient,
        metrics: Metrics | None = None,
        *,
        salvager: JobReader | None = None,
        on_end: Callable[[JobRecord], object] | None = None,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """`salvager`: stores the tokens of jobs that scripts ended; None in a process that may not read them.
        `on_end`: told each job that a script ended, in one process only; with a `salvager`.
        `tracing`: gets the spans of these jobs."""
        self._client, self._metrics, self._salvager = client, metrics, salvager
        self._ticks = dict.fromkeys(client.partitions, 0)
        self._cut_short = list[str]()
        """Jobs that a script ended, whose tokens this process is to store."""
        self._on_end, self._script_ends, self._tracing = on_end, list[str](), tracing
        """Jobs that a script ended, whose requests this process is to record."""

    async def sweep(self, *, ended: str = "") -> Swept:
        """Sweep all partitions once. Raises Unavailable.

        Args:
            ended: lease of a worker whose process has ended, as its supervisor has seen: the lease lapses now.
        """
        return await self.take(await self._client.calls(self.calls(ended)))

    def calls(self, ended: str = "") -> list[Call]:
        """The calls of one sweep, for `take`."""
        settings = self._client.settings
        wanted = MAX_SALVAGED if self._salvager is not None and not self._cut_short else 0
        ends = MAX_SCRIPT_ENDS if self._on_end is not None and not self._script_ends else 0
        args = (MAX_WORKERS, MAX_JOBS, settings.max_attempts, LOG_KEEP_S, settings.lease_ms, ended, wanted, ends)
        return [("reap", partition, args) for partition in self._client.partitions]

    async def take(self, answers: list[Any]) -> Swept:
        """Finish a sweep by the answers to its calls. Raises Unavailable."""
        lapses: list[Lapse] = []
        for partition, (*_, tick, lapsed, cut_short, script_ends) in zip(self._client.partitions, answers, strict=True):
            self._cut_short += _texts(cut_short)
            self._script_ends += _texts(script_ends)
            lapses += [lapse for each in lapsed if (lapse := _lapse(*each)).jobs or partition == 0]
            await self._compare(partition, tick)
        expired, spared, entered, *_ = zip(*answers, strict=True)
        swept = Swept(len(answers[0][4]), sum(expired), max(spared), tuple(lapses), max(entered) == MAX_JOBS)
        self._report(swept)
        return swept

    async def salvage(self) -> None:
        """Store the logged tokens of the jobs that sweeps have found, which reading their records does. Another process
        tries again with those of an interrupted call. Raises Unavailable."""
        if self._salvager is None or not self._cut_short:
            return
        job_ids = list(self._cut_short)
        try:
            records = await self._salvager.records(job_ids, bodies=False)
            for job_id, record in zip(job_ids, records, strict=True):
                if record is None or not was_cut_short(record):  # stored, or lost with its record
                    await self._client.call("salvage", partition_of(job_id) or 0, job_id, "", "", "", "", 0, 0, 0)
        finally:
            self._cut_short.clear()

    async def record_ends(self) -> None:
        """Tell `on_end` of the jobs that scripts ended, as sweeps have found them; one that is no longer kept is left
        out. Raises Unavailable: then the next call tells of them."""
        if self._salvager is None or self._on_end is None or not self._script_ends:
            return
        for record in await self._salvager.records(self._script_ends, bodies=self._tracing.recording):
            if record is not None and record.state.final:
                self._on_end(record)
                write_end(self._tracing, record)
        self._script_ends.clear()

    def _report(self, swept: Swept) -> None:
        if swept.spared:
            log.warning(
                "the store was away: %s for one more lease",
                counted(swept.spared, "worker keeps its jobs", "workers keep their jobs"),
            )
        if swept.expired:
            log.warning("%s expired in the queue", counted(swept.expired, "job"))
        for lapse in swept.lapses:
            _log_lapse(lapse)
        if self._metrics is not None:
            self._metrics.lapsed_workers.inc(swept.lapsed_workers)
            self._metrics.lease_reclaims.inc(swept.requeued)
            self._metrics.given_up.inc(len(swept.given_up))
            self._metrics.deadline_misses.labels("queue").inc(swept.expired)
            for reason in swept.given_up:
                self._metrics.job_failures.labels(reason).inc()

    async def _compare(self, partition: int, tick: int) -> None:
        """Begin a new epoch of the partition if its tick is not later than the last one seen: the store lost data."""
        seen = self._ticks[partition]
        if tick <= seen:
            epoch = await self._client.call("rewound", partition, seen)
            log.error("the store has lost data of partition %d; its streams begin epoch %d", partition, epoch + 1)
            tick = seen + 1
        self._ticks[partition] = max(tick, seen)

    async def _sweep_all(self) -> None:
        """Sweep while jobs are left whose time has come."""
        while (await self.sweep()).full:
            pass

    async def keep_sweeping(self, every_s: float) -> None:
        """Sweep in a loop until cancelled, at least four times per lease: `reap` takes a gap of half a lease as an
        outage of the store."""
        every_s = min(every_s, self._client.settings.lease_ms / 4000)
        expected = ExpectedErrors(Unavailable, log.debug, "no sweep: %s")
        # Apart: a long log takes longer to read than a sweep may wait.
        async with asyncio.TaskGroup() as loops:
            for work in (self._sweep_all, self.salvage, self.record_ends):
                loops.create_task(run_periodically(work, every_s, expected, wait_first=True))


def _lapse(
    name: bytes, requeued: Sequence[bytes], given_up: Sequence[Sequence[bytes]], cancelled: Sequence[bytes]
) -> Lapse:
    """Decode what the script `reap` answers of one worker."""
    reasons = dict(_texts(each) for each in given_up)
    return Lapse(name.decode(errors="replace"), _texts(requeued), reasons, _texts(cancelled))


def _texts(words: Iterable[bytes]) -> list[str]:
    return [word.decode() for word in words]


def _log_lapse(lapse: Lapse) -> None:
    """Log that a worker's lease has lapsed, and what becomes of its jobs."""
    log.warning(
        "worker %s lapsed: %s back in the queue, %d given up",
        lapse.worker,
        counted(len(lapse.requeued), "job"),
        len(lapse.given_up),
        extra={"worker": lapse.worker, "jobs": list(lapse.requeued)},
    )
    for job_id in lapse.given_up:
        log.error("a job is given up: its workers were lost", extra={"job": job_id, "worker": lapse.worker})
    for job_id in lapse.cancelled:
        log.info("a cancelled job ends with its lost worker", extra={"job": job_id, "worker": lapse.worker})
