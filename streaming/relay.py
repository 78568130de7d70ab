"""Replies on their way back: one subscription per API process, fanned out to the responses it holds open.

Pub/sub may lose messages, the log does not. Every delta has a number, so an inbox knows what it lacks, and what is
lacking is read from the log; an inbox that hears nothing for a while is checked against the record.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

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
SILENCE_S, LONGEST_SILENCE_S = 2.0, 60.0
"""Before a silent inbox is checked against its record: with few inboxes, and with very many."""
CHECKS_PER_S = 200
"""Checks of silent inboxes, at most."""
LOOKS = 5
"""A tick, at those that are behind."""

GONE = Failure("job_lost", "The store no longer has this job.", 500)


Origin: TypeAlias = tuple[str, int]
"""A frame: its worker and number."""

NOWHERE: Origin = ("", 0)

Sink: TypeAlias = Callable[[list[Delta], Terminal | None], bool]
"""Shows what has come, at once and without waiting. False: nothing more for now."""

Flow: TypeAlias = Callable[[Delta, float], bool]
"""The same for the next delta alone, which came at a time (monotonic): nearly all there is to show."""


class Inbox:
    """The replies of one job, in order, each once. The relay and the log give; one reader takes, or has them poured.

    Whoever gives calls `tell` when it is done, so that a reader is served once for all that a frame holds.
    """

    __slots__ = (
        *("_direct", "_early", "_fault", "_looked", "_rows", "_runs", "_sink", "_waiter"),
        *("accepted", "checked", "flow", "hung_up", "job_id", "number", "patience", "rewound", "seq", "stale"),
        *("terminal", "whole", "worker"),
    )

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
        """When it was last known that nothing is missing (loop time)."""
        self.patience = TICK_S
        self._looked = after
        self.worker, self.number = NOWHERE
        """The frame of the last delta, before which nothing is missing."""
        self.flow: Flow | None = None
        """There while the inbox is poured and nothing waits here: the same worker's next delta goes straight on."""
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
        self._sink: Sink | None = None
        self._direct: Flow | None = None
        self._fault: Exception | None = None

    @property
    def full(self) -> bool:
        """The reader has to take something first; until then the log keeps the rest."""
        return len(self._rows) >= MOST_ROWS

    def push(self, row: Delta, frame: Origin = NOWHERE) -> None:
        """Take one delta: the next one is kept, an old one dropped, an early one held until the gap is filled."""
        if row.seq == self.seq + 1 and len(self._rows) < MOST_ROWS:
            self._accept(row, frame)
            if self._early:
                self._accept_early()
        elif row.seq <= self.seq:
            self._compare(row.seq, frame[0])
        else:
            if not self.full and len(self._early) < MOST_ROWS:
                self._early[row.seq] = (row, frame)
            self.stale, self.flow = True, None

    def _accept(self, row: Delta, frame: Origin) -> None:
        self._rows.append(row)
        self.seq = row.seq
        if self.worker != frame[0] or not self._runs:
            self._runs.append((row.seq, frame[0]))
        self.worker, self.number = frame

    def _accept_early(self) -> None:
        while (early := self._early.pop(self.seq + 1, None)) is not None:
            self._accept(*early)

    def _compare(self, seq: int, worker: str) -> None:
        """A delta that was here before must come from the worker it came from then."""
        earlier = [known for first, known in self._runs if first <= seq]
        if worker and earlier and earlier[-1] not in ("", worker):
            self.rewound, self.flow = True, None

    def end(self, terminal: Terminal) -> None:
        """Take the end of the job; if deltas are still missing it is held until they are here."""
        for row in terminal.rows:
            self.push(row)
        if self.seq < terminal.seq:
            self.stale = True
            return
        self.terminal = terminal

    def is_due(self, now: float, silence: float) -> bool:
        """Whether the log should be asked; a stream whose deltas keep coming lacks nothing."""
        if self.terminal is not None or self.full:
            return False
        if self.stale:
            return now - self.checked >= TICK_S / LOOKS
        if self.seq != self._looked:
            self._looked, self.checked, self.patience = self.seq, now, TICK_S
        return now - self.checked >= min(self.patience, silence)

    def hang_up(self) -> None:
        """The reader's client has left: wake the reader."""
        self.hung_up = True
        self._wake()

    async def take(self, patience: float) -> tuple[list[Delta], Terminal | None]:
        """New deltas (perhaps none, after `patience` seconds of silence), and the terminal once all were taken."""
        if not self._rows and self.terminal is None and not self.hung_up and not self.rewound:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(patience, self._wake)
            try:
                await self._woken()
            finally:
                timer.cancel()
        rows, self._rows = self._rows, []
        return rows, self.terminal

    async def pour(self, sink: Sink, direct: Flow | None = None) -> None:
        """Have `sink` called with what is here and with all that comes, from where it arrives: no task is woken per
        frame. `direct`, if there is one, is called for what comes one by one. Returns after the terminal, when they
        have enough, the client has left, or the stream is rewound.

        Raises what they raise.
        """
        self._sink, self._direct = sink, direct
        try:
            self._flow_on()
            self.tell()
            if self._sink is not None and self.terminal is None and not self.hung_up and not self.rewound:
                await self._woken()
        finally:
            self._sink = self._direct = self.flow = None
        if self._fault is not None:
            raise self._fault

    def _flow_on(self) -> None:
        if not (self._rows or self._early or self.rewound):
            self.flow = self._direct

    def stop(self, fault: Exception | None = None) -> None:
        """Pour no more, and wake whoever had it poured."""
        self._fault = fault
        self._sink = self._direct = self.flow = None
        self._wake()

    def tell(self) -> None:
        """Something was given: pour it, or wake whoever waits."""
        rows, terminal, sink = self._rows, self.terminal, self._sink
        if not rows and terminal is None and not self.rewound:
            return
        if sink is None or self.rewound:
            self._wake()
            return
        self._rows = []
        try:
            more = sink(rows, terminal)
        except Exception as error:  # noqa: BLE001 - whoever pours hears of it; the other inboxes go on
            self.stop(error)
            return
        if more and terminal is None:
            self._flow_on()
        else:
            self.stop()

    async def _woken(self) -> None:
        # A bare future: asyncio.wait_for costs several times as much.
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True)
class Audience:
    """Who listens to one job, and the workers that have named it, each with the number it gave the job."""

    inboxes: tuple[Inbox, ...] = ()
    named: list[tuple[str, int]] = field(default_factory=list)


class Relay:
    """Started once per API process. `address` is what jobs carry as their reply_to."""

    def __init__(self, wire: Wire) -> None:
        self.address = channel("api", secrets.token_hex(6))
        self._wire = wire
        self._journal = Journal(wire)
        self._queue = Queue(wire)
        self._audiences: dict[str, Audience] = {}
        """By job."""
        self._behind: set[Inbox] = set()
        """Inboxes that may miss something: looked at before the others."""
        self._hurry = asyncio.Event()
        self._streams: dict[str, dict[int, tuple[Inbox, ...]]] = {}
        """The inboxes of these audiences by worker and number: what a frame is dealt by."""
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
        audience = self._audiences.setdefault(job_id, Audience())
        self._seat(audience, (*audience.inboxes, inbox))
        return inbox

    def close(self, inbox: Inbox) -> None:
        """No more replies to this inbox. Idempotent."""
        audience = self._audiences.get(inbox.job_id)
        if audience is None or inbox not in audience.inboxes:
            return
        self._behind.discard(inbox)
        self._seat(audience, tuple(each for each in audience.inboxes if each is not inbox))
        if not audience.inboxes:
            del self._audiences[inbox.job_id]

    def _seat(self, audience: Audience, inboxes: tuple[Inbox, ...]) -> None:
        """From now on these are the audience."""
        audience.inboxes = inboxes
        for worker, number in audience.named:
            streams = self._streams[worker]
            if inboxes:
                streams[number] = inboxes
                continue
            del streams[number]
            if not streams:
                del self._streams[worker]

    def listening(self, job_id: str) -> bool:
        """Whether anybody in this process still waits for this job."""
        return job_id in self._audiences

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
                async with self._wire.subscribe(self.address) as subscription:
                    self.connected.set()
                    await self._refill(self._all())
                    await subscription.pour(self._dispatch)
            except Unavailable as error:
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
                for inbox in self._listeners(reply.job):
                    inbox.end(reply)
                    inbox.tell()
                    self._note(inbox)
            case Ended(job_id):
                for inbox in self._listeners(job_id):
                    inbox.stale = True
                    inbox.checked = 0.0
                    self._note(inbox)

    def _note(self, inbox: Inbox) -> None:
        if inbox.stale:
            self._behind.add(inbox)
            self._hurry.set()

    def _listeners(self, job_id: str) -> Sequence[Inbox]:
        audience = self._audiences.get(job_id)
        return audience.inboxes if audience else ()

    def _deal(self, frame: Frame) -> None:
        """A frame's rows to the inboxes of their jobs."""
        worker, number = sys.intern(frame.worker), frame.number
        for stream, job_id in frame.names.items():
            self._name(worker, stream, job_id)
        streams, rows = self._streams.get(worker), frame.rows
        if streams is None:
            return
        if len({row.stream for row in rows}) == len(rows):
            self._pass_on(rows, streams, (worker, number))
            return
        given = [(inbox, row) for row in rows for inbox in streams.get(row.stream, ())]
        for inbox, row in given:
            inbox.push(row, (worker, number))
        for inbox, _ in given:
            inbox.tell()
            self._note(inbox)

    def _pass_on(self, rows: Sequence[Delta], streams: Mapping[int, Sequence[Inbox]], frame: tuple[str, int]) -> None:
        """Rows of different jobs. Done once a token: for what flows nothing is called but the flow."""
        (worker, number), now = frame, time.monotonic()
        for row in rows:
            for inbox in streams.get(row.stream, ()):
                flow = inbox.flow
                if flow is None or row.seq != inbox.seq + 1 or inbox.worker is not worker:
                    inbox.push(row, frame)
                    inbox.tell()
                    self._note(inbox)
                    continue
                inbox.seq, inbox.number = row.seq, number
                try:
                    more = flow(row, now)
                except Exception as error:  # noqa: BLE001 - whoever pours hears of it; the other inboxes go on
                    inbox.stop(error)
                else:
                    if not more:
                        inbox.stop()

    def _name(self, worker: str, stream: int, job_id: str) -> None:
        """From now on this number of a worker's stands for that job."""
        audience = self._audiences.get(job_id)
        if audience is None:
            return
        streams = self._streams.setdefault(worker, {})
        if stream not in streams:
            streams[stream] = audience.inboxes
            audience.named.append((worker, stream))

    async def _look_after(self) -> None:
        """Every tick: read the log for inboxes that have long heard nothing; sooner for those that know they miss
        something."""
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
        """At most so long; while inboxes are behind, a fraction of a tick, and until then if one comes to be."""
        if not self._behind:
            self._hurry.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._hurry.wait()
        if self._behind:
            await asyncio.sleep(TICK_S / LOOKS)

    def _all(self) -> list[Inbox]:
        return [inbox for audience in self._audiences.values() for inbox in audience.inboxes]

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
                    inbox.tell()
            elif record.terminal is not None:
                inbox.end(record.terminal)
                inbox.tell()
            elif not inbox.whole:
                for run in record.runs:
                    log_of = (partition_of(inbox.job_id) or 0, run.worker)
                    first = inbox.number if inbox.worker == run.worker else run.frame
                    behind[log_of] = min(first, behind.get(log_of, first))
        for (partition, worker), first in behind.items():
            async for frame in self._journal.frames(partition, worker, first):
                self._deal(frame)
