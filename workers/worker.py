"""The worker: let the engine run what was claimed, write what comes out, and end each job exactly once.

It decides when to stop; the claimer claims, the engine batches, the lease protects, the writer writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from streaming.capabilities import unsupported
from streaming.clock import Clock
from streaming.errors import DecodeError, Fenced, Unavailable
from streaming.journal import Journal
from streaming.keys import partition_of
from streaming.lease import SILENT, Broken, Claim, Finish, Held, Lease
from streaming.messages import (
    Cancel,
    Control,
    Cordon,
    Delta,
    Failure,
    Follow,
    Hold,
    ModelCard,
    Priority,
    State,
    Terminal,
    Wake,
)
from streaming.reaper import Reaper
from streaming.wire import Wire
from telemetry.lag import watch_lag
from workers.attempt import CANCELLED, EXPIRED, Attempt
from workers.claimer import Claimer, reserved_slots
from workers.engine import Engine, EngineDead, Piece, Refused, Stats
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.writer import Step, Writer

log = logging.getLogger(__name__)

SWEEP_S = 1.0


class Worker:
    """One process's worker of one model. `run` returns after a drain; it raises Fenced or EngineDead when the process
    must end at once (others take its jobs)."""

    def __init__(
        self,
        wire: Wire,
        engine: Engine,
        card: ModelCard,
        settings: WorkerSettings,
        recorder: Recorder,
        on_cordon: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._on_cordon = on_cordon
        self.lease = Lease(wire, card.name)
        self._wire, self._engine, self._card, self._settings, self._recorder = wire, engine, card, settings, recorder
        self._clock = Clock(wire)
        self._attempts: dict[str, Attempt] = {}
        """Jobs held, oldest first, until their end is written."""
        self._choices: dict[str, tuple[Attempt, int]] = {}
        """What the engine runs, by its id there: whose it is, and which of its texts."""
        self.batch_texts = 0
        """Those of lane batch among them."""
        self._streams = itertools.count(1)
        """Numbers that stand for the jobs in this worker's frames."""
        self._handed_back: list[Attempt] = []
        self._writers = [
            Writer(self.lease, partition, self._oldest_frame, self._everything, self._on_written)
            for partition in wire.partitions
        ]
        self._room = asyncio.Event()
        self._claimer = Claimer(self.lease, Journal(wire), settings, self, self._room)
        self._leaving = False

    @property
    def running(self) -> int:
        """Jobs held now."""
        return len(self._attempts)

    @property
    def reserved(self) -> int:
        """Slots that lane batch may not fill."""
        return reserved_slots(self.stats().slots, self._settings.reserved_slots)

    @property
    def texts(self) -> int:
        """What the engine runs, or queues, of the jobs held."""
        return len(self._choices)

    def stats(self) -> Stats:
        """The engine's."""
        return self._engine.stats()

    @property
    def generating(self) -> bool:
        """Whether the engine has something of ours to go on with."""
        return bool(self._choices)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then drain. Raises Fenced, EngineDead, Unavailable (at start only)."""
        await self.lease.register()
        await self._clock.renew()
        claiming = asyncio.create_task(self._claimer.run(self._wire.partitions))
        sweeping = Reaper(self._wire, self._recorder.metrics).keep_sweeping(SWEEP_S)
        loops = [self._control_loop(), self._health_loop(), sweeping, watch_lag(), self._clock.keep()]
        loops += [writer.run() for writer in self._writers]
        loops += [self._beat_loop(partition) for partition in self._wire.partitions]
        tasks = {claiming, asyncio.create_task(self._drain_after(stop, claiming)), *map(asyncio.create_task, loops)}
        try:
            await _until_one_ends(tasks - {claiming}, claiming)
        except Fenced:
            if not self._leaving:  # else a heartbeat under way met the lease that was just given up
                raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- beginning ---------------------------------------------------------------------------------------------------

    def begin(self, claim: Claim, history: Sequence[Delta]) -> None:
        """Hand one claimed job to the engine, with what earlier attempts generated."""
        attempt = Attempt(claim, next(self._streams), history)
        self._attempts[claim.job.id] = attempt
        self._recorder.claimed(attempt)
        if failure := unsupported(claim.job, self._card.capabilities):
            attempt.stop(State.FAILED, failure)
        elif self._claimer.was_cancelled(claim.job.id):
            attempt.stop(State.CANCELLED, CANCELLED)
        else:
            self._submit(attempt)
            self._set_deadline(attempt)
        self._end_if_over(attempt)
        self._writers[attempt.partition].send()

    def _submit(self, attempt: Attempt) -> None:
        attempt.stamps.release()
        for index, request in attempt.requests().items():
            try:
                self._engine.submit(request)
            except Refused as refused:
                attempt.stop(State.FAILED, refused.failure)
                break
            self._choices[request.id] = (attempt, index)
            self.batch_texts += attempt.job.priority is Priority.BATCH
        if attempt.stopped:
            self._let_go(attempt)
            attempt.abandon()

    def refuse(self, broken: Broken) -> None:
        """End one that cannot be read."""
        log.error("job %s cannot be read and fails: %s", broken.id, broken.problem)
        failure = Failure("malformed_job", "The stored job could not be read by this version.", 500)
        end = Terminal(broken.id, State.FAILED, 0, failure=failure, worker=self.lease.id)
        finish = Finish(end, broken.attempt, True, dead=f"unreadable: {broken.problem}")
        writer = self._writers[partition_of(broken.id) or 0]
        writer.finish(finish)
        writer.send()

    def _set_deadline(self, attempt: Attempt) -> None:
        if (due := attempt.claim.deadline_ms) is not None:
            delay = max(0, due - attempt.claim.claimed_ms) / 1000
            attempt.deadline = asyncio.get_running_loop().call_later(delay, self._expire, attempt)

    # --- what the engine gives ---------------------------------------------------------------------------------------

    def on_step(self, pieces: Sequence[Piece]) -> None:
        """Given to the engine: every piece of one step. The loop's body is done once a token."""
        now = time.monotonic()
        choices, writers = self._choices, self._writers
        for piece in pieces:
            choice = choices.get(piece.id)
            if choice is None:
                continue  # handed back: its next worker goes on from the log
            attempt, index = choice
            delta = attempt.take(index, piece, now)
            if delta is not None:
                if attempt.unnamed:
                    self._name(attempt)
                rows = writers[attempt.partition].step.rows
                for address in attempt.addresses:
                    rows[address].append(delta)
            if piece.finish or piece.failure is not None:
                self._forget(piece.id)
                self._end_if_over(attempt)
        for writer in writers:
            writer.send()

    def _name(self, attempt: Attempt) -> None:
        attempt.unnamed = False
        self._writers[attempt.partition].name(attempt.stream, attempt.job.id, attempt.addresses)

    def _end_if_over(self, attempt: Attempt) -> None:
        if attempt.over:
            if attempt.deadline is not None:
                attempt.deadline.cancel()
            end = attempt.terminal(self.lease.id, attempt.stamps.generated(self._clock, attempt.partition))
            self._recorder.ended(attempt, end)
            finish = Finish(end, attempt.claim.attempt, not attempt.job.stream)
            self._writers[attempt.partition].finish(finish)
        elif attempt.stopped:  # by the failure of one of its texts
            self._stop_engine(attempt)

    def _on_written(self, finishes: Sequence[Finish]) -> None:
        for finish in finishes:
            self._attempts.pop(finish.terminal.job, None)
        if finishes:
            self._room.set()

    def _oldest_frame(self, partition: int) -> int:
        """The first frame that a held job may still need from the log, or one that was handed back with its tokens."""
        for attempt in chain(self._handed_back, self._attempts.values()):
            if attempt.partition == partition:
                return attempt.claim.first_frame  # they were claimed one after the other: no later one needs more
        return self.lease.next_frame(partition)

    def _everything(self, partition: int) -> Step:
        """Every delta of every job held: what a log that lost frames needs to be whole again."""
        everything = Step()
        rows, names = everything.rows[SILENT], everything.names[SILENT]
        for attempt in self._attempts.values():
            if attempt.partition == partition:
                names[attempt.stream] = attempt.job.id
                rows += attempt.logged()
        return everything

    # --- being told --------------------------------------------------------------------------------------------------

    async def _control_loop(self) -> None:
        while True:
            try:
                async for control in self.lease.controls():
                    self._obey(control)
            except (Unavailable, DecodeError) as error:
                # Wake-ups are repeated by polling, cancels by the heartbeat, follows by the reader's own checks.
                log.warning("control channel interrupted, subscribing again: %s", error)
                await asyncio.sleep(self._settings.poll_ms / 1000)

    def _obey(self, control: Control) -> None:
        match control:
            case Wake():
                self._room.set()
            case Cancel(job_id):
                self._cancel(job_id)
            case Follow(job_id, address):
                if attempt := self._attempts.get(job_id):
                    attempt.follow(address)
            case Cordon(reason):
                self._on_cordon(reason)
            case Hold(for_ms):
                self._claimer.hold(for_ms)

    def _cancel(self, job_id: str) -> None:
        attempt = self._attempts.get(job_id)
        if attempt is None:
            self._claimer.note_cancel(job_id)
        elif not attempt.over:
            attempt.stop(State.CANCELLED, CANCELLED)
            self._recorder.cancelled(job_id)
            self._stop_engine(attempt)

    def _expire(self, attempt: Attempt) -> None:
        attempt.stop(State.EXPIRED, EXPIRED)
        self._stop_engine(attempt)

    def _stop_engine(self, attempt: Attempt) -> None:
        for request_id in attempt.live_ids():
            self._engine.cancel(request_id)

    def _let_go(self, attempt: Attempt) -> None:
        """Stop it, and take nothing more of it."""
        self._stop_engine(attempt)
        for request_id in attempt.live_ids():
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        """The engine has nothing more of it to give."""
        attempt, _ = self._choices.pop(request_id, (None, 0))
        if attempt is not None:
            self.batch_texts -= attempt.job.priority is Priority.BATCH

    async def _health_loop(self) -> None:
        """Look whether the engine lives."""
        while True:
            await asyncio.sleep(self._wire.settings.lease_ms / 3000)
            health = self._engine.health()
            if not health.ok:
                raise EngineDead(health.reason)

    async def _beat_loop(self, partition: int) -> None:
        """Renew the lease, and hear of what was lost on the wire."""
        strays: set[tuple[str, int]] = set()
        taken: set[str] = set()
        while True:
            await asyncio.sleep(self._wire.settings.lease_ms / 3000)
            try:
                held = await self.lease.beat(partition)
                strays = await self._hand_back_strays(partition, strays, held)
            except Unavailable as error:
                log.warning("the lease in partition %d could not be renewed, trying again: %s", partition, error)
                continue
            taken = self._drop_taken(partition, taken, held)
            for job_id, job in held.items():
                if job.cancelled:
                    self._cancel(job_id)

    async def _hand_back_strays(
        self, partition: int, before: set[tuple[str, int]], held: Mapping[str, Held]
    ) -> set[tuple[str, int]]:
        """A claim whose answer was lost leaves jobs the server counts as ours and we know nothing of: hand back those
        seen so twice while no claim was under way, which may only be slow. Returns those seen now, with the attempt."""
        if self._claimer.may_bring(partition):
            return set()
        strays = {(job_id, job.attempt) for job_id, job in held.items() if job_id not in self._attempts}
        for job_id, attempt in strays & before:
            log.warning("handing back a job whose claim was never answered", extra={"job": job_id})
            await self.lease.release(job_id, attempt)
        return strays - before

    def _drop_taken(self, partition: int, before: set[str], held: Mapping[str, Held]) -> set[str]:
        """Jobs of ours that the server, twice running, does not count as ours (it has lost the claim): stop them."""
        ours = [attempt for attempt in self._attempts.values() if attempt.partition == partition]
        taken = {attempt.job.id for attempt in ours if attempt.job.id not in held and not attempt.over}
        for job_id in taken & before:
            log.warning("dropping a job the store no longer counts as ours", extra={"job": job_id})
            self._let_go(self._attempts.pop(job_id))
            self._recorder.released(job_id)
        return taken - before

    # --- going -------------------------------------------------------------------------------------------------------

    async def _drain_after(self, stop: asyncio.Event, claiming: asyncio.Task[None]) -> None:
        """Take nothing more, let what runs finish within the grace time, hand back the rest, give up the lease."""
        await stop.wait()
        self._claimer.end()
        await claiming  # what it is claiming now is still ours
        log.info("draining: %d jobs to finish within %.0f s", self.running, self._settings.drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                while self._attempts:
                    self._room.clear()
                    await self._room.wait()
        await self._hand_back()
        self._leaving = True
        while held := await self.lease.leave():
            log.warning("still holding %d jobs that ended while leaving; looking again", held)
            await asyncio.sleep(0.05)

    async def _hand_back(self) -> None:
        self._handed_back, self._attempts = list(self._attempts.values()), {}
        for attempt in self._handed_back:
            self._let_go(attempt)
        for writer in self._writers:
            await writer.flushed()
        for attempt in self._handed_back:
            await self.lease.release(attempt.job.id, attempt.claim.attempt)
            self._recorder.released(attempt.job.id)
        if self._handed_back:
            log.info("handed back %d unfinished jobs", len(self._handed_back))


async def _until_one_ends(tasks: set[asyncio.Task[None]], claiming: asyncio.Task[None]) -> None:
    """Wait for the first of `tasks` to end, or for claiming to fail (it ends by itself in a drain)."""
    done, _ = await asyncio.wait({*tasks, claiming}, return_when=asyncio.FIRST_COMPLETED)
    if done == {claiming} and claiming.exception() is None:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def guard(run: asyncio.Future[None]) -> str:
    """Wait for a worker's run; the reason why it had to end, or "" after a drain."""
    try:
        await run
    except Fenced as error:
        return f"fenced: {error}"
    except EngineDead as error:
        return f"engine dead: {error}"
    return ""
