"""Everything a worker writes about the jobs of one partition, in order: one write per engine step, and the next only
after it.

Steps that come while a write is under way go out together in the next one. A write that is not answered is repeated
until it is, or until the worker is fenced: the scripts know repetitions. Each partition has a writer of its own, so one
that is down holds up no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

from streaming.errors import Rewound, Unavailable
from streaming.lease import SILENT, Finish, Lease
from streaming.messages import Delta
from streaming.wire import Call

log = logging.getLogger(__name__)

MOST_PAUSE_S = 0.25

Rows = defaultdict[str, list[Delta]]
"""By reply address."""


class Writer:
    """`oldest` tells the first frame of the partition that a running job still needs, `everything` all deltas of its
    running jobs; `on_written` hears of finished jobs once their record is safe."""

    def __init__(
        self,
        lease: Lease,
        partition: int,
        oldest: Callable[[int], int],
        everything: Callable[[int], Sequence[Delta]],
        on_written: Callable[[Sequence[Finish]], None],
    ) -> None:
        self._lease, self._partition = lease, partition
        self._oldest, self._everything, self._on_written = oldest, everything, on_written
        self._rows: Rows = defaultdict(list)
        self._finishes: list[Finish] = []
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, delta: Delta, addresses: Sequence[str]) -> None:
        """One delta for each address. It goes out with the next `send`."""
        rows = self._rows
        for address in addresses:
            rows[address].append(delta)

    def finish(self, finish: Finish) -> None:
        """The end of a job, written after all its deltas."""
        self._finishes.append(finish)
        self.send()

    def send(self) -> None:
        """Begin to write what was added: called once a step."""
        if (self._rows or self._finishes) and not self._news.is_set():
            self._idle.clear()
            self._news.set()

    async def flushed(self) -> None:
        """Wait until everything sent so far is written."""
        await self._idle.wait()

    async def run(self) -> None:
        """Write for ever. Raises Fenced."""
        while True:
            await self._news.wait()
            self._news.clear()
            rows, self._rows = self._rows, defaultdict(list)
            finishes, self._finishes = self._finishes, []
            try:
                await self._write(self._calls(rows, finishes))
            except Rewound as error:
                log.error("writing the log of all running jobs anew: %s", error)
                await self._write([self._repair(), *self._calls(rows, finishes)])
            self._on_written(finishes)
            if not self._news.is_set():
                self._idle.set()

    def _calls(self, rows: Rows, finishes: Sequence[Finish]) -> list[Call]:
        ends = [self._lease.finish_call(finish) for finish in finishes]
        return [self._append(rows), *ends] if rows else ends

    def _append(self, rows: Rows, *, forced: bool = False) -> Call:
        return self._lease.append_call(self._partition, rows, self._oldest(self._partition), forced=forced)

    def _repair(self) -> Call:
        """One frame with all that the store may have lost."""
        return self._append(defaultdict(list, {SILENT: list(self._everything(self._partition))}), forced=True)

    async def _write(self, calls: Sequence[Call]) -> None:
        pause = 0.02
        while True:
            try:
                await self._lease.calls(calls)
                return
            except Unavailable as error:
                log.warning("a step could not be written, trying again in %.2f s: %s", pause, error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, MOST_PAUSE_S)
