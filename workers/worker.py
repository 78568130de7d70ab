"""The worker: let the engine run what was claimed, write what comes out, and end each job exactly once.

It decides when to stop; the claimer claims, the engine batches, the lease protects, the writer writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from runtime.lag import watch_lag
from streaming.errors import Fenced, Unavailable
from streaming.ids import partition_of
from streaming.jobs.capabilities import unsupported
from streaming.jobs.cards import Capabilities, ModelCard
from streaming.jobs.control import Cancel, Control, Cordon, Follow, Hold, Wake
from streaming.jobs.history import History
from streaming.jobs.job import Job, JobState, prompt_count
from streaming.jobs.lease import SILENT, Claim, Finish, HeldJob, Lease, UnreadableClaim
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.jobs.terminal import Failure, Terminal
from streaming.jobs.work import answer_tokens, prompt_sizes
from streaming.priority import Priority
from streaming.redis.client import RedisClient
from streaming.redis.clock import Clock
from workers.attempt import CANCELLED, EXPIRED, Attempt, samples
from workers.checker import Checker
from workers.checkpoint import is_due
from workers.claimer import Claimer, reserved_slots
from workers.engines.base import Engine, EngineDead, Piece, Refused, Stats
from workers.engines.constraint import unchecked
from workers.listeners import CHECK_INTERVAL_S, Listeners, in_use
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.writer import Checkpoint, StepWrite, Writer

log = logging.getLogger(__name__)

SWEEP_S = 1.0
REGISTER_AGAIN_S = 0.25
PARTIAL_PER_SLOT = 4
"""Jobs with choices that wait, for each slot, that a worker holds before it claims no more."""


class Worker:
    """One process's worker of one model. `run` returns after a drain; it raises Fenced or EngineDead when the process
    must end at once (others take its jobs)."""

    def __init__(
        self,
        wire: RedisClient,
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
        self._partial: dict[str, Attempt] = {}
        """By job id, attempts with choices that wait to be started."""
        self._overtaken = -1
        """The lowest lane, by rank, of the jobs that took a place while choices waited; -1: none since the last of
        these was started. The next place is for one that waits, if its lane is not lower."""
        self._starts = 0
        """Texts given to the engine so far."""
        self._is_offered = False
        """A place is left to the claimer until it has looked."""
        self._engine_dead: EngineDead | None = None
        """Raised by the engine in a callback; the health check passes it on."""
        self._handed_back: list[Attempt] = []
        self._writers = [
            Writer(self.lease, partition, self._oldest_frame, self._everything, self._on_written)
            for partition in wire.partitions
        ]
        self._checker = Checker()
        self._checks: set[asyncio.Task[None]] = set()
        """What goes on with it, for jobs that asked for JSON."""
        self._room = asyncio.Event()
        self._claimer = Claimer(self.lease, JobReader(wire), settings, self, self._room)
        self._leaving = False
        self._lost: set[int] = set()
        """Partitions where the lease was taken."""
        self._losing = asyncio.Event()

    @property
    def running(self) -> int:
        """Jobs held now."""
        return len(self._attempts)

    @property
    def reserved(self) -> int:
        """Slots that lane batch may not fill."""
        return reserved_slots(self.stats().slots, self._settings.reserved_slots)

    @property
    def capabilities(self) -> Capabilities:
        """The engine's."""
        return self._card.capabilities

    @property
    def texts(self) -> int:
        """What the engine runs, or queues, of the jobs held."""
        return len(self._choices)

    @property
    def is_laden(self) -> bool:
        """So many jobs have choices that wait that others are left to other workers."""
        return len(self._partial) >= PARTIAL_PER_SLOT * self.stats().slots if self._partial else False

    def stats(self) -> Stats:
        """The engine's."""
        return self._engine.stats()

    @property
    def generating(self) -> bool:
        """Whether the engine has something of ours to go on with."""
        return bool(self._choices)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then drain. Raises Fenced, EngineDead."""
        if not await self._registered(stop):
            return
        claiming = asyncio.create_task(self._claimer.run(self._wire.partitions))
        sweeping = Reaper(self._wire, self._recorder.metrics).keep_sweeping(SWEEP_S)
        loops = [self._control_loop(), self._health_loop(), sweeping, watch_lag(), self._clock.keep()]
        loops.append(self._listener_loop())
        for partition, writer in zip(self._wire.partitions, self._writers, strict=True):
            loops += [self._unless_fenced(partition, loop) for loop in (writer.run(), self._beat_loop(partition))]
        tasks = {claiming, asyncio.create_task(self._drain_after(stop, claiming)), *map(asyncio.create_task, loops)}
        try:
            await _until_one_ends(tasks - {claiming}, claiming)
        finally:
            for task in tasks | self._checks:
                task.cancel()
            await asyncio.gather(*tasks, *self._checks, return_exceptions=True)
            await self._checker.stop()

    async def _unless_fenced(self, partition: int, loop: Coroutine[Any, Any, None]) -> None:
        """One of a partition's loops. When the lease there is taken it ends, and the worker drains the others."""
        try:
            await loop
        except Fenced:
            self.lose(partition)
            await asyncio.get_running_loop().create_future()  # `run` ends with the first task that ends

    def lose(self, partition: int) -> None:
        """The lease of a partition was taken: others run its jobs. What is held elsewhere is drained, not abandoned."""
        if self._leaving or partition in self._lost:  # leaving: a heartbeat met the lease that was just given up
            return
        self._lost.add(partition)
        for attempt in [each for each in self._attempts.values() if each.partition == partition]:
            self._let_go(self._attempts.pop(attempt.job.id))
            self._recorder.released(attempt.job.id)
        self._losing.set()
        self._room.set()
        if self._has_leases:
            self._on_cordon(f"its lease in partition {partition} was taken")

    @property
    def _has_leases(self) -> bool:
        return not self._lost.issuperset(self._wire.partitions)

    async def _registered(self, stop: asyncio.Event) -> bool:
        """Take the lease, however long the store is away: the model is loaded, and loading it again would take longer.
        False if `stop` comes first."""
        while not stop.is_set():
            try:
                await self._clock.renew()
                await self.lease.register()  # last, for nothing renews the lease before `run` goes on
                return True
            except Unavailable as error:
                log.warning("the worker cannot register, trying again: %s", error)
                await asyncio.sleep(REGISTER_AGAIN_S)
        return False

    # --- beginning ---------------------------------------------------------------------------------------------------

    async def refusal(self, job: Job) -> Failure | None:
        """Why the engine can never run a job of several prompts, found before anything is computed or said of it. A
        single prompt it refuses when that is submitted. Raises EngineDead."""
        if prompt_count(job.prompt) == 1 or unsupported(job, self._card.capabilities):
            return None
        for sample in samples(job):
            try:
                await self._engine.check(sample)
            except Refused as refused:
                return refused.failure
            await asyncio.sleep(0)  # each may take a while: what runs already gets its step
        return None

    def begin(self, claim: Claim, history: History, refusal: Failure | None = None) -> None:
        """Hand one claimed job to the engine, with what earlier attempts generated; or end it with its `refusal`."""
        self._drop(claim.job.id, "the store has given it to this worker once more")
        attempt = Attempt(claim, history)
        self._attempts[claim.job.id] = attempt
        for address in self._claimer.followers(claim.job.id):
            attempt.follow(address)
        self._recorder.claimed(attempt)
        if failure := refusal or unsupported(claim.job, self._card.capabilities):
            attempt.stop(JobState.FAILED, failure)
        elif self._claimer.was_cancelled(claim.job.id):
            attempt.stop(JobState.CANCELLED, CANCELLED)
        else:
            self._submit(attempt)
            self._set_deadline(attempt)
            if attempt.constrained:
                self._check(self._refuse_unusable(attempt))
        self._end_if_over(attempt)
        self._writers[attempt.partition].send()

    def _submit(self, attempt: Attempt) -> None:
        """Start the first choice. The others are started once all jobs of this claim have their first one."""
        attempt.stamps.release()
        attempt.queue_choices()
        if attempt.waits:
            self._start(attempt)
            if self._partial:
                self._note_overtaking(attempt.job.priority)
        if attempt.waits:
            attempt.share = self._share(attempt.job)
            self._partial[attempt.job.id] = attempt
            asyncio.get_running_loop().call_soon(self._start_waiting)

    def _start(self, attempt: Attempt) -> None:
        """Give the engine the next choice. The job fails if it is refused. Raises EngineDead."""
        index, request = attempt.start_next()
        try:
            self._engine.submit(request)
        except Refused as refused:
            attempt.refuse(index, refused.failure)
            return
        self._starts += 1
        attempt.last_start = self._starts
        self._choices[request.id] = (attempt, index)
        self.batch_texts += attempt.job.priority is Priority.BATCH

    def _share(self, job: Job) -> int:
        """How many choices of a job the engine may have at a time, so that other jobs find room: at most half of its
        slots, by estimated size at most half of its KV cache, and at least one."""
        stats = self.stats()
        share = stats.slots // 2
        if stats.kv_tokens:
            size = max(prompt_sizes(job.prompt)) + answer_tokens(job.sampling.max_tokens, self._card)
            share = min(share, stats.kv_tokens // 2 // max(1, min(size, self._card.context)))
        return max(1, share)

    def _note_overtaking(self, lane: Priority) -> None:
        """A job has come while choices wait: whether it took the last slot that they might have had, or a place beyond
        the slots."""
        slots = self.stats().slots
        if self.texts > slots or (self.texts == slots and not self._settings.prefetch):
            self._overtaken = max(self._overtaken, lane.rank)

    def _start_waiting(self) -> None:
        """Start choices that wait, as long as there is room. First come jobs that have none running, so that each job
        goes on, those first whose last start is longest ago; then the highest lane, and in it the oldest job."""
        waiting = sorted(self._partial.values(), key=lambda each: each.job.priority.rank)
        slots = self.stats().slots
        try:
            for attempt in sorted(waiting, key=lambda each: (each.job.priority.rank, each.last_start)):
                if not attempt.started and self._may_start(attempt, slots):
                    self._start_next(attempt)
            for attempt in waiting:
                while self._may_start(attempt, slots):
                    self._start_next(attempt)
        except EngineDead as error:
            self._engine_dead = error  # this is called by the event loop and by the engine itself
            return
        for attempt in waiting:
            if not attempt.waits:
                del self._partial[attempt.job.id]
                self._room.set()
        for writer in self._writers:
            writer.send()

    def _start_next(self, attempt: Attempt) -> None:
        """Start one more choice of a job that has begun. Raises EngineDead."""
        self._overtaken = -1
        self._start(attempt)
        if attempt.stopped:
            self._end_if_over(attempt)

    def _may_start(self, attempt: Attempt, slots: int) -> bool:
        """Whether there is room for one more choice of a job: a slot; or, if a job came in between that is of no higher
        lane, a place beyond the slots, which are else kept for claims. So when all is full, each of the two gets every
        second place, and a job of a higher lane the next."""
        if not attempt.waits or attempt.started >= attempt.share:
            return False
        if self.texts >= slots + (self._settings.prefetch if self._is_owed(attempt) else 0):
            return False
        return attempt.job.priority is not Priority.BATCH or self.batch_texts < slots - self.reserved

    def _is_owed(self, attempt: Attempt) -> bool:
        return attempt.job.priority.rank <= self._overtaken

    def _refill(self) -> None:
        """A choice has ended: its place is taken by one that waits. Where no place is kept for claims, the claimer
        looks first, if it found no room the last time; every second time, while all is full."""
        owed = any(self._is_owed(attempt) for attempt in self._partial.values())
        if self._claimer.is_full and not self._settings.prefetch and not owed:
            self._is_offered = True
            self._room.set()
        else:
            self._start_waiting()

    def looked(self) -> None:
        """The claimer has begun what it found: a place that it has left is for choices that wait."""
        if self._is_offered:
            self._is_offered = False
            self._start_waiting()

    def refuse(self, broken: UnreadableClaim) -> None:
        """End one that cannot be read."""
        log.error("job %s cannot be read and fails: %s", broken.id, broken.problem)
        failure = Failure("malformed_job", "The stored job could not be read by this version.", 500)
        end = Terminal(broken.id, JobState.FAILED, 0, failure=failure, worker=self.lease.id)
        finish = Finish(end, broken.number, True, dead=f"unreadable: {broken.problem}")
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
        freed = False
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
                freed = True
                if not attempt.over and self._claimer.is_full:
                    self._room.set()  # where a job ends, this is done once that is written
        if freed and self._partial:
            self._refill()
        for writer in writers:
            writer.send()

    def _name(self, attempt: Attempt) -> None:
        attempt.unnamed = False
        self._writers[attempt.partition].open(attempt.number, attempt.opening, attempt.addresses)

    def _end_if_over(self, attempt: Attempt) -> None:
        if attempt.over:
            if attempt.constrained:
                attempt.check = self._check(self._end_checked(attempt))
            else:
                self._end(attempt)
        elif attempt.stopped:  # by the failure of one of its texts
            self._stop_engine(attempt)

    def _check(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        check = asyncio.create_task(work)
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)
        return check

    async def _refuse_unusable(self, attempt: Attempt) -> None:
        """End a job with a schema by which no answer can be judged while the engine generates."""
        failure = await self._checker.failure(attempt.job.sampling.json_schema or {}, ())
        if failure is not None and not attempt.over:
            attempt.stop(JobState.FAILED, failure)
            self._stop_engine(attempt)

    async def _end_checked(self, attempt: Attempt) -> None:
        """End a job that asked for JSON: as failed, if its texts do not follow the schema."""
        try:
            failure = await self._failure(attempt)
        except Exception:  # the job must end, whatever is wrong with its answer or with the check
            log.exception("an answer could not be checked", extra={"job": attempt.job.id})
            failure = unchecked()
        if self._attempts.get(attempt.job.id) is not attempt:
            return  # handed back: its next worker checks it again
        if failure is not None:
            attempt.stop(JobState.FAILED, failure)
        self._end(attempt)
        self._writers[attempt.partition].send()

    async def _failure(self, attempt: Attempt) -> Failure | None:
        """Why the complete texts of a job do not follow its schema."""
        texts = await asyncio.to_thread(attempt.complete_texts)
        if isinstance(texts, Failure):
            return texts
        if not texts:
            return None
        return await self._checker.failure(attempt.job.sampling.json_schema or {}, texts)

    def _end(self, attempt: Attempt) -> None:
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        end = attempt.terminal(self.lease.id, attempt.stamps.generated(self._clock, attempt.partition))
        self._recorder.ended(attempt, end)
        finish = Finish(end, attempt.number, not attempt.job.stream)
        self._writers[attempt.partition].finish(finish)

    def _on_written(self, finishes: Sequence[Finish]) -> None:
        for finish in finishes:
            held = self._attempts.get(finish.terminal.job)
            if held is not None and held.number == finish.number:
                del self._attempts[finish.terminal.job]
        if finishes:
            self._room.set()

    def _oldest_frame(self, partition: int) -> int:
        """The first frame that a held job may still need from the log, or one that was handed back with its tokens."""
        oldest = self.lease.next_frame(partition)
        for attempt in chain(self._handed_back, self._attempts.values()):
            if attempt.partition == partition:
                oldest = min(oldest, attempt.first_frame)
                if not attempt.is_checkpointed:
                    break  # they were claimed one after the other: no later one needs more
        return oldest

    def _checkpoint(self, partition: int) -> None:
        """Log the deltas of long jobs anew, so that they do not keep the whole log of the partition."""
        writer, now = self._writers[partition], self.lease.next_frame(partition)
        for attempt in self._attempts.values():
            if attempt.partition != partition or attempt.checkpointing or attempt.over:
                continue
            if is_due(now - attempt.first_frame, attempt.seq, self._settings.checkpoint_frames):
                attempt.checkpointing = True
                written = partial(self._on_checkpoint, attempt)
                writer.checkpoint(Checkpoint(attempt.job.id, attempt.opening, attempt.number, attempt.own, written))
        writer.send()

    @staticmethod
    def _on_checkpoint(attempt: Attempt, frame: int) -> None:
        attempt.first_frame, attempt.checkpointing = frame, False

    def _everything(self, partition: int) -> StepWrite:
        """Every delta of every job held: what a log that lost frames needs to be whole again."""
        everything = StepWrite()
        rows, openings = everything.rows[SILENT], everything.openings[SILENT]
        for attempt in self._attempts.values():
            if attempt.partition == partition:
                openings[attempt.number] = attempt.opening
                if copies := attempt.copies:
                    openings[-attempt.number] = copies
                rows += attempt.logged()
        return everything

    # --- being told --------------------------------------------------------------------------------------------------

    async def _control_loop(self) -> None:
        while True:
            try:
                async for control in self.lease.controls():
                    self._obey(control)
            except Unavailable as error:
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
                else:
                    self._claimer.note_follow(job_id, address)
            case Cordon(reason):
                self._on_cordon(reason)
            case Hold(for_ms):
                self._claimer.hold(for_ms)

    def _cancel(self, job_id: str) -> None:
        attempt = self._attempts.get(job_id)
        if attempt is None:
            self._claimer.note_cancel(job_id)
        elif not attempt.over or attempt.is_checked:
            self._recorder.cancelled(job_id)
            self._stop(attempt, JobState.CANCELLED, CANCELLED)

    def _expire(self, attempt: Attempt) -> None:
        self._stop(attempt, JobState.EXPIRED, EXPIRED)

    def _stop(self, attempt: Attempt, state: JobState, failure: Failure) -> None:
        """End a job before its time: once the engine has stopped, or at once if only its check is waited for."""
        attempt.stop(state, failure)
        if attempt.is_checked and attempt.check is not None:
            attempt.check.cancel()
            self._end(attempt)
            self._writers[attempt.partition].send()
        else:
            self._stop_engine(attempt)

    def _stop_engine(self, attempt: Attempt) -> None:
        for request_id in attempt.live_ids():
            self._engine.cancel(request_id)

    def _let_go(self, attempt: Attempt) -> None:
        """Stop it, and take nothing more of it."""
        attempt.start_no_more()
        self._partial.pop(attempt.job.id, None)
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
            if self._engine_dead is not None:
                raise self._engine_dead
            health = self._engine.health()
            if not health.ok:
                raise EngineDead(health.reason)

    async def _listener_loop(self) -> None:
        """Send no more to addresses that nobody listens at."""
        listeners = Listeners()
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if addresses := in_use((attempt.addresses for attempt in self._attempts.values()), SILENT):
                try:
                    for address in listeners.given_up(await self._wire.listeners(addresses)):
                        await self._unfollow(address)
                except Unavailable as error:
                    log.debug("who listens cannot be asked: %s", error)

    async def _unfollow(self, address: str) -> None:
        held = [attempt for attempt in self._attempts.values() if address in attempt.addresses]
        log.info("nobody listens at %s any more: %d jobs send nothing more there", address, len(held))
        for partition in self._wire.partitions:
            if there := [attempt for attempt in held if attempt.partition == partition]:
                for attempt in there:  # before it is written: whoever follows after that is told to us
                    attempt.unfollow(address)
                try:
                    await self.lease.unfollow(partition, address, [attempt.job.id for attempt in there])
                except Fenced:
                    self.lose(partition)
                except Unavailable:
                    for attempt in there:
                        attempt.follow(address)
                    raise

    async def _beat_loop(self, partition: int) -> None:
        """Renew the lease, and hear of what was lost on the wire."""
        strays: set[tuple[str, int]] = set()
        taken: set[tuple[str, int]] = set()
        while True:
            await asyncio.sleep(self._wire.settings.lease_ms / 3000)
            try:
                held = await self.lease.beat(partition)
                strays = await self._hand_back_strays(partition, strays, held)
            except Unavailable as error:
                log.warning("the lease in partition %d could not be renewed, trying again: %s", partition, error)
                continue
            taken = self._drop_taken(partition, taken, held)
            self._checkpoint(partition)
            for job_id, job in held.items():
                if job.cancelled:
                    self._cancel(job_id)

    async def _hand_back_strays(
        self, partition: int, before: set[tuple[str, int]], held: Mapping[str, HeldJob]
    ) -> set[tuple[str, int]]:
        """A claim whose answer was lost leaves jobs the server counts as ours and we know nothing of: hand back those
        seen so twice while no claim was under way, which may only be slow. Returns those seen now, with their runs."""
        if self._claimer.may_bring(partition):
            return set()
        strays = {(job_id, job.number) for job_id, job in held.items() if not self._holds(job_id, job.number)}
        for job_id, number in strays & before:
            log.warning("handing back a job whose claim was never answered", extra={"job": job_id})
            await self.lease.release(job_id, number)
        return strays - before

    def _holds(self, job_id: str, number: int) -> bool:
        attempt = self._attempts.get(job_id)
        return attempt is not None and attempt.number == number

    def _drop_taken(
        self, partition: int, before: set[tuple[str, int]], held: Mapping[str, HeldJob]
    ) -> set[tuple[str, int]]:
        """Jobs of ours that the server, twice running, does not count as ours (it has lost the claim): stop them."""
        ours = [attempt for attempt in self._attempts.values() if attempt.partition == partition]
        kept = {(job_id, job.number) for job_id, job in held.items()}
        lost = [attempt for attempt in ours if (attempt.job.id, attempt.number) not in kept and not attempt.over]
        taken = {(attempt.job.id, attempt.number) for attempt in lost}
        for job_id, _ in taken & before:
            self._drop(job_id, "the store no longer counts it as this worker's")
        return taken - before

    def _drop(self, job_id: str, why: str) -> None:
        """Let go of a job, if it is held, without a word to the store."""
        attempt = self._attempts.pop(job_id, None)
        if attempt is not None:
            log.warning("dropping a run of a job: %s", why, extra={"job": job_id})
            if attempt.deadline is not None:
                attempt.deadline.cancel()
            self._let_go(attempt)
            self._recorder.released(job_id)

    # --- going -------------------------------------------------------------------------------------------------------

    async def _drain_after(self, stop: asyncio.Event, claiming: asyncio.Task[None]) -> None:
        """Take nothing more, let what runs finish within the grace time, hand back the rest, give up the lease."""
        await _first(stop, self._losing)
        self._claimer.end()
        if self._has_leases:
            await claiming  # what it is claiming now is still ours
        log.info("draining: %d jobs to finish within %.0f s", self.running, self._settings.drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                while self._attempts and self._has_leases:
                    self._room.clear()
                    await self._room.wait()
        if self._has_leases:
            await self._hand_back()
            self._leaving = True
            await self._leave()
        if self._lost:
            raise Fenced(f"the lease of this worker was taken from it in partitions {sorted(self._lost)}")

    async def _leave(self) -> None:
        try:
            while held := await self.lease.leave():
                log.warning("still holding %d jobs that ended while leaving; looking again", held)
                await asyncio.sleep(0.05)
        except Unavailable as error:
            log.warning("the lease is left to lapse: %s", error)

    async def _hand_back(self) -> None:
        self._handed_back, self._attempts = list(self._attempts.values()), {}
        for attempt in self._handed_back:
            self._let_go(attempt)
        for partition, writer in zip(self._wire.partitions, self._writers, strict=True):
            if partition not in self._lost:
                await writer.flushed()
        for attempt in self._handed_back:
            try:
                await self.lease.release(attempt.job.id, attempt.number)
            except Fenced:
                self.lose(attempt.partition)  # others have it already
            except Unavailable as error:
                log.warning("a job is left to lapse with its lease: %s", error, extra={"job": attempt.job.id})
            self._recorder.released(attempt.job.id)
        if self._handed_back:
            log.info("handed back %d unfinished jobs", len(self._handed_back))


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of these happens."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


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
