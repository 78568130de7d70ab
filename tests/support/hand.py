"""A worker by hand: the test itself writes what a worker would."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from flow import append, delta

from streaming.jobs.codec import Delta, Opening, Run, Section, Terminal
from streaming.jobs.history import NOTHING, History
from streaming.jobs.job import JobState
from streaming.jobs.lease import SILENT, Claim, Finish, Lease
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.keys import partition_key
from streaming.redis.client import RedisClient

LEASE_MS = 3_600_000
"""Workers by hand send no heartbeat; the API process's sweep keeps a lease no longer than its own."""


@dataclass
class Hand:
    """A worker by hand: one run of one job."""

    lease: Lease
    claim: Claim
    history: History = NOTHING
    rows: list[Delta] = field(default_factory=list)

    @classmethod
    async def claiming(cls, wire: RedisClient, name: str = "") -> Hand:
        lease = Lease(wire, "sim", name)
        await lease.register()
        claimed = await lease.claim(0, 1)
        (claim,) = claimed.jobs or (await lease.claim(0, 1, alone=claimed.suspects)).jobs
        assert isinstance(claim, Claim)
        history = await JobReader(wire).history(claim.job.id, claim.earlier_runs) if claim.earlier_runs else NOTHING
        return cls(lease, claim, history)

    async def write(self, texts: str, *, shown: bool = True) -> None:
        """A delta for each letter, in a frame of its own."""
        opening = Opening(self.claim.job.id, len(self.history.rows) + 1, self.history.last_run)
        for text in texts:
            row = delta(self.claim, len(self.history.rows) + len(self.rows) + 1, text)
            self.rows.append(row)
            addresses = (self.claim.reply if shown else ()) or (SILENT,)
            rows = {address: [row] for address in addresses}
            await self.lease.calls([append(self.lease, rows, (self.claim.run_number, opening))])

    async def write_frame(self, count: int, text: str) -> None:
        """So many deltas in one frame of the log."""
        first = len(self.rows) + 1
        rows = [delta(self.claim, seq, text) for seq in range(first, first + count)]
        opening = Opening(self.claim.job.id)
        await self.lease.calls([append(self.lease, {SILENT: rows}, (self.claim.run_number, opening))])
        self.rows += rows

    async def finish(self, state: JobState = JobState.COMPLETED, reason: str = "stop") -> None:
        rows = (*self.history.rows, *self.rows)
        section = Section(len(self.history.rows) + 1, Run(self.lease.id, self.claim.run_number))
        sections = (*self.history.sections, section)
        end = Terminal(self.claim.job.id, state, len(rows), (reason,), sections=sections, rows=rows)
        await self.lease.calls([self.lease.finish_call(Finish(end, self.claim.run_number, False))])


async def claiming(wire: RedisClient) -> Hand:
    """A worker by hand with the next job that is put."""
    while True:
        try:
            return await Hand.claiming(wire)
        except ValueError:
            await asyncio.sleep(0.01)


async def lapse(wire: RedisClient, lease: Lease) -> None:
    await wire.redis.zadd(partition_key(0, "leases"), {lease.id: 1})
    assert (await Reaper(wire).sweep()).lapsed_workers == 1
