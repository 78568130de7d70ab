"""Everything a worker writes about its jobs, in order: one write per engine step, and the next only after it.

Steps that come while a write is under way go out together in the next one. A write that is not answered is repeated
until it is, or until the worker is fenced: the scripts know repetitions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from streaming.errors import Rewound, Unavailable
from streaming.keys import partition_of
from streaming.lease import SILENT, Finish, Lease
from streaming.messages import Delta
from streaming.wire import Call

log = logging.getLogger(__name__)

MOST_PAUSE_S = 1.0

Rows = dict[str, list[Delta]]


class Writer:
    """`oldest` tells the first frame of a partition that a running job still needs, `everything` all deltas of its
    running jobs; `on_written` hears of finished jobs once their record is safe."""

    def __init__(
        self,
        lease: Lease,
        oldest: Callable[[int], int],
        everything: Callable[[int], Sequence[Delta]],
        on_written: Callable[[Sequence[Finish]], None],
    ) -> None:
        self._lease, self._oldest, self._everything, self._on_written = lease, oldest, everything, on_written
        self._rows: dict[int, Rows] = {}
        self._finishes: list[Finish] = []
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, delta: Delta, addresses: Sequence[str]) -> None:
        """One delta for each address."""
        rows = self._rows.setdefault(partition_of(delta.job) or 0, {})
        for address in addresses:
            rows.setdefault(address, []).append(delta)
        self._mark()

    def finish(self, finish: Finish) -> None:
        """The end of a job, written after all its deltas."""
        self._finishes.append(finish)
        self._mark()

    def _mark(self) -> None:
        self._idle.clear()
        self._news.set()

    async def flushed(self) -> None:
        """Wait until everything added so far is written."""
        await self._idle.wait()

    async def run(self) -> None:
        """Write for ever. Raises Fenced."""
        while True:
            await self._news.wait()
            self._news.clear()
            rows, self._rows = self._rows, {}
            finishes, self._finishes = self._finishes, []
            try:
                await self._write(self._calls(rows, finishes))
            except Rewound as error:
                log.error("writing the log of all running jobs anew: %s", error)
                await self._write(self._repairs(error.partitions, rows, finishes))
            self._on_written(finishes)
            if not self._news.is_set():
                self._idle.set()

    def _calls(self, rows: dict[int, Rows], finishes: Sequence[Finish]) -> list[Call]:
        appends = [self._lease.append_call(p, by_address, self._oldest(p)) for p, by_address in rows.items()]
        return appends + [self._lease.finish_call(finish) for finish in finishes]

    def _repairs(self, behind: set[int], rows: dict[int, Rows], finishes: Sequence[Finish]) -> list[Call]:
        """The same writes, after one frame per partition with all that the store may have lost."""
        whole = [(p, {SILENT: list(self._everything(p))}) for p in behind]
        repairs = [self._lease.append_call(p, lost, self._oldest(p), forced=True) for p, lost in whole]
        again = {p: by_address for p, by_address in rows.items() if p in behind}
        return repairs + self._calls(again, finishes)

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
