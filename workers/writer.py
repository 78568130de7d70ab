"""Everything a worker writes about the jobs of one partition, in order: one write per engine step, and the next only
after it.

Steps that come while a write is under way go out together in the next one. As long as all goes well a step is sent
where it is made and no task is woken for it. A write that is not answered is repeated until it is, or until the worker
is fenced: the scripts know repetitions. Each partition has a writer of its own, so one that is down holds up no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from runtime.loops import ExpectedErrors, backoff, retry
from streaming.errors import Rewound, Unavailable
from streaming.jobs.frames import Opening
from streaming.jobs.lease import SILENT, Finish, Lease
from streaming.redis.client import Call
from workers.checkpoint import in_frames

log = logging.getLogger(__name__)

MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.02, 0.25


class StepWrite:
    """What is written at once, by reply address: deltas, encoded, and the runs whose first these are."""

    __slots__ = ("openings", "rows")

    def __init__(self) -> None:
        self.rows: defaultdict[str, list[bytes]] = defaultdict(list)
        self.openings: defaultdict[str, dict[int, Opening]] = defaultdict(dict)


@dataclass(slots=True)
class Checkpoint:
    """A run whose deltas are to be logged anew."""

    job_id: str
    opening: Opening
    number: int
    rows: Callable[[], Sequence[bytes]]
    """Asked when they are written: whatever is in an earlier frame must be among them."""
    on_written: Callable[[int], None]
    """Hears of the first frame that holds them, once they are safe."""
    frame: int = 0


@dataclass(slots=True)
class Write:
    """One step, the checkpoints behind it and the jobs that end with it, under way."""

    step: StepWrite
    checkpoints: list[Checkpoint]
    finishes: list[Finish]
    calls: Sequence[Call]


class Writer:
    """`oldest` tells the first frame of the partition that a running job still needs, `everything` all deltas of its
    running jobs; `on_written` hears of finished jobs once their record is safe."""

    def __init__(
        self,
        lease: Lease,
        partition: int,
        oldest: Callable[[int], int],
        everything: Callable[[int], StepWrite],
        on_written: Callable[[Sequence[Finish]], None],
    ) -> None:
        self._lease, self._partition = lease, partition
        self._oldest, self._everything, self._on_written = oldest, everything, on_written
        self.step = StepWrite()
        """What goes out with the next `send`."""
        self._checkpoints: list[Checkpoint] = []
        self._finishes: list[Finish] = []
        self._owed = asyncio.Queue[Write | Exception]()
        """What could not be written as it went, and what went wrong where nobody would hear of it."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._over = False

    def open(self, number: int, opening: Opening, addresses: Sequence[str]) -> None:
        """Tell these addresses, with the next `send`, which run a number stands for."""
        for address in addresses:
            self.step.openings[address][number] = opening

    def finish(self, finish: Finish) -> None:
        """The end of a job, written after all its deltas. It goes out with the next `send`."""
        self._finishes.append(finish)

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Log a run's deltas anew, with the next `send`."""
        self._checkpoints.append(checkpoint)

    def send(self) -> None:
        """Write what was added, if anything was: called once a step."""
        if (self.step.rows or self._finishes or self._checkpoints) and self._idle.is_set():
            self._idle.clear()
            self._begin()

    async def flushed(self) -> None:
        """Wait until everything sent so far is written, or nothing will be any more."""
        await self._idle.wait()

    async def run(self) -> None:
        """Write again, until cancelled, what could not be written as it went; from then on nothing more is written.
        Raises Fenced."""
        try:
            while True:
                await self._write_again(await self._owed.get())
        finally:
            self._over = True
            self._idle.set()

    async def _write_again(self, owed: Write | Exception) -> None:
        if isinstance(owed, Exception):
            raise owed
        try:
            await self._write(owed.calls)
        except Rewound as error:
            log.error("writing the log of all running jobs anew: %s", error)
            await self._write([self._repair(), *self._calls(owed.step, owed.checkpoints, owed.finishes)])
        self._go_on(owed)

    def _begin(self) -> None:
        if self._over:
            self._idle.set()
            return
        step, self.step = self.step, StepWrite()
        finishes, self._finishes = self._finishes, []
        checkpoints, self._checkpoints = self._checkpoints, []
        write = Write(step, checkpoints, finishes, self._calls(step, checkpoints, finishes))
        if not self._lease.send_nowait(write.calls, partial(self._answered, write)):
            self._owed.put_nowait(write)

    def _answered(self, write: Write, written: bool) -> None:
        if not written:
            self._owed.put_nowait(write)
            return
        try:
            self._go_on(write)
        except Exception as error:  # noqa: BLE001 - nobody waits for a callback: `run` raises it
            self._owed.put_nowait(error)

    def _go_on(self, write: Write) -> None:
        """Once it is written."""
        for checkpoint in write.checkpoints:
            checkpoint.on_written(checkpoint.frame)
        self._on_written(write.finishes)
        if self.step.rows or self._finishes or self._checkpoints:
            self._begin()
        else:
            self._idle.set()

    def _calls(self, step: StepWrite, checkpoints: Sequence[Checkpoint], finishes: Sequence[Finish]) -> list[Call]:
        calls = [self._append(step)] if step.rows else []
        for checkpoint in checkpoints:
            calls += self._logged_anew(checkpoint)
        return calls + [self._lease.finish_call(finish) for finish in finishes]

    def _logged_anew(self, checkpoint: Checkpoint) -> Iterator[Call]:
        """The frames with a run's deltas, and then the word that these are the ones to read."""
        checkpoint.frame = self._lease.next_frame(self._partition)
        for rows in in_frames(checkpoint.rows()):
            frame = StepWrite()
            frame.rows[SILENT] = list(rows)
            frame.openings[SILENT][checkpoint.number] = checkpoint.opening
            yield self._append(frame)
        yield self._lease.checkpoint_call(self._partition, checkpoint.job_id, checkpoint.number, checkpoint.frame)

    def _append(self, step: StepWrite, *, forced: bool = False) -> Call:
        oldest = self._oldest(self._partition)
        return self._lease.append_call(self._partition, step.rows, oldest, openings=step.openings, forced=forced)

    def _repair(self) -> Call:
        """One frame with all that the store may have lost."""
        return self._append(self._everything(self._partition), forced=True)

    async def _write(self, calls: Sequence[Call]) -> None:
        expected = ExpectedErrors(Unavailable, log.warning, "a step could not be written, trying again: %s")
        await retry(partial(self._lease.calls, calls), expected, backoff(MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S))
