"""Relay: receives workers' frames over one subscription per API process, and fans them out to open responses.

Pub/sub may lose messages; the log does not. Every delta has a number, so a reorder buffer detects missing ones,
and the relay reads them from the log. It compares a buffer that receives nothing for a while with the job's record.

Every delta also has an author, the run that wrote it (`codec.Run`), and a buffer appends a run's deltas only to those
that the run says it continues. If a store that lost data lets two workers write different deltas, the buffer reports it
(`rewound`). A buffer reads neither pub/sub nor the log itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from msgspec.structs import replace

from penstock.engine import Failure
from penstock.loops import ExpectedErrors, Rounds, coalesced, run_periodically, supervise, wait
from streaming.errors import DecodeError, NewerMessage, Unavailable, UnknownJob
from streaming.ids import partition_of
from streaming.jobs.codec import (
    MAX_ROWS_PER_FRAME,
    Delta,
    Ended,
    Frame,
    Opening,
    Run,
    Section,
    Terminal,
    author,
    decode_reply,
    openings_of,
)
from streaming.jobs.history import ROWS_AT_ONCE, LoggedRun, LogName, read_log
from streaming.jobs.job import Job, JobState
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import NEWER, Interruption, JobRecord
from streaming.keys import channel
from streaming.redis.client import RedisClient

log = logging.getLogger(__name__)

SILENCE_S, MAX_SILENCE_S = 2.0, 60.0
"""Before a silent buffer is checked against its record: with few buffers, and with very many."""
CHECKS_PER_S = 200
"""Maximum number of silent buffers checked per second."""
MAX_ROWS = 512
"""Deltas buffered for one reader, and the rest of a frame of which the first are buffered; a slower reader gets further
deltas from the log when it catches up."""
TICK_S, LOOKS = 0.25, 5
"""How often the relay checks silent buffers, and how many times in that interval those with a known gap."""

MAX_RETRY_DELAY_S = 1.0
"""Longest delay between two log reads for a known gap."""

NO_RUN = Run("", 0)
INCOMPLETE = Failure("result_incomplete", "The store has lost a part of this job's result.", 500)
GONE = Failure("job_lost", "The store no longer has this job.", 500)

Sink: TypeAlias = Callable[[list[Delta], Terminal | None], bool]
"""Callback that takes new deltas, and the terminal at the end, without blocking. Returns False to stop."""


class Flow(Protocol):
    """The same for single deltas: the fast path of nearly all of them."""

    def write(self, row: Delta) -> bool:
        """Take a delta. Returns False to stop."""
        ...

    def flush(self, now: float) -> None:
        """Write what was taken; called at the end of each read, at `now` (monotonic)."""
        ...


class ReorderState(NamedTuple):
    """The runs in a buffer when its job's record was requested: `settle` compares these with the record, not later
    ones."""

    runs: tuple[Run, ...]
    disputed: frozenset[Run]


class ReorderBuffer:
    """The deltas of one job for one reader, who calls `take` or attaches a sink.

    After its pushes of a frame the caller calls `flush`, so that the reader is served once for the whole frame.
    """

    __slots__ = (
        *("_disputed", "_early", "_fault", "_haste", "_ignored", "_looked", "_parents", "_resumed"),
        *("_rows", "_sections", "_sink", "_waiter", "accepted", "checked", "direct", "flow", "frame_number", "hung_up"),
        *("interruption", "job_id", "openings", "over", "patience", "rewound", "rowless", "run_number", "seq"),
        *("stale", "terminal", "whole", "worker"),
    )

    def __init__(
        self, job_id: str, after: int = 0, *, runs: Sequence[Run] = (), whole: bool = False, rowless: bool = False
    ) -> None:
        """`after`: number of the last delta that the reader has. `runs`: the runs that wrote these, in order."""
        self.job_id = job_id
        self.rowless = rowless
        """The reader wants only the end, without deltas."""
        self.whole = whole or rowless
        """The reader wants only the end: deltas are not buffered, the terminal has them all."""
        self.seq = self._looked = after
        """Number of the last delta delivered or buffered."""
        self.terminal: Terminal | None = None
        self.over = False
        """The end was announced."""
        self.stale = False
        """A delta is missing: the log must be read."""
        self.checked = 0.0
        """When the buffer was last known to be complete (loop time)."""
        self.patience = TICK_S
        self._haste = TICK_S / LOOKS
        """Delay before the log is read again for a known gap: a backoff while the log has nothing new."""
        self.worker, self.run_number = (runs[-1].worker, runs[-1].number) if runs else ("", 0)
        """The run of the last delta."""
        self.frame_number = 0
        """The frame of the last delta, before which nothing is missing; 0: unknown."""
        self.openings: dict[Run, Opening] = {}
        """The openings of the job's runs."""
        self.direct: Flow | None = None
        self.flow: Flow | None = None
        """`direct` takes single deltas in place of the sink; `attach_sink` sets it, and the sink may set it later.
        `flow`: `direct` while nothing is buffered, else None: the same run's next delta then bypasses the buffer."""
        self.hung_up = False
        """The reader's client has disconnected."""
        self.accepted = False
        """The put was answered: if the store does not know the job, it has lost it."""
        self.interruption: Interruption | None = None
        """Since when the job waits for another worker; None: it does not, as far as is known."""
        self.rewound = False
        """The store lost deltas that were delivered, and has others in their place: the stream cannot continue."""
        self._resumed = (after, tuple(runs))
        """The last delta that the reader had at the start, and the runs that may have written it."""
        self._sections: list[Section] = []
        """Which run wrote which of the deltas accepted since."""
        self._parents = tuple(runs)
        """The runs that the next one may continue."""
        self._disputed: set[Run] = set()
        """Runs whose deltas contradict the buffer; the job's record decides."""
        self._ignored: set[Run] = set()
        """Runs that the record does not name: of a worker that has lost the job without noticing yet."""
        self._rows: list[Delta] = []
        self._early: dict[int, tuple[Delta, Run, int]] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._fault: Exception | None = None

    @property
    def full(self) -> bool:
        """Whether the buffer is full: until the reader takes something, the rest stays in the log."""
        return len(self._rows) >= MAX_ROWS

    def author(self, seq: int) -> Run | None:
        """Return the run that wrote an accepted delta; None if it is unknown here."""
        return author(self._sections, seq)

    def push(self, row: Delta, run: Run = NO_RUN, frame_number: int = 0) -> None:
        """Accept one delta of a run from this frame of its worker: buffers the next one, drops an old one, holds an
        early one until the gap is filled. A delta that contradicts the buffer is disputed until `settle`."""
        if self.whole or run in self._ignored:
            return
        if row.seq <= self.seq:
            if not self._may_have_written(run, row.seq):
                self._dispute(run)
        elif (
            row.seq == self.seq + 1 and not self._disputed and (not self.full or 0 < frame_number == self.frame_number)
        ):
            if not self._goes_on(run):
                self._dispute(run)
                return
            self._accept(row, run, frame_number)
            if self._early:
                self._accept_early()
        else:
            if not self.full and len(self._early) < MAX_ROWS:
                self._early[row.seq] = (row, run, frame_number)
            self.stale, self.flow = True, None

    def _may_have_written(self, run: Run, seq: int) -> bool:
        """Whether this run may have written an accepted delta."""
        after, runs = self._resumed
        if seq <= after:
            return seq < after or run in runs
        return self.author(seq) == run

    def _goes_on(self, run: Run) -> bool:
        """Whether this run may write the next delta."""
        if run.number == self.run_number and run.worker == self.worker:
            return True
        opening = self.openings.get(run)
        if opening is None or opening.first != self.seq + 1:
            return False
        return opening.parent in self._parents if self.seq else opening.parent is None

    def _dispute(self, run: Run) -> None:
        self._disputed.add(run)
        self.stale, self.flow = True, None

    def _accept(self, row: Delta, run: Run, frame_number: int) -> None:
        self._rows.append(row)
        self.flow = None  # until these rows are flushed
        self.seq, self.frame_number = row.seq, frame_number
        if run.number != self.run_number or run.worker != self.worker or not self._sections:
            self._sections.append(Section(row.seq, run))
            self.worker, self.run_number = run.worker, run.number
            self._parents = (run,)

    def _accept_early(self) -> None:
        while (early := self._early.pop(self.seq + 1, None)) is not None:
            row, run, frame_number = early
            if not self._goes_on(run):
                self._dispute(run)
                return
            self._accept(row, run, frame_number)

    def interrupt(self, interruption: Interruption | None) -> None:
        """Note that the job waits for another worker, or no longer; wakes a reader who calls `take`."""
        if interruption != self.interruption:
            self.interruption = interruption
            if interruption is not None and self._sink is None:
                self._wake()

    def standing(self) -> ReorderState:
        """The state for `settle`: take it before reading the record, because deltas arrive meanwhile."""
        resumed = self._resumed[1][-1:]
        return ReorderState((*resumed, *(section.run for section in self._sections)), frozenset(self._disputed))

    def settle(self, held: ReorderState, runs: Iterable[Run]) -> None:
        """Resolve disputes by the runs that the job's record names: ignores disputed runs that it does not name, and
        sets `rewound` if it contradicts accepted deltas."""
        if not held.disputed:
            return
        valid = set(runs)
        if valid.issuperset(held.runs) and not valid & held.disputed:
            self._ignored |= held.disputed
            self._disputed -= held.disputed
            self._early = {seq: early for seq, early in self._early.items() if early[1] not in self._ignored}
        else:
            self._rewind()

    def _rewind(self) -> None:
        self.rewound, self.flow = True, None

    def end(self, terminal: Terminal) -> None:
        """Accept the end of the job, with the missing deltas if it has rows; else, where deltas are missing, the
        record is read again."""
        if self.terminal is not None or self.rewound:
            return
        if self.rowless:
            self.terminal = terminal
            return
        if not self._agrees(terminal):
            self._rewind()
            return
        if self.seq < terminal.seq and terminal.rows:
            rest = [row for row in terminal.rows if row.seq > self.seq]
            if len(rest) != terminal.seq - self.seq:
                terminal = replace(terminal, state=JobState.FAILED, failure=INCOMPLETE, seq=self.seq)
            else:
                self._sections += self._sections_behind(terminal)
                self._rows += rest
                self.seq, self.flow = terminal.seq, None
            self._early.clear()
        if self.seq < terminal.seq:
            self.stale, self.flow = True, None
            return
        self.terminal = terminal

    def _agrees(self, terminal: Terminal) -> bool:
        """Whether the result begins with what was given."""
        if not self.seq or (not terminal.sections and terminal.state is not JobState.COMPLETED):
            return True
        if self.seq > terminal.seq:
            return False
        after, runs = self._resumed
        if after and author(terminal.sections, after) not in runs:
            return False
        end = self.seq
        for section in reversed(self._sections):
            if not author(terminal.sections, section.first) == section.run == author(terminal.sections, end):
                return False
            end = section.first - 1
        return True

    def _sections_behind(self, terminal: Terminal) -> list[Section]:
        """Which run wrote which of the terminal's rows."""
        return [
            Section(max(section.first, self.seq + 1), section.run)
            for section, bound in zip(
                terminal.sections, [*(each.first for each in terminal.sections[1:]), terminal.seq + 1], strict=True
            )
            if bound > self.seq + 1
        ]

    def is_due(self, now: float, silence: float) -> bool:
        """Whether the log should be read; not while deltas keep arriving without a gap."""
        if self.terminal is not None or self.full:
            return False
        if self.stale:
            return now - self.checked >= self._haste
        if self.seq != self._looked:
            self._looked, self.checked, self.patience = self.seq, now, TICK_S
        return now - self.checked >= min(self.patience, silence)

    def look(self, now: float) -> None:
        """Note that record and log are being read: sets the time of the next read."""
        new = self.seq != self._looked
        self._looked, self.checked = self.seq, now
        self._haste = TICK_S / LOOKS if new or not self.stale else min(2 * self._haste, MAX_RETRY_DELAY_S)
        self.patience, self.stale = min(self.patience * 2, MAX_SILENCE_S), False

    def hang_up(self) -> None:
        """Note that the reader's client has disconnected, and wake the reader."""
        self.hung_up = True
        self._wake()

    async def take(self, patience: float) -> tuple[list[Delta], Terminal | None]:
        """Wait up to `patience` seconds; returns new deltas (perhaps none), and the terminal once all were taken."""
        if not self._rows and self.terminal is None and not self.hung_up and not self.rewound:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(patience, self._wake)
            try:
                await self._woken()
            finally:
                timer.cancel()
        rows, self._rows = self._rows, []
        return rows, self.terminal

    async def attach_sink(self, sink: Sink, direct: Flow | None = None) -> None:
        """Pass buffered and later deltas to `sink` as they arrive, without waking a task per frame; `direct`, if given,
        takes single deltas. Returns after the terminal, when a callback returns False, the client has disconnected, or
        the stream is rewound.

        Raises what the callbacks raise.
        """
        self._sink, self.direct = sink, direct
        try:
            self._flow_on()
            self.flush()
            if self._sink is not None and self.terminal is None and not self.hung_up and not self.rewound:
                await self._woken()
        finally:
            self._sink = self.direct = self.flow = None
        if self._fault is not None:
            raise self._fault

    def _flow_on(self) -> None:
        if not (self._rows or self._early or self._disputed or self.rewound):
            self.flow = self.direct

    def stop(self, fault: Exception | None = None) -> None:
        """Detach the sink, and let `attach_sink` return, or raise `fault`."""
        self._fault = self._fault or fault
        self._sink = self.direct = self.flow = None
        self._wake()

    def flush(self) -> None:
        """Pass new deltas to the sink, or wake the waiting reader."""
        rows, terminal, sink = self._rows, self.terminal, self._sink
        if not rows and terminal is None and not self.rewound:
            return
        if sink is None or self.rewound:
            self._wake()
            return
        self._rows = []
        try:
            more = sink(rows, terminal)
        except Exception as error:  # noqa: BLE001 - `attach_sink` raises it; other buffers are not affected
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


# --- relay ------------------------------------------------------------------------------------------------------------

Held: TypeAlias = dict[ReorderBuffer, Flow | None]
"""The buffers that one read brought rows for, each with the flow that took them past it, if one did."""


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
        """Open a buffer for a job that carries this process's address: before the job is put, or before `subscribe`
        adds the address to it. Close it afterwards."""
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

    async def subscribe(self, buffer: ReorderBuffer, job: Job | None = None, *, joining: bool = False) -> None:
        """Have a job's coming deltas sent here, too, and read its earlier ones from the log. `job`: given if this
        process may have put it for an answer in one piece, whose deltas do not come here by themselves.

        Raises UnknownJob, Unavailable; Abandoned (only if `joining`, because an idempotency key led here).
        """
        again = job is not None and not job.stream and job.reply_to == self.address
        await self._queue.add_address(buffer.job_id, self.address, joining=joining, again=again)
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
        due_all = loop.time() + TICK_S
        while True:
            if not (behind := self._behind()):
                self._hurry.clear()
                await wait(self._hurry, due_all - loop.time())
            if behind or self._hurry.is_set():
                await asyncio.sleep(TICK_S / LOOKS)
            now, looked = loop.time(), self._behind()
            if now >= due_all:
                looked = self._all()
                # Without buffers, wait two ticks: one that is opened meanwhile is checked a tick after its opening.
                due_all = now + (TICK_S if looked else coalesced(2 * TICK_S))
            silence = max(SILENCE_S, len(self._subscribers) / CHECKS_PER_S)
            try:
                await self._refill([buffer for buffer in looked if buffer.is_due(now, silence)])
            except Unavailable as error:
                log.warning("replies cannot be checked against the log, trying again: %s", error)
                await asyncio.sleep(TICK_S)

    def _all(self) -> list[ReorderBuffer]:
        return [buffer for subscribers in self._subscribers.values() for buffer in subscribers.buffers]

    def _behind(self) -> list[ReorderBuffer]:
        """Buffers that lack deltas."""
        return [buffer for buffer in self._all() if buffer.stale and buffer.terminal is None]

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
        """Jobs whose record does not have this address: the store has lost it, or an older worker dropped it."""
        for (buffer, record), was_there, held in zip(looked, there, standing, strict=True):
            buffer.look(now)
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
        await asyncio.gather(*map(self._subscribe_again, unheard))
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

    async def _subscribe_again(self, job_id: str) -> None:
        with suppress(UnknownJob):
            await self._queue.add_address(job_id, self.address)

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
        # A parked log holds all deltas of its job in order, at most MAX_ROWS_PER_FRAME in each frame.
        yield logged.log(buffer.job_id), logged.frame or buffer.seq // MAX_ROWS_PER_FRAME + 1
