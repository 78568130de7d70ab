"""A steady flow of jobs by library calls, put on the wire and worked off, whatever happens to the servers meanwhile."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from streaming.errors import Fenced, Rewound, Unavailable
from streaming.inbox import Inbox
from streaming.journal import Journal, Record
from streaming.lease import SILENT, Claim, Finish, Lease
from streaming.messages import Chat, Delta, Job, Priority, State, Terminal, Turn, encode
from streaming.queue import Queue
from streaming.reaper import Reaper
from streaming.wire import Call, Wire

MODEL = "m"
TOKENS = 12
PAUSE_S = 0.02

T = TypeVar("T")


def a_job(queue: Queue, *, job_id: str = "", reply_to: str = "") -> Job:
    """A job of the flow's model; streamed if somebody listens."""
    return Job(
        id=job_id or queue.new_id("t"),
        model=MODEL,
        tenant="t",
        priority=Priority.STANDARD,
        prompt=Chat((Turn("user", "hello"),)),
        stream=bool(reply_to),
        reply_to=reply_to,
    )


def tokens_of(record: Record) -> list[int]:
    """The token ids a finished job's record holds."""
    assert record.state is State.COMPLETED and record.terminal is not None
    return [token for row in record.terminal.rows for token in row.ids]


def delta(job_id: str, seq: int, text: str = "") -> Delta:
    """One token of a job, `<seq>` if nothing else is said."""
    return Delta(stream_of(job_id), seq, 0, text or f"<{seq}>", (seq,), 1)


def stream_of(job_id: str) -> int:
    """A number to stand for a job in every worker's frames."""
    return zlib.crc32(job_id.encode())


def append(
    lease: Lease,
    rows: Mapping[str, Sequence[Delta]],
    *named: str,
    partition: int = 0,
    oldest: int = 1,
    forced: bool = False,
) -> Call:
    """One step that names these jobs to every address."""
    names = {address: {stream_of(job_id): job_id for job_id in named} for address in rows}
    encoded = {address: [encode(delta) for delta in deltas] for address, deltas in rows.items()}
    return lease.append_call(partition, encoded, oldest, names=names, forced=forced)


async def numbers_read(inbox: Inbox) -> list[int]:
    """The numbers of the deltas a reader is given until the end of its job."""
    seen: list[int] = []
    async with asyncio.timeout(30):
        while True:
            rows, terminal = await inbox.take(1)
            seen += [row.seq for row in rows]
            if terminal is not None:
                return seen


async def until(condition: Callable[[], Awaitable[T] | T], seconds: float = 30) -> T:
    """Poll until it gives something true; Unavailable counts as "not yet"."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                value = condition()
                if isinstance(value, Awaitable):
                    value = await value
                if value:
                    return value
            except Unavailable:
                pass
            await asyncio.sleep(PAUSE_S)


class Flow:
    """Puts go on in the background, each with an id of its own; one worker claims, appends and finishes."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self._queue = wire, Queue(wire)
        self.accepted: list[str] = []
        self.refused = 0
        """Puts that were answered with Unavailable; they are not repeated."""
        self.finished = 0
        """Finishes that were answered."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Put and work within the block."""
        async with _beside(self._put(), self._work(), self._sweep()):
            yield

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Work off what others put."""
        async with _beside(self._work(), self._sweep()):
            yield

    async def more(self, count: int) -> None:
        """Wait until so many more jobs are accepted."""
        goal = len(self.accepted) + count
        await until(lambda: len(self.accepted) >= goal)

    async def all_done(self) -> list[Record]:
        """Wait until every job that was accepted so far has ended; their records."""
        ids, journal = list(self.accepted), Journal(self._wire)

        async def ended() -> list[Record]:
            records = await journal.records(ids)
            assert None not in records, "an accepted job is lost"
            return [record for record in records if record is not None and record.state.final]

        return await until(lambda: _whole(ended(), len(ids)), 60)

    async def _put(self) -> None:
        while True:
            job = a_job(self._queue)
            try:
                self.accepted.append((await self._queue.put(job)).id)
            except Unavailable:
                self.refused += 1
            await asyncio.sleep(PAUSE_S)

    async def _sweep(self) -> None:
        reaper = Reaper(self._wire)
        while True:
            with suppress(Unavailable):
                await reaper.sweep()
            await asyncio.sleep(0.2)

    async def _work(self) -> None:
        while True:
            try:
                await self._work_as(Lease(self._wire, MODEL))
            except Fenced:
                continue

    async def _work_as(self, lease: Lease) -> None:
        await _repeated(lease.register)
        while True:
            for partition in self._wire.partitions:
                try:
                    claimed = await lease.claim(partition, 4)
                except Unavailable:
                    continue
                for claim in claimed.jobs:
                    assert isinstance(claim, Claim)
                    await self._run(lease, partition, claim)
            await _strays_handed_back(lease, self._wire.partitions)
            await asyncio.sleep(PAUSE_S)

    async def _run(self, lease: Lease, partition: int, claim: Claim) -> None:
        rows = await _repeated(lambda: self._past(claim))
        while len(rows) < TOKENS:
            seq = len(rows) + 1
            rows.append(delta(claim.job.id, seq))
            await self._append(lease, partition, claim, rows)
        end = Terminal(claim.job.id, State.COMPLETED, len(rows), ("stop",), rows=tuple(rows))
        call = lease.finish_call(Finish(end, claim.attempt, not claim.job.stream))
        await _repeated(lambda: lease.calls([call]))
        self.finished += 1

    async def _append(self, lease: Lease, partition: int, claim: Claim, rows: list[Delta]) -> None:
        addresses = claim.reply if claim.job.stream else (SILENT,)
        job_id, oldest = claim.job.id, claim.first_frame
        call = append(lease, dict.fromkeys(addresses, rows[-1:]), job_id, partition=partition, oldest=oldest)
        try:
            await _repeated(lambda: lease.calls([call]))
        except Rewound:
            everything = dict.fromkeys(addresses, rows)
            again = append(lease, everything, job_id, partition=partition, oldest=oldest, forced=True)
            await _repeated(lambda: lease.calls([again]))

    async def _past(self, claim: Claim) -> list[Delta]:
        journal = Journal(self._wire)
        return await journal.deltas(await journal.record(claim.job.id)) if claim.past else []


@asynccontextmanager
async def _beside(*loops: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run endless loops beside the block; their failures are the block's."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise result


async def _strays_handed_back(lease: Lease, partitions: range) -> None:
    """Between claims nothing is held: what the server still counts as ours is a claim whose answer was lost."""
    with suppress(Unavailable):
        for partition in partitions:
            for job_id, held in (await lease.beat(partition)).items():
                await lease.release(job_id, held.attempt)


async def _repeated(action: Callable[[], Awaitable[T]]) -> T:
    """Until it is answered: every script bears repetition."""
    while True:
        try:
            return await action()
        except Unavailable:
            await asyncio.sleep(PAUSE_S)


async def _whole(found: Awaitable[list[Record]], count: int) -> list[Record]:
    records = await found
    return records if len(records) == count else []
