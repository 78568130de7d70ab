"""A steady flow of jobs by library calls, put on the wire and worked off, whatever happens to the servers meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from msgspec.structs import replace

from penstock.engine import ChatTurn
from streaming.errors import Fenced, Rewound, Unavailable
from streaming.jobs.codec import Delta, Opening, Run, Section, Terminal, encode_delta
from streaming.jobs.history import NOTHING, History
from streaming.jobs.job import Chat, Job, JobState
from streaming.jobs.lease import SILENT, Claim, Finish, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper, Swept
from streaming.jobs.records import JobRecord
from streaming.jobs.relay import ReorderBuffer
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import Call, RedisClient

MODEL = "m"
TOKENS = 12
PAUSE_S = 0.02

T = TypeVar("T")


def a_job(queue: Queue, priority: Priority = Priority.STANDARD, *, reply_to: str = "", **changes: object) -> Job:
    """A job of the flow's model; streamed if somebody listens."""
    fields = {"id": queue.new_id("t"), "model": MODEL, "tenant": "t", "priority": priority, "reply_to": reply_to}
    fields |= {"prompt": Chat((ChatTurn("user", "hello"),)), "stream": bool(reply_to), **changes}
    return Job(**fields)  # type: ignore[arg-type]


async def put_job(queue: Queue, *args: Any, **changes: Any) -> Job:
    """A job that waits."""
    job = a_job(queue, *args, **changes)
    await queue.put(job)
    return job


async def a_lease(wire: RedisClient, name: str = "") -> Lease:
    """A new worker's, registered."""
    lease = Lease(wire, MODEL, name)
    await lease.register()
    return lease


async def claim_one(lease: Lease, *, alone: bool = False) -> Claim:
    """The one job that is next in partition 0."""
    (claim,) = (await lease.claim(0, 1, alone=alone)).jobs
    assert isinstance(claim, Claim)
    return claim


async def lapse(wire: RedisClient, lease: Lease) -> Swept:
    """Its worker is lost in partition 0: make the lease old, then sweep."""
    await wire.redis.zadd(partition_key(0, "leases"), {lease.id: 1})
    return await Reaper(wire).sweep()


async def waits_again(redis: Any, job_id: str, model: str, pipe: Any = None) -> None:
    """As after the loss of its claim: the job waits again. `pipe`: of transactions, for the writes."""
    job, writer = partition_key(0, "job", job_id), pipe or redis
    ms, number = (await redis.hget(job, "entry")).decode().split("-")
    await writer.hset(job, mapping={"state": "queued", "queue": "retry"})
    await writer.zadd(partition_key(0, "retry", model, Priority.STANDARD), {f"{ms:0>15}-{number:0>10}:{job_id}": 1})


def tokens_of(record: JobRecord) -> list[int]:
    """The numbers of the tokens that a finished job's record holds, by their texts (see `delta`)."""
    assert record.state is JobState.COMPLETED and record.terminal is not None
    return [int(row.text.strip("<>")) for row in record.terminal.rows]


def delta(run: Claim | int, seq: int, text: str = "") -> Delta:
    """One token of a run, `<seq>` if nothing else is said."""
    number = run if isinstance(run, int) else run.run_number
    return Delta(number, seq, text or f"<{seq}>", (seq,), 0, 1)


def kept(rows: Sequence[Delta]) -> tuple[Delta, ...]:
    """Plain deltas (as `delta` makes them) as a record keeps them: without the ids of their tokens."""
    return tuple([replace(row, run_number=0, ids=()) for row in rows])


async def deltas_of(reader: JobReader, record: JobRecord, after: int = 0) -> list[Delta]:
    """The job's deltas with seq > after, in order: as its record holds them, else as far as they are logged."""
    if record.terminal is not None and record.terminal.rows:
        return [row for row in record.terminal.rows if row.seq > after]
    logged = [row for row in (await reader.history(record.job.id, record.runs)).rows if row.seq > after]
    # It may have ended since its record was read: then its log may be trimmed, and a new record holds them all.
    (now,) = await reader.records([record.job.id])
    if now is not None and now.terminal is not None and now.terminal.rows:
        return [row for row in now.terminal.rows if row.seq > after]
    return logged


def append(
    lease: Lease,
    rows: Mapping[str, Sequence[Delta]],
    *opened: Claim | tuple[int, Opening],
    partition: int = 0,
    oldest: int = 1,
    forced: bool = False,
) -> Call:
    """One step that opens these runs to every address: of a claim, one that begins with the first delta."""
    openings = dict([_opening(each) if isinstance(each, Claim) else each for each in opened])
    encoded = {address: [encode_delta(delta) for delta in deltas] for address, deltas in rows.items()}
    return lease.append_call(partition, encoded, oldest, openings=dict.fromkeys(rows, openings), forced=forced)


def _opening(claim: Claim) -> tuple[int, Opening]:
    return claim.run_number, Opening(claim.job.id)


def sections_of(authors: Sequence[Run]) -> tuple[Section, ...]:
    """The sections of deltas whose authors, one after the other, are these."""
    firsts = [seq for seq, run in enumerate(authors, 1) if seq == 1 or authors[seq - 2] != run]
    return tuple(Section(seq, authors[seq - 1]) for seq in firsts)


async def numbers_read(buffer: ReorderBuffer) -> list[int]:
    """The numbers of the deltas a reader is given until the end of its job."""
    seen: list[int] = []
    async with asyncio.timeout(30):
        while True:
            rows, terminal = await buffer.take(1)
            seen += [row.seq for row in rows]
            if terminal is not None:
                return seen


async def until(condition: Callable[[], Awaitable[T] | T], seconds: float = 30) -> T:
    """Poll until it gives something true; Unavailable counts as "not yet", and is the cause of a timeout."""
    last: Unavailable | None = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    value = condition()
                    if isinstance(value, Awaitable):
                        value = await value
                    if value:
                        return value
                except Unavailable as error:
                    last = error
                await asyncio.sleep(0.01)
    except TimeoutError as error:
        raise error from last


class Flow:
    """Puts go on in the background, each with an id of its own; one worker claims, appends and finishes."""

    def __init__(self, wire: RedisClient) -> None:
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

    async def all_done(self) -> list[JobRecord]:
        """Wait until every job that was accepted so far has ended; their records."""
        ids, reader = list(self.accepted), JobReader(self._wire)

        async def ended() -> list[JobRecord]:
            records = await reader.records(ids)
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
        history = await _repeated(lambda: self._past(claim))
        rows, opening = list(history.rows), Opening(claim.job.id, len(history.rows) + 1, history.last_run)
        while len(rows) < TOKENS:
            rows.append(delta(claim, len(rows) + 1))
            await self._append(lease, partition, claim, rows, opening)
        sections = (*history.sections, Section(opening.first, Run(lease.id, claim.run_number)))
        end = Terminal(claim.job.id, JobState.COMPLETED, len(rows), ("stop",), sections=sections, rows=tuple(rows))
        call = lease.finish_call(Finish(end, claim.run_number, not claim.job.stream))
        await _repeated(lambda: lease.calls([call]))
        self.finished += 1

    async def _append(self, lease: Lease, partition: int, claim: Claim, rows: list[Delta], opening: Opening) -> None:
        addresses = claim.reply if claim.job.stream else (SILENT,)
        run, oldest = (claim.run_number, opening), claim.first_frame
        call = append(lease, dict.fromkeys(addresses, rows[-1:]), run, partition=partition, oldest=oldest)
        try:
            await _repeated(lambda: lease.calls([call]))
        except Rewound:
            everything = dict.fromkeys(addresses, rows[opening.first - 1 :])
            again = append(lease, everything, run, partition=partition, oldest=oldest, forced=True)
            await _repeated(lambda: lease.calls([again]))

    async def _past(self, claim: Claim) -> History:
        return await JobReader(self._wire).history(claim.job.id, claim.earlier_runs) if claim.earlier_runs else NOTHING


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
                await lease.release(job_id, held.run_number)


async def _repeated(action: Callable[[], Awaitable[T]]) -> T:
    """Until it is answered: every script bears repetition."""
    while True:
        try:
            return await action()
        except Unavailable:
            await asyncio.sleep(PAUSE_S)


async def _whole(found: Awaitable[list[JobRecord]], count: int) -> list[JobRecord]:
    records = await found
    return records if len(records) == count else []
