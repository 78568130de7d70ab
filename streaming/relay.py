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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from streaming.background import keep_going
from streaming.errors import DecodeError, Unavailable
from streaming.inbox import LOOKS, TICK_S, Inbox, Origin
from streaming.journal import Journal
from streaming.keys import channel, partition_of
from streaming.messages import Delta, Ended, Failure, Frame, State, Terminal, decode_reply
from streaming.queue import Queue
from streaming.wire import Wire

log = logging.getLogger(__name__)

SILENCE_S, LONGEST_SILENCE_S = 2.0, 60.0
"""Before a silent inbox is checked against its record: with few inboxes, and with very many."""
CHECKS_PER_S = 200
"""Checks of silent inboxes, at most."""

GONE = Failure("job_lost", "The store no longer has this job.", 500)


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
        self._tasks = [asyncio.create_task(keep_going(work, TICK_S)) for work in (self._listen, self._look_after)]

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

    def _pass_on(self, rows: Sequence[Delta], streams: Mapping[int, Sequence[Inbox]], frame: Origin) -> None:
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
