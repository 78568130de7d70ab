"""Relay: receives workers' frames over one subscription per API process, and fans them out to open responses.

Pub/sub may lose messages; the log does not. Every delta has a number, so a reorder buffer (inbox) detects missing ones,
and the relay reads them from the log. It compares an inbox that receives nothing for a while with the job's record.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress

from penstock.engine import Failure
from runtime.loops import supervise, wait
from runtime.rounds import Rounds
from runtime.turns import ROWS_PER_SLICE
from streaming.errors import DecodeError, NewerMessage, Unavailable, UnknownJob
from streaming.ids import partition_of
from streaming.jobs.codec import decode_in_slices, decode_reply, decode_rowless, is_terminal
from streaming.jobs.frames import Delta, Frame, Opening, Run, openings_of
from streaming.jobs.history import ROWS_AT_ONCE
from streaming.jobs.job import JobState
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import LONG_BYTES, NEWER, JobRecord
from streaming.jobs.reorder_buffer import LOOKS, TICK_S, ReorderBuffer
from streaming.jobs.subscribers import Subscribers, author_of, missing_runs
from streaming.jobs.terminal import Ended, Terminal
from streaming.keys import channel
from streaming.redis.client import RedisClient

log = logging.getLogger(__name__)

SILENCE_S, MAX_SILENCE_S = 2.0, 60.0
"""Before a silent inbox is checked against its record: with few inboxes, and with very many."""
CHECKS_PER_S = 200
"""Maximum number of silent inboxes checked per second."""

GONE = Failure("job_lost", "The store no longer has this job.", 500)


class Relay:
    """Relay of one API process. `address` is the channel that its jobs carry as their `reply_to`."""

    def __init__(self, wire: RedisClient) -> None:
        self.address = channel("api", secrets.token_hex(6))
        self._wire = wire
        self._journal = JobReader(wire)
        self._queue = Queue(wire)
        self._audiences: dict[str, Subscribers] = {}
        """By job."""
        self._behind: set[ReorderBuffer] = set()
        """Inboxes that may lack deltas; they are checked before the others."""
        self._hurry = asyncio.Event()
        self._streams: dict[str, dict[int, tuple[ReorderBuffer, ...]]] = {}
        """The inboxes for each run, by worker and number of the run: where the rows of a frame go."""
        self._followers: dict[int, Rounds[ReorderBuffer, None]] = {}
        """By partition. Inboxes that start to follow at the same time read the log together."""
        self._tasks: list[asyncio.Task[None]] = []
        self._ends: set[asyncio.Task[None]] = set()
        """Tasks that decode long terminal messages."""
        self.connected = asyncio.Event()

    async def start(self) -> None:
        """Start the background tasks: the subscription, renewed when it is lost, and the check of silent inboxes."""
        self._tasks = [asyncio.create_task(supervise(work, TICK_S)) for work in (self._listen, self._look_after)]

    async def stop(self) -> None:
        """End the background tasks."""
        tasks = [*self._tasks, *self._ends]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def open(
        self, job_id: str, after: int = 0, *, runs: Sequence[Run] = (), whole: bool = False, rowless: bool = False
    ) -> ReorderBuffer:
        """Open an inbox for a job that carries this process's address: before the job is put. Close it afterwards."""
        inbox = ReorderBuffer(job_id, after, runs=runs, whole=whole, rowless=rowless)
        inbox.checked = asyncio.get_running_loop().time()
        audience = self._audiences.setdefault(job_id, Subscribers())
        inbox.openings = audience.openings
        self._set_subscribers(audience, (*audience.inboxes, inbox))
        return inbox

    def close(self, inbox: ReorderBuffer) -> None:
        """Stop deliveries to this inbox. Idempotent."""
        audience = self._audiences.get(inbox.job_id)
        if audience is None or inbox not in audience.inboxes:
            return
        self._behind.discard(inbox)
        self._set_subscribers(audience, tuple(each for each in audience.inboxes if each is not inbox))
        if not audience.inboxes:
            del self._audiences[inbox.job_id]

    def _set_subscribers(self, audience: Subscribers, inboxes: tuple[ReorderBuffer, ...]) -> None:
        """Replace the inboxes of a job."""
        audience.inboxes = inboxes
        for worker, number in audience.streams:
            streams = self._streams[worker]
            if inboxes:
                streams[number] = inboxes
                continue
            del streams[number]
            if not streams:
                del self._streams[worker]

    def listening(self, job_id: str) -> bool:
        """Whether this process has an open inbox for this job."""
        return job_id in self._audiences

    async def follow(self, inbox: ReorderBuffer, *, joining: bool = False) -> None:
        """Subscribe to a job that another process put, and read its earlier deltas from the log.

        Raises UnknownJob, Unavailable; Abandoned (only if `joining`, because an idempotency key led here).
        """
        await self._queue.follow(inbox.job_id, self.address, joining=joining)
        inbox.stale = True
        partition = partition_of(inbox.job_id) or 0
        if partition not in self._followers:
            self._followers[partition] = Rounds(self._refill_all)
        await self._followers[partition].ask(inbox)

    async def _listen(self) -> None:
        """Renew a lost subscription, and read the deltas that were missed from the log."""
        while True:
            try:
                async with self._wire.subscribe(self.address) as subscription:
                    self.connected.set()
                    await self._refill(self._all())
                    await subscription.pour(self._dispatch)
            except Unavailable as error:
                self.connected.clear()
                log.warning("replies interrupted, subscribing again: %s", error)
                await asyncio.sleep(TICK_S)

    def _dispatch(self, data: bytes) -> None:
        if len(data) >= LONG_BYTES and is_terminal(data):
            self._ends.add(task := asyncio.create_task(self._end_long(data)))
            task.add_done_callback(self._ends.discard)
            return
        try:
            reply = decode_reply(data)
        except NewerMessage:
            return  # the next check of its silent inboxes ends their readers
        except DecodeError as error:
            log.error("a reply that is no message was dropped; the log will fill the gap: %s", error)
            return
        match reply:
            case Frame():
                self._dispatch_rows(reply)
            case Terminal():
                for inbox in self._listeners(reply.job):
                    self._end(inbox, reply)
            case Ended(job_id):
                for inbox in self._listeners(job_id):
                    inbox.over = inbox.stale = True
                    inbox.checked = 0.0
                    self._note(inbox)

    def _end(self, inbox: ReorderBuffer, terminal: Terminal) -> None:
        inbox.over = True
        inbox.end(terminal)
        inbox.flush()
        self._note(inbox)

    async def _end_long(self, data: bytes) -> None:
        """Like `_end` for a message with very many rows: decode them in slices, and only if an inbox wants them."""
        try:
            head = decode_rowless(data)
            wanted = False
            for inbox in self._listeners(head.job):
                if inbox.rowless:
                    self._end(inbox, head)
                wanted = wanted or not inbox.rowless
            if not wanted:
                return
            terminal = await self._wire.turns.run(decode_in_slices(data, ROWS_PER_SLICE))
        except NewerMessage:
            return  # the next check of its silent inboxes ends their readers
        except DecodeError as error:
            log.error("the end of a job cannot be read and was dropped; the record is looked at: %s", error)
            return
        for inbox in self._listeners(head.job):
            async with self._wire.turns:
                self._end(inbox, terminal)

    def _note(self, inbox: ReorderBuffer) -> None:
        if inbox.stale:
            self._behind.add(inbox)
            self._hurry.set()

    def _listeners(self, job_id: str) -> Sequence[ReorderBuffer]:
        audience = self._audiences.get(job_id)
        return audience.inboxes if audience else ()

    def _dispatch_rows(self, frame: Frame, valid: Container[Run] | None = None) -> None:
        """A frame's rows to the inboxes of their jobs. Of a frame from the log only those of runs that the records
        name: a log may also hold what a run wrote that the store has forgotten since."""
        worker, number = frame.worker, frame.number
        for stream, opening in frame.openings.items():
            self._open_run(Run(worker, stream), opening)
        streams, rows = self._streams.get(worker), frame.rows
        if streams is None:
            return
        if valid is not None:
            rows = tuple([row for row in rows if Run(worker, abs(row.stream)) in valid])
        if len({row.stream for row in rows}) == len(rows):
            self._pass_on(rows, streams, worker, number)
            return
        given = [(inbox, row) for row in rows for inbox in streams.get(row.stream, ())]
        for inbox, row in given:
            inbox.push(row, author_of(inbox, row, worker), number)
        for inbox, _ in given:
            inbox.flush()
            self._note(inbox)

    def _pass_on(
        self, rows: Sequence[Delta], streams: Mapping[int, Sequence[ReorderBuffer]], worker: str, number: int
    ) -> None:
        """Pass on rows of different jobs. The hot path: for a token that comes in order, it calls only `flow`."""
        now = time.monotonic()
        for row in rows:
            for inbox in streams.get(row.stream, ()):
                flow = inbox.flow
                if flow is None or row.seq != inbox.seq + 1 or row.stream != inbox.stream or inbox.worker != worker:
                    inbox.push(row, author_of(inbox, row, worker), number)
                    inbox.flush()
                    self._note(inbox)
                    continue
                inbox.seq, inbox.number = row.seq, number
                try:
                    more = flow(row, now)
                except Exception as error:  # noqa: BLE001 - its reader gets the error; the other inboxes continue
                    inbox.stop(error)
                else:
                    if not more:
                        inbox.stop()

    def _open_run(self, run: Run, opening: Opening) -> None:
        """Connect a run's number in a worker's frames with the inboxes of its job."""
        audience = self._audiences.get(opening.job)
        if audience is None:
            return
        streams = self._streams.setdefault(run.worker, {})
        if run.number not in streams:
            streams[run.number] = audience.inboxes
            audience.streams.append((run.worker, run.number))
        audience.openings.setdefault(run, opening)
        for copied, its_opening in openings_of(opening.job, opening.copied):
            audience.openings.setdefault(copied, its_opening)

    async def _look_after(self) -> None:
        """Every tick, compare inboxes that received nothing for a while with record and log; check those that miss
        deltas sooner."""
        loop = asyncio.get_running_loop()
        due_all = loop.time() + TICK_S
        while True:
            await self._pause(due_all - loop.time())
            now = loop.time()
            silence = max(SILENCE_S, len(self._audiences) / CHECKS_PER_S)
            looked = self._behind
            if now >= due_all:
                looked, due_all = set(self._all()), now + TICK_S
            due = [inbox for inbox in looked if inbox.is_due(now, silence)]
            self._behind = {inbox for inbox in self._behind if inbox.stale and inbox.terminal is None}
            if due:
                try:
                    await self._refill(due)
                except Unavailable as error:
                    log.warning("replies cannot be checked against the log, trying again: %s", error)
                    await asyncio.sleep(TICK_S)

    async def _pause(self, seconds: float) -> None:
        """Wait at most `seconds`; less if an inbox is behind, or falls behind meanwhile: then a fraction of a tick."""
        if not self._behind:
            self._hurry.clear()
            await wait(self._hurry, seconds)
        if self._behind:
            await asyncio.sleep(TICK_S / LOOKS)

    def _all(self) -> list[ReorderBuffer]:
        return [inbox for audience in self._audiences.values() for inbox in audience.inboxes]

    async def _refill_all(self, inboxes: Sequence[ReorderBuffer]) -> Sequence[None]:
        await self._refill_part(inboxes)
        return [None] * len(inboxes)

    async def _refill(self, inboxes: Sequence[ReorderBuffer]) -> None:
        """Bring inboxes up to date. Partitions are read separately, so that an unavailable one delays no other.

        Raises Unavailable.
        """
        parts: dict[int, list[ReorderBuffer]] = {}
        for inbox in inboxes:
            parts.setdefault(partition_of(inbox.job_id) or 0, []).append(inbox)
        done = await asyncio.gather(*map(self._refill_part, parts.values()), return_exceptions=True)
        for error in done:
            if error is not None:
                raise error

    async def _refill_part(self, inboxes: Sequence[ReorderBuffer]) -> None:
        """Bring the inboxes of one partition up to date from records and logs; each worker's log is read once."""
        now = asyncio.get_running_loop().time()
        there = [inbox.seq > 0 or inbox.accepted for inbox in inboxes]
        standing = [inbox.standing() for inbox in inboxes]
        jobs = list(dict.fromkeys(inbox.job_id for inbox in inboxes))
        resultless = set(jobs).difference([inbox.job_id for inbox in inboxes if not inbox.rowless])
        found = await self._journal.records(jobs, bodies=False, resultless=resultless)
        by_job = dict(zip(jobs, found, strict=True))
        records = [by_job[inbox.job_id] for inbox in inboxes]
        behind: dict[tuple[int, str], int] = {}
        unheard: set[str] = set()
        """Jobs whose record no longer has this address: its worker dropped it, or the store lost it."""
        for inbox, record, was_there, held in zip(inboxes, records, there, standing, strict=True):
            inbox.look(now, MAX_SILENCE_S)
            if record is None:
                if was_there:  # else the record was read before the put reached the store
                    inbox.end(Terminal(inbox.job_id, JobState.FAILED, inbox.seq, failure=GONE))
            elif record.terminal is not None:
                inbox.end(record.terminal)
            else:
                inbox.settle(held, [logged.run for logged in record.runs])
                if record.state is JobState.RUNNING and not inbox.whole and self.address not in record.addresses:
                    unheard.add(inbox.job_id)
                for logged in missing_runs(inbox, record):
                    log_of = (partition_of(inbox.job_id) or 0, logged.run.worker)
                    behind[log_of] = min(logged.frame, behind.get(log_of, logged.frame))
            inbox.flush()
            if record is not None and record.terminal is not None and len(record.terminal.rows) >= ROWS_AT_ONCE:
                await asyncio.sleep(0)
        await asyncio.gather(*map(self._follow_again, unheard))
        runs = {logged.run for record in found if record is not None for logged in record.runs}
        for (partition, worker), first in behind.items():
            try:
                async with aclosing(self._journal.frames(partition, worker, first)) as frames:
                    async for frame in frames:
                        self._dispatch_rows(frame, runs)
                        if all(inbox.full for inbox in inboxes):  # no inbox can take more
                            self._call_again(inboxes)
                            break
            except NewerMessage:
                self._end_newer(worker, zip(inboxes, records, strict=True))

    def _call_again(self, inboxes: Iterable[ReorderBuffer]) -> None:
        """Read on in the log once the readers have taken what their inboxes hold."""
        for inbox in inboxes:
            inbox.stale = True
            self._note(inbox)

    async def _follow_again(self, job_id: str) -> None:
        with suppress(UnknownJob):
            await self._queue.follow(job_id, self.address)

    def _end_newer(self, worker: str, looked: Iterable[tuple[ReorderBuffer, JobRecord | None]]) -> None:
        """End the readers of jobs that this worker runs: it has a newer version, and this process cannot read its
        frames. The jobs continue."""
        log.warning("worker %s is of a newer version: its readers here are told to ask another process", worker)
        for inbox, record in looked:
            if record is not None and record.terminal is None and record.worker == worker:
                inbox.end(Terminal(inbox.job_id, JobState.FAILED, inbox.seq, failure=NEWER))
                inbox.flush()
