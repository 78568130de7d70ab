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
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

from penstock.loops import ExpectedErrors, backoff, retry
from streaming.errors import Rewound, Unavailable
from streaming.jobs.codec import Opening, in_frames
from streaming.jobs.lease import SILENT, Finish, Lease
from streaming.redis.client import Call
from workers.attempt import Attempt
from workers.held_jobs import HeldJobs

log = logging.getLogger(__name__)

MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.02, 0.25


@dataclass(slots=True, eq=False)
class StepWrite:
    """One write: deltas and openings of runs by reply address, then checkpoints, then ends of jobs."""

    rows: defaultdict[str, list[bytes]] = field(default_factory=partial(defaultdict, list))
    openings: defaultdict[str, dict[int, Opening]] = field(default_factory=partial(defaultdict, dict))
    tokens: defaultdict[str, int] = field(default_factory=partial(defaultdict, int))
    """Tokens of the deltas, each once, by the fallback model that gave them; "": the worker's own model."""
    checkpoints: dict[Attempt, int] = field(default_factory=dict)
    """Runs whose deltas are logged again in one piece, and the first frame that holds them."""
    finishes: list[Finish] = field(default_factory=list)
    ends: list[Call] = field(default_factory=list)
    """The calls of the finishes."""
    is_joined: bool = False
    """Whether it may hold several steps, which came while another write was in flight."""
    is_whole: bool = False
    """A run's rows go to another address from the middle of it on: readers look for what they lack from the frame of
    their last delta on, so no later row may stand in an earlier frame."""
    calls: Sequence[Call] = ()
    """What is sent of it, in this order; set once it is sent."""


class Writer:
    """Writes one partition's steps, checkpoints and job ends.

    Args:
        held: the jobs whose deltas it writes. Frames that none of them needs any more are trimmed.
        on_written: called with each step that the store has, exactly once, and with those of its finishes that a script
            had ended otherwise before, so that what was written does not count.
    """

    def __init__(
        self,
        lease: Lease,
        partition: int,
        held: HeldJobs,
        on_written: Callable[[StepWrite, Sequence[Finish]], None],
    ) -> None:
        self._lease, self._partition, self._held, self._on_written = lease, partition, held, on_written
        self.step = StepWrite()
        """What the next `send` writes."""
        self._failed = asyncio.Queue[StepWrite | Exception]()
        """Writes to retry, and exceptions of callbacks: `run` handles both."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopped = False

    def open(self, run_number: int, opening: Opening, addresses: Sequence[str]) -> None:
        """Send the opening of a run to these addresses with the next `send`."""
        for address in addresses:
            self.step.openings[address][run_number] = opening

    def finish(self, finish: Finish) -> None:
        """Write the end of a job with the next `send`, after all its deltas. Raises (OverflowError, ValueError,
        TypeError) if it cannot be encoded."""
        self.step.ends.append(self._lease.finish_call(finish, self._partition))
        self.step.finishes.append(finish)

    def checkpoint(self, at_least: int) -> None:
        """Log the deltas of long jobs again in one piece, so that the older log of the partition can be trimmed.

        Args:
            at_least: frames since the first one that a job needs (its run's first, or its last checkpoint) after which
                its deltas are logged again; a quarter of the number of its deltas, if that is more.
        """
        now = self._lease.next_frame(self._partition)
        for attempt in self._held.of(self._partition):
            is_long = now - attempt.first_frame >= max(at_least, attempt.seq // 4)
            if is_long and not (attempt.checkpointing or attempt.over):
                attempt.checkpointing = True
                self.step.checkpoints[attempt] = 0
        self.send()

    def send(self) -> None:
        """Write what was added, if anything was. Called once a step."""
        step = self.step
        if not (step.rows or step.finishes or step.checkpoints):
            return
        if self._idle.is_set():
            self._idle.clear()
            self._send_now()
        else:
            step.is_joined = True

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

    async def _retry(self, failed: StepWrite | Exception) -> None:
        if isinstance(failed, Exception):
            raise failed
        try:
            await self._write(failed.calls)
        except Rewound as error:
            log.error("writing the log of all running jobs anew: %s", error)
            await self._write([*self._repair(), *self._calls(failed)])
        self._complete(failed)

    def _send_now(self) -> None:
        if self._stopped:
            self._idle.set()
            return
        step, self.step = self.step, StepWrite()
        try:
            step.calls = self._calls(step)
        except Exception as error:  # noqa: BLE001 - what was to be written would be lost in silence: `run` raises it
            self._failed.put_nowait(error)
            return
        if not self._lease.send_nowait(step.calls, partial(self._on_reply, step)):
            self._failed.put_nowait(step)

    def _on_reply(self, step: StepWrite, answers: Sequence[Any] | None) -> None:
        if answers is None:
            self._failed.put_nowait(step)
            return
        try:
            ends = zip(step.finishes, answers[-len(step.finishes) :], strict=True) if step.finishes else ()
            self._complete(step, [finish for finish, answer in ends if answer == 0])
        except Exception as error:  # noqa: BLE001 - no caller awaits this callback: `run` raises it
            self._failed.put_nowait(error)

    def _complete(self, step: StepWrite, refused: Sequence[Finish] = ()) -> None:
        """Report what was written, then send what arrived meanwhile. `refused`: ends that the store did not take
        because a script had ended the job; none of a write that was repeated, whose own they most likely are."""
        for attempt, frame in step.checkpoints.items():
            attempt.first_frame, attempt.checkpointing = frame, False
        self._on_written(step, refused)
        if self.step.rows or self.step.finishes or self.step.checkpoints:
            self._send_now()
        else:
            self._idle.set()

    def _calls(self, step: StepWrite) -> list[Call]:
        may_be_large = step.is_joined and not step.is_whole
        calls = list(self._appends(step)) if may_be_large else [self._append(step)] if step.rows else []
        for attempt in step.checkpoints:
            step.checkpoints[attempt] = self._lease.next_frame(self._partition)
            calls += self._checkpoint_calls(attempt, step.checkpoints[attempt])
        return calls + step.ends

    def _checkpoint_calls(self, attempt: Attempt, first_frame: int) -> Iterator[Call]:
        """The calls that append a run's deltas, then mark these frames as the ones to read."""
        again = StepWrite()
        again.rows[SILENT] = attempt.own()  # only now, because it must hold every delta of an earlier frame
        again.openings[SILENT][attempt.run_number] = attempt.opening
        yield from self._appends(again)
        yield self._lease.checkpoint_call(self._partition, attempt.job.id, attempt.run_number, first_frame)

    def _appends(self, step: StepWrite, *, forced: bool = False) -> Iterator[Call]:
        """The calls that append what may be too much for one frame. Each names the openings, so that a reader may begin
        with any. `forced`: the first one."""
        parts = [[(address, part) for part in list(in_frames(rows)) or [rows]] for address, rows in step.rows.items()]
        for group in zip_longest(*parts):
            frame = StepWrite(openings=step.openings)
            frame.rows.update([each for each in group if each is not None])
            yield self._append(frame, forced=forced)
            forced = False

    def _append(self, step: StepWrite, *, forced: bool = False) -> Call:
        oldest = self._held.oldest_frame(self._partition)
        return self._lease.append_call(self._partition, step.rows, oldest, openings=step.openings, forced=forced)

    def _repair(self) -> Iterator[Call]:
        """Append all deltas that the store may have lost: those of all held jobs."""
        everything = StepWrite()
        rows, openings = everything.rows[SILENT], everything.openings[SILENT]
        for attempt in self._held.of(self._partition):
            openings |= attempt.openings
            rows += attempt.logged()
        return self._appends(everything, forced=True)

    async def _write(self, calls: Sequence[Call]) -> None:
        expected = ExpectedErrors(Unavailable, log.warning, "a step could not be written, trying again: %s")
        await retry(partial(self._lease.calls, calls), expected, backoff(MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S))
