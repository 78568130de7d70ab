"""Worker: runs claimed jobs in the engine, writes their tokens, and ends each job exactly once.

The claimer claims jobs, the engine batches them, and the writer writes to Redis under the worker's lease. In a drain
the worker claims nothing more, finishes what it can, hands back the rest, and gives up its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from penstock.content import Hit, TenantRules, note
from penstock.engine import RETURNED, Engine, EngineDead, Failure, ModelCard, Piece
from penstock.loops import ExpectedErrors, retry_until, run_periodically, spawn, wait_any
from streaming.errors import Fenced, Unavailable
from streaming.fleet.settings import NO_TARGETS, LaneTargets
from streaming.ids import partition_of
from streaming.jobs.codec import AddAddress, Cancel, Control, Cordon, Hold, Terminal, Wake
from streaming.jobs.history import History
from streaming.jobs.job import JobState, unsupported, without_passed
from streaming.jobs.lease import HANDED_BACK, Claim, Finish, Lease, UnreadableClaim
from streaming.jobs.media import MediaStore
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.jobs.settings import NO_WEIGHTS
from streaming.order import Priority
from streaming.redis.client import RedisClient
from streaming.redis.clock import Clock
from workers.attempt import CANCELLED, EXPIRED, Attempt
from workers.checker import Checker
from workers.choices import ChoiceStarter
from workers.claimer import Claimer
from workers.engines.constraint import unchecked
from workers.held_jobs import BeatComparison, HeldJobs
from workers.output_filter import OutputFilter
from workers.preemption import Preemption
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.writer import StepWrite, Writer

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 1.0
REGISTER_RETRY_DELAY_S = 0.25


class Worker:
    """One process's worker of one model. `run` returns after a drain; it raises Fenced or EngineDead when the process
    must end at once (others take its jobs)."""

    def __init__(
        self,
        client: RedisClient,
        engine: Engine,
        card: ModelCard,
        settings: WorkerSettings,
        recorder: Recorder,
        on_cordon: Callable[[str], None] = lambda _: None,
        name: str = "",
        targets: LaneTargets = NO_TARGETS,
        weights: Mapping[str, float] = NO_WEIGHTS,
        content: TenantRules | None = None,
    ) -> None:
        """`name`: of this process in `penstock ps`; `targets`: latencies that its lanes keep; `weights`: of tenants;
        `content`: rules of answers."""
        self.lease = Lease(client, card.name, name)
        self._client, self._card = client, card
        self._settings, self._recorder, self._content = settings, recorder, content
        self._clock = Clock(client)
        self._held = HeldJobs(self.lease)
        self._attempts = self._held.attempts
        on_stopped = self._end_if_over_and_send
        self._starter = ChoiceStarter(
            engine, card, settings, recorder, on_stopped=on_stopped, targets=targets, weights=weights
        )
        self._choices, self._partial = self._starter.running, self._starter.waiting
        """The same dicts as in the starter, because `on_step` reads them for every piece."""
        self._writers = [Writer(self.lease, partition, self._held, self._on_written) for partition in client.partitions]
        self._checker = Checker()
        self._checks: set[asyncio.Task[None]] = set()
        """The checks of answers and schemas that are under way."""
        self._reader = JobReader(client)
        self._preemption = Preemption(self.lease, self._held, self._starter, recorder, card.capabilities, self.lose)
        self._claimer = Claimer(
            self.lease,
            self._reader,
            MediaStore(client),
            settings,
            self._starter,
            self._held,
            self._preemption,
            begin=self.begin,
            refuse=self.refuse,
            on_fenced=self.lose,
        )
        self._on_cordon = on_cordon
        self._leaving = False
        self._lost: set[int] = set()
        """Partitions where the lease was taken."""
        self._losing = asyncio.Event()
        self._claimed_all = asyncio.Event()
        """Set in a drain, once all claimed jobs are begun."""

    @property
    def running(self) -> int:
        """Jobs held now, without those that the store is putting back."""
        return len(self._attempts)

    @property
    def reserved(self) -> int:
        """Slots that lane batch may not fill."""
        return self._starter.reserved

    @property
    def generating(self) -> bool:
        """Whether the engine runs any choice."""
        return bool(self._choices)

    def die(self, error: EngineDead) -> None:
        """Have `run` raise this error with the next check of the engine."""
        self._starter.dead = error

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then drain. Raises Fenced, EngineDead."""
        if not await self._registered(stop):
            return
        on_end, tracing = self._recorder.ended_by_script, self._recorder.tracing
        reaper = Reaper(self._client, self._recorder.metrics, salvager=self._reader, on_end=on_end, tracing=tracing)
        sweeping = reaper.keep_sweeping(SWEEP_INTERVAL_S)
        interval_s = self._client.settings.lease_ms / 3000
        checking = run_periodically(
            self._starter.check_engine, interval_s, ExpectedErrors((), log.error), wait_first=True
        )
        loops = [self._drain(stop), self._keep_claiming(), self._keep_listening(), checking, sweeping]
        loops += [self._clock.keep(), self._starter.keep_reporting()]
        for partition, writer in zip(self._client.partitions, self._writers, strict=True):
            loops += [self._unless_fenced(partition, loop) for loop in (writer.run(), self._keep_beating(partition))]
        tasks = {asyncio.create_task(loop) for loop in loops}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            others = self._checks | self._preemption.tasks
            for task in tasks | others:
                task.cancel()
            await asyncio.gather(*tasks, *others, return_exceptions=True)
            await self._checker.stop()

    async def _keep_claiming(self) -> None:
        await self._claimer.run(self._client.partitions)
        self._claimed_all.set()
        await asyncio.get_running_loop().create_future()  # `run` ends with the first task that ends

    async def _unless_fenced(self, partition: int, loop: Coroutine[Any, Any, None]) -> None:
        """Run one loop of a partition. If its lease is lost, the loop ends, and the worker drains the others."""
        try:
            await loop
        except Fenced:
            self.lose(partition)
            await asyncio.get_running_loop().create_future()

    async def _registered(self, stop: asyncio.Event) -> bool:
        """Take the lease, and retry while the store is unavailable, because loading the model again would take longer.
        Returns False if `stop` is set first."""

        async def register() -> None:
            await self._clock.renew()
            await self.lease.register()  # last: nothing renews the lease before `run` continues

        expected = ExpectedErrors(Unavailable, log.warning, "the worker cannot register, trying again: %s")
        return await retry_until(stop, register, expected, REGISTER_RETRY_DELAY_S)

    # --- beginning ---------------------------------------------------------------------------------------------------

    def begin(self, claim: Claim, history: History, refusal: Failure | None = None) -> None:
        """Hand one claimed job to the engine, with what earlier attempts generated; or end it with its `refusal`."""
        if claim.partition in self._lost:  # since the claim
            return
        job, can = claim.job, self._card.capabilities
        self._drop(job.id, "the store has given it to this worker once more")
        failure = refusal or unsupported(job, self._card)
        if not can.passes_fields and (job := without_passed(job)) is not claim.job:
            claim = replace(claim, job=job)
        attempt = self._attempts[job.id] = Attempt(claim, history)
        if self._content is not None and job.task is None and (rules := self._content(job.tenant)) is not None:
            attempt.filters = [OutputFilter(rules, shown) for shown in attempt.answers()[0]]
        if failure is not None:
            attempt.stop(JobState.FAILED, failure)
        for control in self._claimer.early(job.id):
            if isinstance(control, AddAddress):
                attempt.add_address(control.address)
            else:
                attempt.stop(JobState.CANCELLED, CANCELLED, control.by)
        self._recorder.claimed(attempt, self._now_us(attempt.partition))
        if not attempt.stopped:
            self._starter.submit(attempt)
            if attempt.waits and job.priority is Priority.INTERACTIVE and job.task is None:
                self._preemption.make_way(attempt)
            if claim.deadline_ms is not None:
                delay_s = max(0, claim.deadline_ms - claim.claimed_ms) / 1000
                late = partial(self._stop, attempt, JobState.EXPIRED, EXPIRED)
                attempt.deadline = asyncio.get_running_loop().call_later(delay_s, late)
            if attempt.constrained:
                spawn(self._refuse_unusable(attempt), self._checks)
        if attempt.over or attempt.stopped:
            self._end_if_over_and_send(attempt)

    def refuse(self, broken: UnreadableClaim) -> None:
        """End a claimed job whose record is unreadable."""
        log.error("job %s cannot be read and fails: %s", broken.id, broken.problem)
        failure = Failure("malformed_job", "The stored job could not be read by this version.", 500)
        end = Terminal(broken.id, JobState.FAILED, 0, failure=failure, worker=self.lease.id)
        self._recorder.unreadable(end, self._now_us(partition_of(broken.id) or 0))
        finish = Finish(end, broken.run_number, True, dead=f"unreadable: {broken.problem}")
        writer = self._writers[partition_of(broken.id) or 0]
        writer.finish(finish)
        writer.send()

    # --- what the engine gives ---------------------------------------------------------------------------------------

    def on_step(self, pieces: Sequence[Piece]) -> None:
        """The engine calls this with all pieces of a step. The loop's body runs once per token."""
        now = time.monotonic()
        choices, writers = self._choices, self._writers
        freed = False
        for piece in pieces:
            choice = choices.get(piece.id)
            if choice is None:  # handed back or preempted: its next worker continues it
                if piece.last:
                    freed = True
                    if self._starter.is_full:
                        self._starter.look.set()
                continue
            attempt, index = choice
            finish = piece.finish
            if finish and finish == RETURNED and self._preemption.hand_back(attempt):
                freed = True
                continue
            try:
                piece = self._filtered(attempt, index, piece) if attempt.filters else piece  # noqa: PLW2901
                finish = piece.finish
                delta = attempt.take(index, piece, now)
            except Exception as error:  # noqa: BLE001 - boundary: whatever the engine gave fails its own job, no other
                delta, piece = None, self._fail_unusable(attempt, index, piece, error)  # noqa: PLW2901
            if delta is not None:
                if attempt.unnamed:
                    self._name(attempt, now)
                step = writers[attempt.partition].step
                step.tokens[attempt.servers.get(index, "") if attempt.servers else ""] += piece.n
                rows = step.rows
                for address in attempt.addresses:
                    rows[address].append(delta)
            if finish or piece.failure is not None:
                self._starter.end(attempt, index, piece)
                self._end_if_over(attempt)
                freed = True
                if self._starter.is_full and not attempt.over:
                    self._starter.look.set()  # where a job ends, this is done once that is written
        if self._partial and (freed or self._starter.is_due(now)):
            self._starter.refill()
            self._preemption.retry_preemption(now)
        self._starter.note_step(len(pieces), now)
        self._send_all()

    def _filtered(self, attempt: Attempt, index: int, piece: Piece) -> Piece:
        """A piece as content rules let it pass. The engine stops a text that a rule has ended once this step is
        done."""
        if attempt.stopped:  # nothing more is shown
            return piece
        hits = list[Hit]()
        shown = attempt.filters[index].feed(piece, hits)
        note(hits, self._recorder.metrics.content_matches, attempt.job.id, attempt.filters[index].rules)
        if shown.last and not piece.last:
            asyncio.get_running_loop().call_soon(self._starter.cancel, piece.id)
        return shown

    def _fail_unusable(self, attempt: Attempt, index: int, piece: Piece, error: Exception) -> Piece:
        emptied = attempt.fail_unusable(index, piece, error)
        if not piece.last:
            self._starter.stop(attempt)
        return emptied

    def _name(self, attempt: Attempt, now: float) -> None:
        """Before the first delta to an address: send the run's opening; if it is the run's first, stamp it with
        `now`."""
        attempt.unnamed, step = False, self._writers[attempt.partition].step
        step.is_whole = step.is_whole or bool(attempt.stamps.first)
        attempt.stamps.first = attempt.stamps.first or now
        if not attempt.opening.at_ms:
            attempt.note_start(self._clock.at(attempt.stamps.first, attempt.partition))
        self._writers[attempt.partition].open(attempt.run_number, attempt.opening, attempt.addresses)

    def _end_if_over(self, attempt: Attempt) -> None:
        if attempt.over:
            if attempt.constrained:
                attempt.check = spawn(self._end_checked(attempt), self._checks)
            else:
                self._end(attempt)
        elif attempt.stopped:  # by the failure of one of its texts
            self._starter.stop(attempt)

    def _end_if_over_and_send(self, attempt: Attempt) -> None:
        self._end_if_over(attempt)
        self._writers[attempt.partition].send()

    def _send_all(self) -> None:
        for writer in self._writers:
            writer.send()

    def _end(self, attempt: Attempt) -> None:
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        writer = self._writers[attempt.partition]
        try:
            end = attempt.terminal(self.lease.id, attempt.stamps.generated(self._clock, attempt.partition))
            writer.finish(attempt.finish(end))
        except Exception as error:  # noqa: BLE001 - boundary: an end that cannot be stored would stop all later ones
            end = attempt.failed_terminal(self.lease.id, error)
            writer.finish(attempt.finish(end))
        self._recorder.ended(attempt, end)

    def _now_us(self, partition: int) -> int:
        return self._clock.at(time.monotonic(), partition)

    def _on_written(self, step: StepWrite, refused: Sequence[Finish]) -> None:
        self._recorder.logged(step)
        ended = list[tuple[Attempt, Terminal]]()
        for finish in step.finishes:
            held = self._attempts.get(finish.terminal.job)
            if held is not None and held.run_number == finish.run_number:
                del self._attempts[finish.terminal.job]
                if finish in refused:  # others had ended it
                    self._recorder.lost(finish.terminal.job)
                else:
                    ended.append((held, finish.terminal))
        if ended:
            self._recorder.written(ended, self._now_us(ended[0][0].partition), self.lease.name)
        if step.finishes:
            self._starter.look.set()

    # --- checks of answers -------------------------------------------------------------------------------------------

    async def _refuse_unusable(self, attempt: Attempt) -> None:
        """End a job with a schema by which no answer can be judged while it waits at the gate or generates."""
        failure = await self._checker.schema_failure(attempt)
        if failure is not None and not attempt.over and self._attempts.get(attempt.job.id) is attempt:
            self._stop(attempt, JobState.FAILED, failure)

    async def _end_checked(self, attempt: Attempt) -> None:
        """End a job that asked for JSON: as failed, if its texts do not follow the schema."""
        try:
            failure = await self._checker.answer_failure(attempt)
        except Exception:  # the job must end, whatever is wrong with its answer or with the check
            log.exception("an answer could not be checked", extra={"job": attempt.job.id})
            failure = unchecked()
        if self._attempts.get(attempt.job.id) is not attempt:
            return  # handed back: its next worker checks it again
        if failure is not None:
            attempt.stop(JobState.FAILED, failure)
        self._end(attempt)
        self._send_all()

    # --- what the store and others say -------------------------------------------------------------------------------

    async def _keep_beating(self, partition: int) -> None:
        """Renew the lease, and hear of what pub/sub lost."""
        comparison = BeatComparison(self._held, partition)

        async def beat() -> None:
            counted = await self.lease.beat(partition)
            for job_id, run_number in comparison.strays(counted, may_claim=self._claimer.may_bring(partition)):
                log.warning("handing back a job whose claim was never answered", extra={"job": job_id})
                await self.lease.release(job_id, run_number)
            for job_id, _ in comparison.taken(counted):
                self._drop(job_id, "the store no longer counts it as this worker's")
            self._writers[partition].checkpoint(self._settings.checkpoint_frames)
            for job_id, job in counted.items():
                if job.cancelled:
                    self._cancel(job_id, job.cancelled_by)

        expected = ExpectedErrors(
            Unavailable, log.warning, f"the lease in partition {partition} could not be renewed, trying again: %s"
        )
        await run_periodically(beat, self._client.settings.lease_ms / 3000, expected, wait_first=True)

    async def _keep_listening(self) -> None:
        """Obey messages until cancelled; subscribe again after an interruption, which may lose some: then polling finds
        the jobs, the heartbeat finds the cancels, and readers poll the log."""

        async def listen() -> None:
            async for control in self.lease.controls():
                self._obey(control)

        expected = ExpectedErrors(Unavailable, log.warning, "control channel interrupted, subscribing again: %s")
        await run_periodically(listen, self._settings.poll_ms / 1000, expected)

    def _obey(self, control: Control) -> None:
        match control:
            case Wake():
                self._starter.look.set()
            case Cancel(job_id, by):
                self._cancel(job_id, by)
            case AddAddress(job_id, address):
                if attempt := self._attempts.get(job_id):
                    attempt.add_address(address)
                else:
                    self._claimer.note(control)
            case Cordon(reason):
                self._on_cordon(reason)
            case Hold(for_ms):
                self._claimer.hold(for_ms)

    # --- ending early ------------------------------------------------------------------------------------------------

    def _cancel(self, job_id: str, by: str) -> None:
        attempt = self._attempts.get(job_id)
        if attempt is None:
            self._claimer.note(Cancel(job_id, by))
        elif not attempt.over or attempt.is_checked:
            attempt.stamps.cancelled = attempt.stamps.cancelled or time.monotonic()
            self._stop(attempt, JobState.CANCELLED, CANCELLED, by)

    def _stop(self, attempt: Attempt, state: JobState, failure: Failure, by: str = "") -> None:
        """End a job early: when the engine has stopped; at once if it waits at the gate, or is being checked."""
        ran = not attempt.over
        attempt.stop(state, failure, by)
        ends = ran and attempt.over  # the engine has none of its choices
        if attempt.is_checked and attempt.check is not None:
            attempt.check.cancel()
            ends = True
        else:
            self._starter.stop(attempt)  # an engine may send the last pieces within `cancel`
        if ends:
            self._end_if_over_and_send(attempt)

    def _drop(self, job_id: str, why: str) -> None:
        """Drop a job, if it is held, without any write to the store."""
        if job_id in self._attempts:
            log.warning("dropping a run of a job: %s", why, extra={"job": job_id})
            self._let_go(job_id)

    def _let_go(self, job_id: str) -> None:
        self._starter.let_go(self._attempts.pop(job_id), goes_on=True)
        self._recorder.lost(job_id)

    # --- the end of the worker, or of its lease in one partition -----------------------------------------------------

    def lose(self, partition: int) -> None:
        """The lease of a partition was taken: others run its jobs. What is held elsewhere is drained, not abandoned."""
        if self._leaving or partition in self._lost:  # leaving: a heartbeat met the lease that was just given up
            return
        self._lost.add(partition)
        for attempt in self._held.of(partition):
            self._let_go(attempt.job.id)
        self._losing.set()
        self._starter.look.set()
        if self._has_leases:
            self._on_cordon(f"its lease in partition {partition} was taken")

    @property
    def _has_leases(self) -> bool:
        return not self._lost.issuperset(self._client.partitions)

    async def _drain(self, stop: asyncio.Event) -> None:
        """Take nothing more, let what runs finish within the grace time, hand back the rest, give up the lease. Raises
        Fenced if the lease of a partition was taken."""
        await wait_any(stop, self._losing)
        self._claimer.end()
        if self._has_leases:
            await self._claimed_all.wait()  # what it is claiming now is still ours
        log.info("draining: %d jobs to finish within %.0f s", len(self._attempts), self._settings.drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                while self._attempts and self._has_leases:
                    self._starter.look.clear()
                    await self._starter.look.wait()
        if self._has_leases and await self._hand_back():
            self._leaving = True
            await self._leave()
        if self._lost:
            raise Fenced(f"the lease of this worker was taken from it in partitions {sorted(self._lost)}")

    async def _hand_back(self) -> bool:
        """Hand back what is unfinished. Returns False if some of it could not be: it lapses with the lease."""
        unfinished = [job_id for job_id, each in self._attempts.items() if not each.over or each.is_checked]
        handed_back = [self._held.park(job_id) for job_id in unfinished]
        for attempt in handed_back:
            self._starter.let_go(attempt, goes_on=True)
        works = []
        for partition, writer in zip(self._client.partitions, self._writers, strict=True):
            if partition not in self._lost:
                parked = [attempt for attempt in handed_back if attempt.partition == partition]
                works.append(self._hand_back_in(partition, writer, parked))
        return all(await asyncio.gather(*works))

    async def _hand_back_in(self, partition: int, writer: Writer, parked: list[Attempt]) -> bool:
        """Hand back the jobs of one partition. Returns False if its store took nothing for a whole lease."""
        lease_s, loop = self._client.settings.lease_ms / 1000, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(lease_s) as limit:
                await writer.flushed()
                # With ends that could not be made.
                parked += [self._held.park(attempt.job.id) for attempt in self._held.of(partition)]
                for attempt in parked:
                    self._recorder.released(attempt.job.id)
                    await self._preemption.put_back(attempt, HANDED_BACK)
                    limit.reschedule(loop.time() + lease_s)
        except TimeoutError:
            log.warning("partition %d did not take back %d jobs: what is left lapses", partition, len(parked))
            return False
        if parked:
            log.info("handed back %d unfinished jobs", len(parked))
        return True

    async def _leave(self) -> None:
        try:
            while held := await self.lease.leave():
                log.warning("still holding %d jobs that ended while leaving; looking again", held)
                await asyncio.sleep(0.05)
        except Unavailable as error:
            log.warning("the lease is left to lapse: %s", error)
