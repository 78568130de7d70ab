"""Reorder buffer for one reader of one job: delivers each delta once and in order, and detects missing ones.

The relay pushes deltas in, from pub/sub and from the log; the buffer reads neither itself. Every delta has an author,
the run that wrote it (`codec.Run`), and the buffer appends a run's deltas only to those that the run says it
continues. If a store that lost data lets two workers write different deltas, the buffer reports it (`rewound`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from msgspec.structs import replace

from penstock.engine import Failure
from streaming.jobs.codec import Delta, Opening, Run, Section, Terminal, author
from streaming.jobs.job import JobState
from streaming.jobs.records import Interruption

MAX_ROWS = 512
"""Deltas buffered for one reader, and the rest of a frame of which the first are buffered; a slower reader gets further
deltas from the log when it catches up."""
TICK_S, LOOKS = 0.25, 5
"""How often the relay checks silent buffers, and how many times in that interval those with a known gap."""

MAX_RETRY_DELAY_S = 1.0
"""Longest delay between two log reads for a known gap."""

NO_RUN = Run("", 0)
INCOMPLETE = Failure("result_incomplete", "The store has lost a part of this job's result.", 500)

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
        """Accept the end of the job, with the missing deltas if it has rows; else the end waits until they have
        arrived."""
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

    def look(self, now: float, longest: float) -> None:
        """Note that record and log are about to be read: sets the time of the next read."""
        new = self.seq != self._looked
        self._looked, self.checked = self.seq, now
        self._haste = TICK_S / LOOKS if new or not self.stale else min(2 * self._haste, MAX_RETRY_DELAY_S)
        self.patience, self.stale = min(self.patience * 2, longest), False

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
