"""What jobs have generated, as the logs of their workers hold it: one pass over each log for many jobs.

A log holds the steps of all jobs of a worker, so it costs the same to find the deltas of one job as of all. It is read
in small pages, and the event loop runs in between: nobody waits for the whole of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from redis.exceptions import ResponseError

from runtime.rounds import Rounds
from streaming.errors import DecodeError, NewerMessage
from streaming.ids import partition_of
from streaming.jobs.codec import decode_reply
from streaming.jobs.frames import Delta, Frame, Run, Section, author
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from streaming.redis.failures import translated

log = logging.getLogger(__name__)

PAGE = 64
"""Entries read at once: a few hundred kB where hundreds of jobs run."""
ROWS_AT_ONCE = 1_000
"""Rows decoded before the event loop has its turn: a few milliseconds."""


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """One attempt, and the number of the first frame of its worker that may hold its deltas."""

    run: Run
    frame: int


@dataclass(frozen=True, slots=True)
class History:
    """What a job's runs have logged so far: its deltas in order, and who wrote which."""

    rows: Sequence[Delta] = ()
    sections: tuple[Section, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it has every delta from the first to the last: a store that lost data may have left a hole."""
        return all(row.seq == number for number, row in enumerate(self.rows, 1))

    @property
    def last_run(self) -> Run | None:
        """The author of its last delta."""
        return author(self.sections, len(self.rows)) if self.rows else None


NOTHING = History()


class HistoryRequest(NamedTuple):
    """A job whose history is wanted."""

    job: str
    runs: Sequence[LoggedRun]


@dataclass(slots=True)
class Logged:
    """The deltas of one run, and the copies that it logged of deltas of earlier runs, by their numbers."""

    own: dict[int, Delta] = field(default_factory=dict)
    copies: dict[int, Delta] = field(default_factory=dict)


class Histories:
    """One per journal. Jobs that are asked for at the same time are read together."""

    def __init__(self, wire: RedisClient) -> None:
        self._wire = wire
        self._rounds: dict[int, Rounds[HistoryRequest, History | NewerMessage]] = {}
        """By partition: one that is slow, or down, keeps no other waiting."""

    async def read(self, wanted: HistoryRequest) -> History:
        """What its runs have logged. Raises Unavailable, NewerMessage (one of its workers is of a newer version)."""
        partition = partition_of(wanted.job) or 0
        if partition not in self._rounds:
            self._rounds[partition] = Rounds(lambda jobs: self._read(partition, jobs))
        history = await self._rounds[partition].ask(wanted)
        if isinstance(history, NewerMessage):
            raise history
        return history

    async def _read(self, partition: int, asked: Sequence[HistoryRequest]) -> list[History | NewerMessage]:
        """In one pass for each log."""
        logged = {each.run: Logged() for wanted in asked for each in wanted.runs}
        newer: dict[str, NewerMessage] = {}
        for worker, first in by_log(asked).items():
            try:
                async for frame in read_log(self._wire, partition, worker, first):
                    deal(frame, logged)
            except NewerMessage as error:
                newer[worker] = error
        found: list[History | NewerMessage] = []
        for wanted in asked:
            faults = [newer[each.run.worker] for each in wanted.runs if each.run.worker in newer]
            found.append(faults[0] if faults else history_of(wanted.runs, logged))
            await asyncio.sleep(0)
        return found


def by_log(asked: Iterable[HistoryRequest]) -> dict[str, int]:
    """By worker: the first frame of its log that may hold what is wanted."""
    logs: dict[str, int] = {}
    for wanted in asked:
        for run, frame in [(each.run, each.frame) for each in wanted.runs]:
            logs[run.worker] = min(frame, logs.get(run.worker, frame))
    return logs


def deal(frame: Frame, logged: Mapping[Run, Logged]) -> None:
    """Put the rows of a frame where they are wanted."""
    for row in frame.rows:
        taker = logged.get(Run(frame.worker, abs(row.stream)))
        if taker is not None:
            (taker.own if row.stream > 0 else taker.copies)[row.seq] = row


def history_of(runs: Sequence[LoggedRun], logged: Mapping[Run, Logged]) -> History:
    """The deltas of a job, one run's behind the other's; copies stand in for what is missing."""
    rows: dict[int, Delta] = {}
    sections: list[Section] = []
    for run in [each.run for each in runs]:
        own, copies = logged[run].own, logged[run].copies
        rows |= {seq: row for seq, row in copies.items() if seq not in rows} | own
        sections.append(Section(min(own, default=max(rows, default=0) + 1), run))
    return History([rows[seq] for seq in sorted(rows)], tuple(sections))


async def read_log(wire: RedisClient, partition: int, worker: str, first: int) -> AsyncGenerator[Frame, None]:
    """A worker's log from frame `first` on: every frame of every reply address. One that cannot be read is left out.

    Raises Unavailable, NewerMessage (the worker is of a newer version).
    """
    key, start, rows = partition_key(partition, "log", worker), f"{first}-0", 0
    while True:
        try:
            with translated():
                entries = await cast(Awaitable[Any], wire.redis.xrange(key, start, "+", count=PAGE))
        except ResponseError as error:
            log.error("the log of worker %s cannot be read and counts as empty: %s", worker, error)
            return
        for _, fields in entries:
            for data in fields.values():
                frame = _frame(data, worker)
                if frame is None:
                    continue
                yield frame
                rows += len(frame.rows)
                if rows >= ROWS_AT_ONCE:
                    rows = 0
                    await asyncio.sleep(0)
        if len(entries) < PAGE:
            return
        start = f"({entries[-1][0].decode()}"


def _frame(data: bytes, worker: str) -> Frame | None:
    """None for what is no frame. Raises NewerMessage."""
    try:
        reply = decode_reply(data)
    except NewerMessage:
        raise
    except DecodeError as error:
        log.error("a frame of worker %s cannot be read and is left out: %s", worker, error)
        return None
    return reply if isinstance(reply, Frame) else None
