"""Choice scheduler of a worker: decides which choices of its jobs run in the engine, and which start next."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from penstock.engine import ContinuationJudge, Engine, EngineDead, Failure, Leaver, ModelCard, Piece, Refused, Stats
from streaming.jobs.job import Job, prompt_count, unsupported
from streaming.jobs.lease import Claim
from streaming.jobs.places import answer_tokens, prompt_sizes
from streaming.jobs.settings import NO_WEIGHTS
from streaming.order import Priority
from workers.attempt import Attempt
from workers.gatekeeper import Gatekeeper
from workers.settings import WorkerSettings
from workers.slot_shares import SlotShares, reserved_slots, room_for_batch, tenant_slots

log = logging.getLogger(__name__)

PARTIAL_PER_SLOT = 4
"""Jobs with waiting choices per slot; a worker that holds more claims no jobs."""


class ChoiceStarter:
    """Starts one choice of each job at once, and further ones while the engine has room."""

    def __init__(
        self,
        engine: Engine,
        card: ModelCard,
        settings: WorkerSettings,
        gate: Gatekeeper,
        room: asyncio.Event,
        *,
        on_stopped: Callable[[Attempt], None],
        weights: Mapping[str, float] = NO_WEIGHTS,
    ) -> None:
        """
        Args:
            gate: says which choices the engine takes.
            room: set when the claimer should look for jobs.
            on_stopped: called with an attempt whose choice the engine refused after others had started.
            weights: of tenants, for their shares of the slots.
        """
        self._engine, self.card, self._settings, self._room = engine, card, settings, room
        self._on_stopped = on_stopped
        self.gate, self.running = gate, gate.running
        """Running choices, by the engine's request id: the attempt, and the index of the choice."""
        self.batch_texts = 0
        """Number of running choices of lane batch."""
        self._shares = SlotShares(weights)
        self.waiting: dict[str, Attempt] = {}
        """Attempts with choices that wait to start, by job id."""
        self._overtaken = -1
        """Rank of the lowest lane whose job took a place while choices waited; -1: none since a waiting choice started.
        The next place goes to a waiting choice, if its lane is not lower."""
        self._starts = 0
        """Choices started so far."""
        self.claimer_found_no_room = False
        """Whether the claimer found no room when it last looked: it looks again as soon as a slot is free."""
        self._is_offered = False
        """A free place is kept for the claimer until it has looked for jobs."""
        self.dead: EngineDead | None = None
        """Raised by the engine in a callback; the worker's health check passes it on."""

    @property
    def reserved(self) -> int:
        """Slots that lane batch may not fill."""
        return reserved_slots(self.stats().slots, self._settings.reserved_slots)

    @property
    def is_laden(self) -> bool:
        """Whether too many held jobs have waiting choices, so that this worker should claim no more."""
        return len(self.waiting) >= PARTIAL_PER_SLOT * self.stats().slots if self.waiting else False

    @property
    def texts(self) -> int:
        """Number of choices that the engine runs or queues."""
        return len(self.running)

    def room(self) -> int:
        """How many jobs to claim."""
        return self.gate.room(self._held_back(batch=False))

    @property
    def begins(self) -> int:
        """How many jobs of the last `room` would begin at once; the others are prefetched."""
        return max(0, self.gate.begins)

    def kept_places(self) -> tuple[int, Sequence[str]]:
        """How many places are for jobs of any tenant, and the tenants that get none beyond these: the last slots are
        kept for others."""
        slots = self.stats().slots
        kept = tenant_slots(slots, self._settings.tenant_slots)
        crowding = self._shares.crowding(slots, time.monotonic()) if kept else ()
        return max(0, slots - kept - self.texts), crowding

    def chat_room(self) -> int:
        """How many jobs of lane interactive to claim while a job of lane standard waits at the gate.

        They may overtake it until all that ran when it began to wait has ended: without them it would have begun by
        then. Afterwards none is claimed until it begins.
        """
        held = [each for each in self.waiting.values() if not each.last_start]
        standard = [each for each in held if each.job.priority is Priority.STANDARD]
        if not standard or any(each.job.priority is Priority.INTERACTIVE for each in held):
            return 0
        if any(each.ahead.isdisjoint(self.running) for each in standard):
            return 0
        return self.gate.chat_room()

    def batch_room(self) -> int | None:
        """How many jobs of lane batch to claim at most; None: any number."""
        free = room_for_batch(self.stats().slots, self.reserved, self.batch_texts)
        return self.gate.batch_room(free, self._held_back(batch=True))

    def _held_back(self, *, batch: bool) -> int:
        """Jobs of lane batch, or of the others, that wait at the gate with their first choice."""
        held = self.waiting.values()
        return sum([not each.last_start and (each.job.priority is Priority.BATCH) is batch for each in held])

    def stats(self) -> Stats:
        """Statistics of the engine."""
        return self._engine.stats()

    def engine_restart_reason(self, attempt: Attempt) -> str:
        """Why the engine cannot continue one of the choices, so that the job begins again; "" if it can. `attempt` is
        asked only this."""
        if not isinstance(self._engine, ContinuationJudge):
            return ""
        requests = [request for request in attempt.requests().values() if request.past]
        return next((reason for request in requests if (reason := self._engine.restart_reason(request))), "")

    async def refusal(self, claim: Claim) -> Failure | None:
        """Why the engine can never run a job of several prompts, or None. Raises EngineDead."""
        job = claim.job
        if prompt_count(job.prompt) == 1 or unsupported(job, self.card.capabilities):
            return None
        for index, request in Attempt(claim).requests().items():
            if index % job.sampling.n:
                continue  # another copy of the same prompt
            try:
                await self._engine.check(request)
            except Refused as refused:
                return refused.failure
            await asyncio.sleep(0)  # a check may take a while: running jobs get their step
        return None

    async def check_engine(self) -> None:
        """Raises EngineDead if the engine does not live."""
        if self.dead is not None:
            raise self.dead
        health = self._engine.health()
        if not health.ok:
            if health.error is not None:
                log.error("the engine has failed", exc_info=health.error)
            raise EngineDead(health.reason)

    def submit(self, attempt: Attempt) -> None:
        """Start the first choice if the gate lets it through. The others are started once all jobs of this claim have
        their first one."""
        attempt.queue_choices()
        if attempt.waits and self._has_turn(attempt) and self._passes(attempt):
            self._start(attempt)
            if self.waiting:
                self._note_overtaking(attempt.job.priority)
        if attempt.waits:
            attempt.share, attempt.ahead = self._share(attempt.job), frozenset(self.running)
            self.waiting[attempt.job.id] = attempt
            asyncio.get_running_loop().call_soon(self.start_waiting)

    def _has_turn(self, attempt: Attempt) -> bool:
        """Whether no job of its lane, or of a higher one, waits at the gate. A job that the engine is to refuse waits
        for no other."""
        if not self.waiting:
            return True
        rank = attempt.job.priority.rank
        if all(each.last_start or each.job.priority.rank > rank for each in self.waiting.values()):
            return True
        return self.gate.never_fits(attempt, attempt.next_choice[0])

    def would_start(self, attempt: Attempt, without: Collection[str]) -> bool:
        """Whether a job of the highest lane that waits at the gate would begin, behind those of its lane that wait
        longer, if the engine no longer ran the jobs `without`."""
        lane = attempt.job.priority
        ahead = [each for each in self.waiting.values() if each.job.priority is lane and not each.last_start]
        choices = [(each, each.next_choice[0]) for each in ahead[: ahead.index(attempt) + 1]]
        gone = {request_id for request_id, (each, _) in self.running.items() if each.job.id in without}
        return self.gate.would_admit(choices, gone)

    def _passes(self, attempt: Attempt) -> bool:
        index, request = attempt.next_choice
        return self.gate.admits(attempt, index, request.id)

    def _start(self, attempt: Attempt) -> None:
        """Give the engine the next choice. If the engine refuses it, the job fails. Raises EngineDead."""
        index, request = attempt.start_next()
        try:
            self._engine.submit(request)
        except Refused as refused:
            self.gate.forget(attempt.job.id, request.id)
            attempt.refuse(index, refused.failure)
            return
        self._starts += 1
        attempt.last_start = self._starts
        self.running[request.id] = (attempt, index)
        self.batch_texts += attempt.job.priority is Priority.BATCH
        self._shares.begin(attempt.job.tenant)

    def _share(self, job: Job) -> int:
        """How many choices of a job the engine may have at a time, so that other jobs find room: at most half of its
        slots, by estimated size at most half of its KV cache, and at least one."""
        stats = self.stats()
        share = stats.slots // 2
        if stats.kv_tokens:
            size = max(prompt_sizes(job.prompt, job.tools)) + answer_tokens(job.sampling.max_tokens, self.card)
            share = min(share, stats.kv_tokens // 2 // max(1, min(size, self.card.context)))
        return max(1, share)

    def _note_overtaking(self, lane: Priority) -> None:
        """Record that a new job took a place while choices wait, if it took the last slot or a place beyond the
        slots."""
        slots = self.stats().slots
        if self.texts > slots or (self.texts == slots and not self._settings.prefetch):
            self._overtaken = max(self._overtaken, lane.rank)

    def start_waiting(self) -> None:
        """Start waiting choices while there is room: first for jobs that have none running, by lane and time since the
        last start, so that every job makes progress; then by lane, and in a lane the oldest job. What waits at the
        gate first holds back its lane and the lower ones."""
        blocked = len(Priority)
        waiting = sorted(self.waiting.values(), key=lambda each: each.job.priority.rank)
        slots = self.stats().slots
        try:
            for attempt in sorted(waiting, key=lambda each: (each.job.priority.rank, each.last_start)):
                if not attempt.started and self._may_start(attempt, slots):
                    if not self._passes(attempt):
                        blocked = attempt.job.priority.rank
                        break
                    self._start_next(attempt)
            for attempt in waiting:
                while attempt.job.priority.rank < blocked and self._may_start(attempt, slots) and self._passes(attempt):
                    self._start_next(attempt)
        except EngineDead as error:
            self.dead = error  # the event loop and the engine call this, and must not get the error
            return
        for attempt in waiting:
            if not attempt.waits:
                self.waiting.pop(attempt.job.id, None)
                self._room.set()

    def _start_next(self, attempt: Attempt) -> None:
        """Start the next choice of a waiting job; its first one is stamped as handed over now, not when it was queued.
        Raises EngineDead."""
        self._overtaken = -1
        if not attempt.last_start:
            attempt.stamps.release()
        self._start(attempt)
        if attempt.stopped:
            self._on_stopped(attempt)

    def _may_start(self, attempt: Attempt, slots: int) -> bool:
        """Whether there is room for one more choice of a job: a slot; or, if a job of no higher lane overtook it, a
        place beyond the slots, which are otherwise kept for claims. So on a full worker, waiting choices and new jobs
        of the same lane take turns, and a job of a higher lane gets the next place."""
        if not attempt.waits or attempt.started >= attempt.share:
            return False
        if self.texts >= slots + (self._settings.prefetch if self._is_owed(attempt) else 0):
            return False
        if attempt.started:
            shared, crowding = self.kept_places()
            if not shared and attempt.job.tenant in crowding:
                return False
        return attempt.job.priority is not Priority.BATCH or self.batch_texts < slots - self.reserved

    def _is_owed(self, attempt: Attempt) -> bool:
        return attempt.job.priority.rank <= self._overtaken

    def refill(self) -> None:
        """Called when a choice has ended: a waiting choice takes its place. If no place is kept for claims and the
        claimer found no room last time, the claimer looks first; on a full worker, every second time."""
        owed = any(self._is_owed(attempt) for attempt in self.waiting.values())
        if self.claimer_found_no_room and not self._settings.prefetch and not owed:
            self._is_offered = True
            self._room.set()
        else:
            self.start_waiting()

    def looked(self) -> None:
        """Called when the claimer has looked for jobs: waiting choices may use a place that it left."""
        if self._is_offered:
            self._is_offered = False
            self.start_waiting()

    def stop(self, attempt: Attempt) -> None:
        """Stop an attempt that starts no more choices; the engine still sends the last pieces of those that run."""
        if not attempt.waits:
            self.waiting.pop(attempt.job.id, None)
            self.gate.forget(attempt.job.id)
        for request_id in attempt.live_ids():
            self._engine.cancel(request_id)

    def end(self, attempt: Attempt, index: int, piece: Piece) -> None:
        """Called with the last piece of a choice."""
        self.gate.note_end(attempt, index, piece)
        self.forget(piece.id)

    def let_go(self, attempt: Attempt, *, goes_on: bool = False) -> None:
        """Stop an attempt, and ignore what the engine still sends for it. `goes_on`: another worker continues it soon,
        or does so already."""
        attempt.start_no_more()
        self.waiting.pop(attempt.job.id, None)
        if goes_on and isinstance(self._engine, Leaver):
            for request_id in attempt.live_ids():
                self._engine.leave(request_id)
        self.stop(attempt)
        for request_id in attempt.live_ids():
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Forget a choice that the engine no longer runs for this worker."""
        attempt, _ = self.running.pop(request_id, (None, 0))
        if attempt is not None:
            self.gate.forget(attempt.job.id, request_id)
            self.batch_texts -= attempt.job.priority is Priority.BATCH
            self._shares.end(attempt.job.tenant, time.monotonic())
