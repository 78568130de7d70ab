"""Log reader: reads the deltas of jobs from their workers' durable logs, with one pass over each log for many jobs.

A log holds the steps of all jobs of a worker, so finding the deltas of one job costs as much as finding all. It is read
in small pages, between which the event loop runs other tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

from msgspec.structs import replace
from redis.exceptions import ResponseError

from penstock.loops import Rounds
from streaming.errors import DecodeError, NewerMessage
from streaming.ids import partition_of
from streaming.jobs.codec import Delta, Frame, Opening, Run, Section, author, decode_reply
from streaming.keys import partition_key
from streaming.redis.client import RedisClient, translated

log = logging.getLogger(__name__)

PAGE = 64
"""Log entries per read: a few hundred kB where hundreds of jobs run."""
ROWS_AT_ONCE = 1_000
"""Rows decoded before the event loop runs other tasks: a few milliseconds."""
LOG_KINDS = {"log": "log of worker", "parked": "parked log of job"}
"""What the logs are called in messages."""


class LogName(NamedTuple):
    """A stream of frames: a worker's log ("log", its lease id), or a job's parked log ("parked", the job's id), which
    holds what the job had generated when a worker put it back."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """One run of a job, and the number of the first frame of its worker's log that may hold its deltas; 0: they are in
    the job's parked log."""

    run: Run
    frame: int

    def log(self, job_id: str) -> LogName:
        """The log that holds the run's deltas."""
        return LogName("log", self.run.worker) if self.frame else LogName("parked", job_id)


@dataclass(frozen=True, slots=True)
class History:
    """The deltas that a job's runs have logged so far, in order, and which run wrote which."""

    rows: Sequence[Delta] = ()
    sections: tuple[Section, ...] = ()
    first_ms: int = 0
    """Redis time of the job's first token, also in a text that was given up; 0: not known."""
    at_ms: int = 0
    """The same of the newest run that has generated any; 0: none."""
    kept_ms: int = 0
    """For how long the runs before that one generated this text."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of each section."""
        if not self.sections:
            return ()
        firsts = [section.first for section in self.sections]
        bounds = zip(firsts, [*firsts[1:], len(self.rows) + 1], strict=False)
        return tuple([sum([row.n for row in self.rows[first - 1 : end - 1]]) for first, end in bounds])

    @property
    def intact(self) -> History:
        """The deltas before the first that is missing."""
        count = next((place for place, row in enumerate(self.rows) if row.seq != place + 1), len(self.rows))
        sections = [replace(each, first=min(each.first, count + 1)) for each in self.sections]
        times = (self.first_ms, self.at_ms, self.kept_ms) if count else ()
        return History(self.rows[:count], tuple(sections), *times)

    @property
    def whole(self) -> bool:
        """Whether no delta is missing between the first and the last, as after a loss of data."""
        return all(row.seq == number for number, row in enumerate(self.rows, 1))

    @property
    def last_run(self) -> Run | None:
        """The run that wrote the last delta."""
        return author(self.sections, len(self.rows)) if self.rows else None


NOTHING = History()


HistoryRequest: TypeAlias = tuple[str, Sequence[LoggedRun]]
"""A job whose history is wanted, and the runs that its record names."""


@dataclass(slots=True)
class Logged:
    """The deltas of one run, and the copies that it logged of deltas of earlier runs, by their numbers."""

    own: dict[int, Delta] = field(default_factory=dict)
    copies: dict[int, Delta] = field(default_factory=dict)
    opening: Opening | None = None
    """Says when its first token came."""
    copied: tuple[Section, ...] = ()
    """Which runs wrote the deltas in `copies`."""


class Histories:
    """Reads histories; concurrent requests share one pass over each log."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._rounds: dict[int, Rounds[HistoryRequest, History]] = defaultdict(lambda: Rounds(self._read))
        """By partition, so that a slow or unavailable one delays no other."""

    async def read(self, job: str, runs: Sequence[LoggedRun]) -> History:
        """Read what a job's runs have logged. Raises Unavailable, NewerMessage (a worker has a newer version)."""
        return await self._rounds[partition_of(job) or 0].ask((job, runs))

    async def _read(self, asked: Sequence[HistoryRequest]) -> list[History | NewerMessage]:
        """Read each log once, for all requests of a round, which are of one partition."""
        partition = partition_of(asked[0][0]) or 0
        logged = {each.run: Logged() for _, runs in asked for each in runs}
        newer: dict[LogName, NewerMessage] = {}
        firsts: dict[LogName, int] = {}
        """By log: the first frame that may hold a requested delta."""
        for name, number in [(each.log(job), each.frame) for job, runs in asked for each in runs]:
            firsts[name] = min(number, firsts.get(name, number))
        for name, first in firsts.items():
            try:
                async for frame in read_log(self._client, partition, name, first):
                    dispatch(frame, logged)
            except NewerMessage as error:
                newer[name] = error
        found: list[History | NewerMessage] = []
        for job, runs in asked:
            faults = [newer[name] for name in [each.log(job) for each in runs] if name in newer]
            found.append(faults[0] if faults else history_of(runs, logged))
            await asyncio.sleep(0)
        return found


def dispatch(frame: Frame, logged: Mapping[Run, Logged]) -> None:
    """Add the rows of a frame to the runs that were requested."""
    for number, opening in frame.openings.items():
        found = logged.get(Run(frame.worker, abs(number)))
        if found is not None:
            found.copied = opening.copied or found.copied
            if opening.at_ms or opening.begun_ms:
                found.opening = opening
    for row in frame.rows:
        found = logged.get(Run(frame.worker, abs(row.run_number)))
        if found is not None:
            (found.own if row.run_number > 0 else found.copies)[row.seq] = row


def history_of(runs: Sequence[LoggedRun], logged: Mapping[Run, Logged]) -> History:
    """Join the deltas of a job's runs in order; copies from checkpoints replace deltas that were trimmed."""
    rows: dict[int, Delta] = {}
    sections: list[Section] = []
    for run in [each.run for each in runs]:
        own, copies = logged[run].own, logged[run].copies
        rows |= {seq: row for seq, row in copies.items() if seq not in rows} | own
        if copies and logged[run].copied:
            sections = list(logged[run].copied)  # the runs before it, some of whose own deltas may be trimmed
        sections.append(Section(min(own, default=max(rows, default=0) + 1), run))
    openings = [opening for each in runs if (opening := logged[each.run].opening) is not None]
    times: tuple[int, ...] = ()
    if openings:
        first, last = openings[0], openings[-1]
        times = first.begun_ms or first.at_ms, last.at_ms, last.kept_ms
    return History([rows[seq] for seq in sorted(rows)], tuple(sections), *times)


async def read_log(client: RedisClient, partition: int, name: LogName, first: int) -> AsyncGenerator[Frame, None]:
    """Iterate over a log from frame `first` on: the frames of all reply addresses, without malformed ones.

    Raises Unavailable, NewerMessage (the worker that wrote it has a newer version).
    """
    key, start, rows = partition_key(partition, *name), f"{first}-0", 0
    while True:
        try:
            with translated():
                entries = await cast(Awaitable[Any], client.redis.xrange(key, start, "+", count=PAGE))
        except ResponseError as error:
            log.error("the %s %s cannot be read and counts as empty: %s", LOG_KINDS[name.kind], name.name, error)
            return
        for _, fields in entries:
            for data in fields.values():
                try:
                    frame = decode_reply(data)
                except NewerMessage:
                    raise
                except DecodeError as error:
                    what = LOG_KINDS[name.kind]
                    log.error("a frame in the %s %s cannot be read and is left out: %s", what, name.name, error)
                    continue
                if not isinstance(frame, Frame):
                    continue
                yield frame
                rows += len(frame.rows)
                if rows >= ROWS_AT_ONCE:
                    rows = 0
                    await asyncio.sleep(0)
        if len(entries) < PAGE:
            return
        start = f"({entries[-1][0].decode()}"
