"""Replies on their way back: one subscription per API process, fanned out to the responses it holds open.

Pub/sub may lose messages, the log does not. Every delta has a number, so an inbox knows what it lacks, and what is
lacking is read from the log; an inbox that hears nothing for a while is checked against the record.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TypeAlias

from redis.exceptions import RedisError

from streaming.errors import DecodeError, Unavailable
from streaming.journal import Journal
from streaming.keys import channel, partition_of
from streaming.messages import Delta, Ended, Failure, Frame, State, Terminal, decode_reply
from streaming.queue import Queue
from streaming.wire import Wire

log = logging.getLogger(__name__)

MOST_ROWS = 128
"""Deltas held for one reader; a slower one loses them here and gets them from the log when it catches up."""
TICK_S = 0.25
LONGEST_SILENCE_S = 2.0

GONE = Failure("job_lost", "The store no longer has this job.", 500)


Origin: TypeAlias = tuple[str, int]
"""A frame: its worker and number."""

NOWHERE: Origin = ("", 0)


class Inbox:
    """The replies of one job, in order, each once. One reader takes; the relay and the log give."""

    def __init__(self, job_id: str, after: int = 0, *, whole: bool = False) -> None:
        self.job_id = job_id
        self.whole = whole
        """Only the end is waited for: no use in reading the log before."""
        self.seq = after
        """The last delta given or waiting here."""
        self.terminal: Terminal | None = None
        self.stale = False
        """Something is missing: the log must be read."""
        self.checked = 0.0
        self.patience = TICK_S
        self.frame = NOWHERE
        """The frame of the last delta, before which nothing is missing."""
        self.hung_up = False
        """Whoever waited has left."""
        self.accepted = False
        """The put was answered: if the store does not know the job, it has lost it."""
        self.rewound = False
        """The store lost deltas that were already given, and others came in their place: the stream cannot go on."""
        self._runs: list[tuple[int, str]] = []
        """The worker of each run, after the number of its first delta here."""
        self._rows: list[Delta] = []
        self._early: dict[int, tuple[Delta, Origin]] = {}
        self._waiter: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """The reader has to take something first; until then the log keeps the rest."""
        return len(self._rows) >= MOST_ROWS

    def push(self, row: Delta, frame: Origin = NOWHERE) -> None:
        """Take one delta: the next one is kept, an old one dropped, an early one held until the gap is filled."""
        if row.seq <= self.seq:
            self._compare(row.seq, frame[0])
        elif row.seq > self.seq + 1 or self.full:
            if not self.full and len(self._early) < MOST_ROWS:
                self._early[row.seq] = (row, frame)
            self.stale = True
        else:
            self._accept(row, frame)
            while self._early and (early := self._early.pop(self.seq + 1, None)) is not None:
                self._accept(*early)

    def _accept(self, row: Delta, frame: Origin) -> None:
        self._rows.append(row)
        self.seq, self.frame = row.seq, frame
        self.patience = TICK_S
        if not self._runs or self._runs[-1][1] != frame[0]:
            self._runs.append((row.seq, frame[0]))
        self._wake()

    def _compare(self, seq: int, worker: str) -> None:
        """A delta that was here before must come from the worker it came from then."""
        earlier = [known for first, known in self._runs if first <= seq]
        if worker and earlier and earlier[-1] not in ("", worker):
            self.rewound = True
            self._wake()

    def end(self, terminal: Terminal) -> None:
        """Take the end of the job; if deltas are still missing it is held until they are here."""
        for row in terminal.rows:
            self.push(row)
        if self.seq < terminal.seq:
            self.stale = True
            return
        self.terminal = terminal
        self._wake()

    def hang_up(self) -> None:
        """The reader's client has left: wake the reader."""
        self.hung_up = True
        self._wake()

    async def take(self, patience: float) -> tuple[list[Delta], Terminal | None]:
        """New deltas (perhaps none, after `patience` seconds of silence), and the terminal once all were taken."""
        if not self._rows and self.terminal is None and not self.hung_up and not self.rewound:
            # A future and a timer: asyncio.wait_for costs several times as much, and this is done once per frame.
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(patience, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        rows, self._rows = self._rows, []
        return rows, self.terminal

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Relay:
    """Started once per API process. `address` is what jobs carry as their reply_to."""

    def __init__(self, wire: Wire) -> None:
        self.address = channel("api", secrets.token_hex(6))
        self._wire = wire
        self._journal = Journal(wire)
        self._queue = Queue(wire)
        self._inboxes: dict[str, set[Inbox]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.connected = asyncio.Event()

    async def start(self) -> None:
        """Subscribe (in the background, again and again) and begin to look after silent inboxes."""
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._look_after())]

    async def stop(self) -> None:
        """End the background tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def open(self, job_id: str, after: int = 0, *, whole: bool = False) -> Inbox:
        """The inbox of a job that carries this process's address (open it before the job is put, close it after)."""
        inbox = Inbox(job_id, after, whole=whole)
        inbox.checked = asyncio.get_running_loop().time()
        self._inboxes.setdefault(job_id, set()).add(inbox)
        return inbox

    def close(self, inbox: Inbox) -> None:
        """No more replies to this inbox. Idempotent."""
        inboxes = self._inboxes.get(inbox.job_id, set())
        inboxes.discard(inbox)
        if not inboxes:
            self._inboxes.pop(inbox.job_id, None)

    def listening(self, job_id: str) -> bool:
        """Whether anybody in this process still waits for this job."""
        return job_id in self._inboxes

    async def follow(self, inbox: Inbox) -> None:
        """Have a job of somebody else sent here too; what came before is read from the log.

        Raises UnknownJob, Unavailable.
        """
        await self._queue.follow(inbox.job_id, self.address)
        inbox.stale = True
        await self._refill([inbox])

    async def _listen(self) -> None:
        """A lost subscription is taken up again; what was missed meanwhile is read from the log."""
        while True:
            try:
                async with self._wire.subscribe(self.address) as pubsub:
                    self.connected.set()
                    await self._refill(self._all())
                    while True:
                        message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=30.0)
                        if message is not None:
                            self._dispatch(message["data"])
            except (Unavailable, RedisError, OSError) as error:
                self.connected.clear()
                log.warning("replies interrupted, subscribing again: %s", error)
                await asyncio.sleep(TICK_S)

    def _dispatch(self, data: bytes) -> None:
        try:
            reply = decode_reply(data)
        except DecodeError as error:
            log.error("a reply that is no message was dropped; the log will fill the gap: %s", error)
            return
        match reply:
            case Frame():
                self._deal(reply)
            case Terminal():
                for inbox in self._inboxes.get(reply.job, ()):
                    inbox.end(reply)
            case Ended(job_id):
                for inbox in self._inboxes.get(job_id, ()):
                    inbox.stale = True
                    inbox.checked = 0.0

    def _deal(self, frame: Frame) -> None:
        """A frame's rows to the inboxes of their jobs."""
        origin = (frame.worker, frame.number)
        for row in frame.rows:
            for inbox in self._inboxes.get(row.job, ()):
                inbox.push(row, origin)

    async def _look_after(self) -> None:
        """Every tick: read the log for inboxes that know they miss something, or have long heard nothing."""
        while True:
            await asyncio.sleep(TICK_S / 5)
            now = asyncio.get_running_loop().time()
            due = [inbox for inbox in self._all() if inbox.terminal is None and _is_due(inbox, now)]
            if due:
                try:
                    await self._refill(due)
                except Unavailable as error:
                    log.warning("replies cannot be checked against the log, trying again: %s", error)
                    await asyncio.sleep(TICK_S)

    def _all(self) -> list[Inbox]:
        return [inbox for inboxes in self._inboxes.values() for inbox in inboxes]

    async def _refill(self, inboxes: list[Inbox]) -> None:
        """Bring inboxes up to date from record and log, each worker's log read once for all. Raises Unavailable."""
        if not inboxes:
            return
        now = asyncio.get_running_loop().time()
        there = [inbox.seq > 0 or inbox.accepted for inbox in inboxes]
        records = await self._journal.records([inbox.job_id for inbox in inboxes])
        behind: dict[tuple[int, str], int] = {}
        for inbox, record, was_there in zip(inboxes, records, there, strict=True):
            inbox.checked, inbox.stale = now, False
            inbox.patience = min(inbox.patience * 2, LONGEST_SILENCE_S)
            if record is None:
                if was_there:  # else it was read before the put came, whatever has come since
                    inbox.end(Terminal(inbox.job_id, State.FAILED, inbox.seq, failure=GONE))
            elif record.terminal is not None:
                inbox.end(record.terminal)
            elif not inbox.whole:
                for run in record.runs:
                    log_of = (partition_of(inbox.job_id) or 0, run.worker)
                    first = inbox.frame[1] if inbox.frame[0] == run.worker else run.frame
                    behind[log_of] = min(first, behind.get(log_of, first))
        for (partition, worker), first in behind.items():
            async for frame in self._journal.frames(partition, worker, first):
                self._deal(frame)


def _is_due(inbox: Inbox, now: float) -> bool:
    return not inbox.full and now - inbox.checked >= (TICK_S / 5 if inbox.stale else inbox.patience)
