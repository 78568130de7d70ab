"""Stream writer: makes jobs whose text is what a client appends, so that suites for streams can write and read.

Penstock's streams are read-only for clients: workers write them. This is such a worker, without an engine.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from penstock.engine import ChatTurn
from streaming.jobs.codec import Delta, Opening, Run, Section, Terminal, encode_delta
from streaming.jobs.job import Chat, Job, JobState
from streaming.jobs.lease import SILENT, Claim, Finish, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.order import Priority
from streaming.redis.client import RedisClient

MODEL = "conformance"
TENANT = "local"
"""The tenant of a server without keys."""
LEASE_MS = 3_600_000
"""The writer sends no heartbeat."""


@dataclass
class WrittenStream:
    """One job that this worker runs: each append is a delta of it."""

    job: str
    kind: str
    """Content type that its client gave it."""
    claim: Claim
    rows: list[Delta] = field(default_factory=list)
    closed: bool = False


class StreamWriter:
    """Puts, claims, writes and ends jobs. One at a time, in the order of the calls. All raise Unavailable."""

    def __init__(self, client: RedisClient) -> None:
        self._client, self._lease, self._turn = client, Lease(client, MODEL), asyncio.Lock()

    async def start(self) -> None:
        """Take the worker's lease."""
        await self._lease.register()

    async def open(self, kind: str) -> WrittenStream:
        """Make a stream, which is a job that runs."""
        async with self._turn:
            queue = Queue(self._client)
            prompt = Chat((ChatTurn("user", "stream"),))
            job = Job(id=queue.new_id(TENANT), model=MODEL, tenant=TENANT, priority=Priority.INTERACTIVE, prompt=prompt)
            await queue.put(job)
            (claim,) = (await self._lease.claim(0, 1)).jobs
            assert isinstance(claim, Claim) and claim.job.id == job.id
            return WrittenStream(job.id, kind, claim)

    async def append(self, stream: WrittenStream, texts: list[str]) -> None:
        """Log a delta for each text, in one step, to all readers."""
        async with self._turn:
            first = len(stream.rows) + 1
            rows = [Delta(stream.claim.number, first + place, 0, text, (1,), 1) for place, text in enumerate(texts)]
            stream.rows += rows
            record = await JobReader(self._client).outline(stream.job)
            encoded = [encode_delta(row) for row in rows]
            openings = {stream.claim.number: Opening(stream.job)}
            addresses = record.addresses or (SILENT,)
            frames = dict.fromkeys(addresses, encoded)
            call = self._lease.append_call(0, frames, 1, openings=dict.fromkeys(addresses, openings))
            await self._lease.calls([call])

    async def close(self, stream: WrittenStream) -> None:
        """End the job: nothing will follow."""
        async with self._turn:
            run = Run(self._lease.id, stream.claim.number)
            rows = tuple(stream.rows)
            end = Terminal(stream.job, JobState.COMPLETED, len(rows), ("stop",), sections=(Section(1, run),), rows=rows)
            await self._lease.calls([self._lease.finish_call(Finish(end, stream.claim.number, False))])
            stream.closed = True
