"""The replies of one job on their way to one reader: in order, each once, and aware of what is missing.

It knows neither pub/sub nor the log; whoever has either gives what it has, and looks where something is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from streaming.messages import Delta, Terminal

MOST_ROWS = 128
"""Deltas held for one reader; a slower one loses them here and gets them from the log when it catches up."""
TICK_S, LOOKS = 0.25, 5
"""How often silent inboxes are looked at, and how often in that time those that know they miss something."""

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
