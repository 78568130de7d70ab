"""Relay: receives workers' frames over one subscription per API process, and fans them out to open responses.

Pub/sub may lose messages; the log does not. Every delta has a number, so a reorder buffer detects missing ones,
and the relay reads them from the log. It compares a buffer that receives nothing for a while with the job's record.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.engine import Failure
from penstock.loops import ExpectedErrors, Rounds, coalesced, run_periodically, supervise, wait
from streaming.errors import DecodeError, NewerMessage, Unavailable, UnknownJob
from streaming.ids import partition_of
from streaming.jobs.codec import (
    MAX_ROWS_PER_FRAME,
    Ended,
    Frame,
    Opening,
    Run,
    Terminal,
    author,
    decode_reply,
    openings_of,
)
from streaming.jobs.history import ROWS_AT_ONCE, LoggedRun, LogName, read_log
from streaming.jobs.job import JobState
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import NEWER, JobRecord
from streaming.jobs.reorder_buffer import LOOKS, TICK_S, Flow, ReorderBuffer
from streaming.keys import channel
from streaming.redis.client import RedisClient

log = logging.getLogger(__name__)

SILENCE_S, MAX_SILENCE_S = 2.0, 60.0
"""Before a silent buffer is checked against its record: with few buffers, and with very many."""
CHECKS_PER_S = 200
"""Maximum number of silent buffers checked per second."""

Held: TypeAlias = dict[ReorderBuffer, Flow | None]
"""The buffers that one read brought rows for, each with the flow that took them past it, if one did."""

GONE = Failure("job_lost", "The store no longer has this job.", 500)


@dataclass(slots=True)
class Subscribers:
    """The subscribers of one job, and the runs that its workers have opened."""

    buffers: tuple[ReorderBuffer, ...] = ()
    runs: list[tuple[str, int]] = field(default_factory=list)
    """(worker, number of the run) of each run that a worker has opened."""
    openings: dict[Run, Opening] = field(default_factory=dict)
    """The opening of each run, which says whose deltas the run copied."""


NOBODY = Subscribers()


class Relay:
    """Relay of one API process. `address` is the channel that its jobs carry as their `reply_to`."""

    def __init__(self, client: RedisClient) -> None:
        self.address = channel("api", secrets.token_hex(6))
        self._client = client
        self._reader = JobReader(client)
        self._queue = Queue(client)
        self._subscribers: dict[str, Subscribers] = {}
        """By job."""
        self._hurry = asyncio.Event()
        """A buffer may lack deltas."""
        self._by_run: dict[str, dict[int, Subscribers]] = {}
        """The subscribers of each run, by worker and number of the run: where the rows of a frame go."""
        self._reads: dict[int, Rounds[ReorderBuffer, None]] = defaultdict(lambda: Rounds(self._read))
        """By partition: an unavailable one delays no other. Buffers that are read at the same time share one pass over
        each log."""
        self._tasks: list[asyncio.Task[None]] = []
        self.connected = asyncio.Event()

    async def start(self) -> None:
        """Start the background tasks: the subscription, renewed when it is lost, and the check of silent buffers."""
        self._tasks = [asyncio.create_task(supervise(work, TICK_S)) for work in (self._listen, self._look_after)]

    async def stop(self) -> None:
        """End the background tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def open(
        self, job_id: str, after: int = 0, *, runs: Sequence[Run] = (), whole: bool = False, rowless: bool = False
    ) -> ReorderBuffer:
        """Open a buffer for a job that carries this process's address: before the job is put. Close it afterwards."""
        buffer = ReorderBuffer(job_id, after, runs=runs, whole=whole, rowless=rowless)
        buffer.checked = asyncio.get_running_loop().time()
        subscribers = self._subscribers.setdefault(job_id, Subscribers())
        buffer.openings = subscribers.openings
        subscribers.buffers += (buffer,)
        return buffer

    def close(self, buffer: ReorderBuffer) -> None:
        """Stop deliveries to this buffer. Idempotent."""
        subscribers = self._subscribers.get(buffer.job_id)
        if subscribers is None or buffer not in subscribers.buffers:
            return
        subscribers.buffers = tuple(each for each in subscribers.buffers if each is not buffer)
        if subscribers.buffers:
            return
        del self._subscribers[buffer.job_id]
        for worker, run_number in subscribers.runs:
            del self._by_run[worker][run_number]
            if not self._by_run[worker]:
                del self._by_run[worker]

    def listening(self, job_id: str) -> bool:
        """Whether this process has an open buffer for this job."""
        return job_id in self._subscribers

    async def follow(self, buffer: ReorderBuffer, *, joining: bool = False) -> None:
        """Subscribe to a job that another process put, and read its earlier deltas from the log.

        Raises UnknownJob, Unavailable; Abandoned (only if `joining`, because an idempotency key led here).
        """
        await self._queue.follow(buffer.job_id, self.address, joining=joining)
        buffer.stale = True
        await self._read_soon(buffer)

    def _read_soon(self, buffer: ReorderBuffer) -> asyncio.Future[None]:
        """Bring a buffer up to date from record and log, together with others that need it at the same time."""
        return self._reads[partition_of(buffer.job_id) or 0].ask(buffer)

    async def _listen(self) -> None:
        """Renew a lost subscription, and read the deltas that were missed from the log."""

        async def listen() -> None:
            try:
                async with self._client.subscribe(self.address) as subscription:
                    self.connected.set()
                    await self._refill(self._all())
                    await subscription.pour(self._dispatch)
            finally:
                self.connected.clear()

        expected = ExpectedErrors(Unavailable, log.warning, "replies interrupted, subscribing again: %s")
        await run_periodically(listen, TICK_S, expected)

    def _dispatch(self, messages: Iterable[bytes]) -> None:
        """Handle the messages of one read. A reader gets what they brought for it in one write: behind schedule, a read
        has several of its tokens, and at its job's end the last token comes with the end."""
        held: Held = {}
        try:
            for data in messages:
                self._dispatch_one(data, held)
        finally:
            self._write_out(held)

    def _dispatch_one(self, data: bytes, held: Held) -> None:
        try:
            reply = decode_reply(data)
        except NewerMessage:
            return  # the next check of its silent buffers ends their readers
        except DecodeError as error:
            log.error("a reply that is no message was dropped; the log will fill the gap: %s", error)
            return
        match reply:
            case Frame():
                self._dispatch_rows(reply, held)
            case Terminal():
                for buffer in self._listeners(reply.job):
                    self._end(buffer, reply)
            case Ended(job_id):
                for buffer in self._listeners(job_id):
                    buffer.over = buffer.stale = True
                    buffer.checked = 0.0
                    self._note(buffer)  # to be checked again, if the read that begins here fails
                    self._read_soon(buffer).add_done_callback(_forget_error)

    def _end(self, buffer: ReorderBuffer, terminal: Terminal) -> None:
        buffer.over = True
        buffer.end(terminal)
        buffer.flush()
        self._note(buffer)

    def _note(self, buffer: ReorderBuffer) -> None:
        """Have a buffer checked soon if it lacks deltas."""
        if buffer.stale:
            self._hurry.set()

    def _listeners(self, job_id: str) -> Sequence[ReorderBuffer]:
        return self._subscribers.get(job_id, NOBODY).buffers

    def _dispatch_rows(self, frame: Frame, held: Held, valid: Container[Run] | None = None) -> None:
        """Pass a frame's rows to the buffers of their jobs. Of a frame from the log only those of runs that the records
        name: a log may also hold what a run wrote that the store has forgotten since.

        The hot path: for a token that comes in order, it calls only `flow.write`.
        """
        worker, frame_number = frame.worker, frame.number
        for run_number, opening in frame.openings.items():
            self._open_run(Run(worker, run_number), opening)
        runs, rows = self._by_run.get(worker), frame.rows
        if runs is None:
            return
        if valid is not None:
            rows = tuple([row for row in rows if Run(worker, abs(row.run_number)) in valid])
        for row in rows:
            for buffer in runs.get(row.run_number, NOBODY).buffers:
                flow = buffer.flow
                if (
                    flow is None
                    or row.seq != buffer.seq + 1
                    or row.run_number != buffer.run_number
                    or buffer.worker != worker
                ):
                    run = Run(worker, row.run_number)
                    its = buffer.openings.get(run)
                    buffer.push(row, (its and author(its.copied, row.seq)) or run, frame_number)
                    held.setdefault(buffer, None)
                    continue
                buffer.seq, buffer.frame_number = row.seq, frame_number
                try:
                    more = flow.write(row)
                except Exception as error:  # noqa: BLE001 - its reader gets the error; the other buffers continue
                    buffer.stop(error)
                else:
                    held[buffer] = flow
                    if not more:
                        buffer.stop()

    def _write_out(self, held: Held) -> None:
        """Have every reader get what it was given."""
        now = time.monotonic()
        for buffer, flow in held.items():
            if flow is not None:
                try:
                    flow.flush(now)
                except Exception as error:  # noqa: BLE001 - its reader gets the error; the other buffers continue
                    buffer.stop(error)
            if buffer.flow is None:  # it may have rows, or lack some
                buffer.flush()
                self._note(buffer)

    def _open_run(self, run: Run, opening: Opening) -> None:
        """Connect a run's number in a worker's frames with the buffers of its job."""
        subscribers = self._subscribers.get(opening.job)
        if subscribers is None:
            return
        runs = self._by_run.setdefault(run.worker, {})
        if run.number not in runs:
            runs[run.number] = subscribers
            subscribers.runs.append((run.worker, run.number))
        subscribers.openings.setdefault(run, opening)
        for copied, its_opening in openings_of(opening.job, opening.copied):
            subscribers.openings.setdefault(copied, its_opening)

    async def _look_after(self) -> None:
        """Every tick, compare buffers that received nothing for a while with record and log; check those that miss
        deltas sooner."""
        loop = asyncio.get_running_loop()
        due_all, behind = loop.time() + TICK_S, list[ReorderBuffer]()
        while True:
            if not behind:
                self._hurry.clear()
                await wait(self._hurry, due_all - loop.time())
            if behind or self._hurry.is_set():
                await asyncio.sleep(TICK_S / LOOKS)
            now, buffers = loop.time(), self._all()
            looked = behind = [buffer for buffer in buffers if buffer.stale and buffer.terminal is None]
            if now >= due_all:
                # Without buffers, wait two ticks: one that is opened meanwhile is checked a tick after its opening.
                looked, due_all = buffers, now + (TICK_S if buffers else coalesced(2 * TICK_S))
            silence = max(SILENCE_S, len(self._subscribers) / CHECKS_PER_S)
            try:
                await self._refill([buffer for buffer in looked if buffer.is_due(now, silence)])
            except Unavailable as error:
                log.warning("replies cannot be checked against the log, trying again: %s", error)
                await asyncio.sleep(TICK_S)

    def _all(self) -> list[ReorderBuffer]:
        return [buffer for subscribers in self._subscribers.values() for buffer in subscribers.buffers]

    async def _refill(self, buffers: Iterable[ReorderBuffer]) -> None:
        """Bring buffers up to date. Raises Unavailable, after those of the other partitions are."""
        for done in await asyncio.gather(*map(self._read_soon, buffers), return_exceptions=True):
            if isinstance(done, BaseException):
                raise done

    async def _read(self, buffers: Sequence[ReorderBuffer]) -> Sequence[None]:
        """Bring the buffers of one partition up to date from records and logs; each worker's log is read once. Returns
        nothing for each of them, as `Rounds` wants it."""
        now = asyncio.get_running_loop().time()
        there = [buffer.seq > 0 or buffer.accepted for buffer in buffers]
        standing = [buffer.standing() for buffer in buffers]
        jobs = list(dict.fromkeys(buffer.job_id for buffer in buffers))
        resultless = set(jobs).difference([buffer.job_id for buffer in buffers if not buffer.rowless])
        by_job = dict(zip(jobs, await self._reader.records(jobs, bodies=False, resultless=resultless), strict=True))
        looked = [(buffer, by_job[buffer.job_id]) for buffer in buffers]
        behind: dict[LogName, int] = {}
        unheard: set[str] = set()
        """Jobs whose record no longer has this address: its worker dropped it, or the store lost it."""
        for (buffer, record), was_there, held in zip(looked, there, standing, strict=True):
            buffer.look(now, MAX_SILENCE_S)
            if record is None:
                if was_there:  # else the record was read before the put reached the store
                    buffer.end(Terminal(buffer.job_id, JobState.FAILED, buffer.seq, failure=GONE))
            elif record.terminal is not None:
                buffer.end(record.terminal)
            else:
                buffer.settle(held, [logged.run for logged in record.runs])
                if record.state is JobState.RUNNING and not buffer.whole and self.address not in record.addresses:
                    unheard.add(buffer.job_id)
                for name, first in missing_frames(buffer, record.runs):
                    behind[name] = min(first, behind.get(name, first))
            buffer.flush()
            if record is not None and record.terminal is not None and len(record.terminal.rows) >= ROWS_AT_ONCE:
                await asyncio.sleep(0)
        await asyncio.gather(*map(self._follow_again, unheard))
        for name, first in behind.items():
            await self._read_log(partition_of(jobs[0]) or 0, name, first, looked)
        for buffer, record in looked:
            if record is not None and not buffer.whole:
                buffer.interrupt(record.interruption)
        return [None] * len(buffers)

    async def _read_log(
        self, partition: int, name: LogName, first: int, looked: Sequence[tuple[ReorderBuffer, JobRecord | None]]
    ) -> None:
        """Bring buffers up to date from one log, from frame `first` on."""
        runs = {logged.run for _, record in looked if record is not None for logged in record.runs}
        try:
            async with aclosing(read_log(self._client, partition, name, first)) as frames:
                async for frame in frames:
                    held: Held = {}
                    self._dispatch_rows(frame, held, runs)
                    self._write_out(held)
                    if all(buffer.full for buffer, _ in looked):  # read on once their readers have taken something
                        for buffer, _ in looked:
                            buffer.stale = True
                        self._hurry.set()
                        break
        except NewerMessage:
            self._end_newer(name, looked)

    async def _follow_again(self, job_id: str) -> None:
        with suppress(UnknownJob):
            await self._queue.follow(job_id, self.address)

    def _end_newer(self, name: LogName, looked: Iterable[tuple[ReorderBuffer, JobRecord | None]]) -> None:
        """End the readers of jobs whose deltas are in this log: a worker of a newer version wrote it, and this process
        cannot read its frames. The jobs continue."""
        log.warning("%s %s is of a newer version: its readers here are told to ask another process", *name)
        for buffer, record in looked:
            if record is None or record.terminal is not None:
                continue
            if name in (LogName("log", record.worker), LogName("parked", buffer.job_id)):
                buffer.end(Terminal(buffer.job_id, JobState.FAILED, buffer.seq, failure=NEWER))
                buffer.flush()


def _forget_error(read: asyncio.Future[None]) -> None:
    """Mark the error of a read as retrieved: the check of silent buffers reads again."""
    if not read.cancelled():
        read.exception()


def missing_frames(buffer: ReorderBuffer, runs: Sequence[LoggedRun]) -> Iterator[tuple[LogName, int]]:
    """The logs that may hold deltas which a buffer lacks, each with the first frame that may. `runs`: of its job."""
    if buffer.whole or buffer.rewound:
        return
    current = Run(buffer.worker, buffer.run_number)
    for place, logged in enumerate(runs):
        if logged.run == current and buffer.frame_number:
            # The frame is 0 if the job was put back: its deltas are parked.
            runs = (LoggedRun(current, buffer.frame_number if logged.frame else 0), *runs[place + 1 :])
            break
    for logged in runs:
        # A parked log holds all deltas of its job in order, MAX_ROWS_PER_FRAME in each frame but the last.
        yield logged.log(buffer.job_id), logged.frame or buffer.seq // MAX_ROWS_PER_FRAME + 1
