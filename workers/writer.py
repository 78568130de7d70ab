"""Writer of one partition's log: sends each step's deltas and job ends to Redis, one write at a time and in order.

Steps that arrive while a write is in flight are merged into the next one. Without errors a step is sent from where it
was made and no task is woken for it. A write without a reply is repeated until it has one or the worker is fenced; the
scripts recognise repetitions. Each partition has its own writer, so a partition that is down delays no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.loops import ExpectedErrors, backoff, retry
from streaming.errors import Rewound, Unavailable
from streaming.jobs.codec import MAX_ROWS_PER_FRAME, Opening
from streaming.jobs.lease import SILENT, Finish, Lease
from streaming.redis.client import Call

log = logging.getLogger(__name__)

MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.02, 0.25


class StepWrite:
    """The content of one write, by reply address: encoded deltas, and the openings of runs that are new there."""

    __slots__ = ("openings", "rows", "tokens")

    def __init__(self) -> None:
        self.rows: defaultdict[str, list[bytes]] = defaultdict(list)
        self.openings: defaultdict[str, dict[int, Opening]] = defaultdict(dict)
        self.tokens: defaultdict[str, int] = defaultdict(int)
        """Tokens of the deltas, each once, by the fallback model that gave them; "": the worker's own model."""


@dataclass(slots=True)
class Checkpoint:
    """A run whose deltas the writer logs again, in one piece."""

    job_id: str
    opening: Opening
    number: int
    rows: Callable[[], Sequence[bytes]]
    """Called when they are written: the result must hold every delta of an earlier frame."""
    on_written: Callable[[int], None]
    """Called with the number of the first frame that holds them, once they are written."""
    frame: int = 0


@dataclass(slots=True)
class Write:
    """A write in flight: one step, the checkpoints after it and the jobs that end with it."""

    step: StepWrite
    checkpoints: list[Checkpoint]
    finishes: list[Finish]
    calls: Sequence[Call]


class Writer:
    """Writes one partition's steps, checkpoints and job ends.

    Args:
        oldest: returns the first frame of the partition that a running job still needs; earlier ones are trimmed.
        everything: returns all deltas of the partition's running jobs, to repair a log that lost data.
        on_written: called with the finished jobs that the store has, and with those of them that a script had ended
            otherwise before, so that what was written does not count.
        on_logged: called with each step that the store has, exactly once.
    """

    def __init__(
        self,
        lease: Lease,
        partition: int,
        oldest: Callable[[int], int],
        everything: Callable[[int], StepWrite],
        on_written: Callable[[Sequence[Finish], Sequence[Finish]], None],
        on_logged: Callable[[StepWrite], None] = lambda _: None,
    ) -> None:
        self._lease, self._partition = lease, partition
        self._oldest, self._everything, self._on_written, self._on_logged = oldest, everything, on_written, on_logged
        self.step = StepWrite()
        """Deltas and openings that the next `send` writes."""
        self._checkpoints: list[Checkpoint] = []
        self._finishes: list[Finish] = []
        self._failed = asyncio.Queue[Write | Exception]()
        """Writes to retry, and exceptions of callbacks: `run` handles both."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopped = False

    def open(self, number: int, opening: Opening, addresses: Sequence[str]) -> None:
        """Send the opening of run `number` to these addresses with the next `send`."""
        for address in addresses:
            self.step.openings[address][number] = opening

    def finish(self, finish: Finish) -> None:
        """Write the end of a job with the next `send`, after all its deltas."""
        self._finishes.append(finish)

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Log a run's deltas again with the next `send`."""
        self._checkpoints.append(checkpoint)

    def send(self) -> None:
        """Write what was added, if anything was. Called once a step."""
        if (self.step.rows or self._finishes or self._checkpoints) and self._idle.is_set():
            self._idle.clear()
            self._send_now()

    async def flushed(self) -> None:
        """Wait until everything sent so far is written, or the writer has stopped."""
        await self._idle.wait()

    async def run(self) -> None:
        """Retry failed writes until cancelled; afterwards the writer writes nothing more. Raises Fenced."""
        try:
            while True:
                await self._retry(await self._failed.get())
        finally:
            self._stopped = True
            self._idle.set()

    async def _retry(self, failed: Write | Exception) -> None:
        if isinstance(failed, Exception):
            raise failed
        try:
            await self._write(failed.calls)
        except Rewound as error:
            log.error("writing the log of all running jobs anew: %s", error)
            await self._write([self._repair(), *self._calls(failed.step, failed.checkpoints, failed.finishes)])
        self._complete(failed)

    def _send_now(self) -> None:
        if self._stopped:
            self._idle.set()
            return
        step, self.step = self.step, StepWrite()
        finishes, self._finishes = self._finishes, []
        checkpoints, self._checkpoints = self._checkpoints, []
        try:
            calls = self._calls(step, checkpoints, finishes)
        except Exception as error:  # noqa: BLE001 - what was to be written would be lost in silence: `run` raises it
            self._failed.put_nowait(error)
            return
        write = Write(step, checkpoints, finishes, calls)
        if not self._lease.send_nowait(write.calls, partial(self._on_reply, write)):
            self._failed.put_nowait(write)

    def _on_reply(self, write: Write, written: bool, answers: Sequence[Any] = ()) -> None:
        if not written:
            self._failed.put_nowait(write)
            return
        try:
            self._complete(write, refused_ends(write.finishes, answers))
        except Exception as error:  # noqa: BLE001 - no caller awaits this callback: `run` raises it
            self._failed.put_nowait(error)

    def _complete(self, write: Write, refused: Sequence[Finish] = ()) -> None:
        """Report what was written, then send what arrived meanwhile. `refused`: ends of jobs that had ended before."""
        for checkpoint in write.checkpoints:
            checkpoint.on_written(checkpoint.frame)
        self._on_logged(write.step)
        self._on_written(write.finishes, refused)
        if self.step.rows or self._finishes or self._checkpoints:
            self._send_now()
        else:
            self._idle.set()

    def _calls(self, step: StepWrite, checkpoints: Sequence[Checkpoint], finishes: Sequence[Finish]) -> list[Call]:
        calls = [self._append(step)] if step.rows else []
        for checkpoint in checkpoints:
            calls += self._checkpoint_calls(checkpoint)
        return calls + [self._lease.finish_call(finish) for finish in finishes]

    def _checkpoint_calls(self, checkpoint: Checkpoint) -> Iterator[Call]:
        """The calls that append a run's deltas, then mark these frames as the ones to read."""
        checkpoint.frame = self._lease.next_frame(self._partition)
        rows = checkpoint.rows()
        for first in range(0, len(rows), MAX_ROWS_PER_FRAME):
            frame = StepWrite()
            frame.rows[SILENT] = list(rows[first : first + MAX_ROWS_PER_FRAME])
            frame.openings[SILENT][checkpoint.number] = checkpoint.opening
            yield self._append(frame)
        yield self._lease.checkpoint_call(self._partition, checkpoint.job_id, checkpoint.number, checkpoint.frame)

    def _append(self, step: StepWrite, *, forced: bool = False) -> Call:
        oldest = self._oldest(self._partition)
        return self._lease.append_call(self._partition, step.rows, oldest, openings=step.openings, forced=forced)

    def _repair(self) -> Call:
        """Append one frame with all deltas that the store may have lost."""
        return self._append(self._everything(self._partition), forced=True)

    async def _write(self, calls: Sequence[Call]) -> None:
        expected = ExpectedErrors(Unavailable, log.warning, "a step could not be written, trying again: %s")
        await retry(partial(self._lease.calls, calls), expected, backoff(MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S))


def refused_ends(finishes: Sequence[Finish], answers: Sequence[Any]) -> list[Finish]:
    """The ends that the store did not take, because a script had ended the job. `answers`: of the calls of one write,
    whose last are the finishes; none of a write that was repeated: there an end that is known was most likely its own.
    """
    if not finishes or not answers:
        return []
    return [finish for finish, answer in zip(finishes, answers[-len(finishes) :], strict=True) if answer == 0]
