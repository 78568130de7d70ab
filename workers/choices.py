"""Choice scheduler of a worker: decides which choices of its jobs run in the engine, and which start next.

It applies the gate (workers/gate.py) to the engine: it follows the texts that run, says which may begin and how many
jobs may be claimed, and learns how long answers become and how long steps take.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random

from penstock.engine import ContinuationJudge, Engine, EngineDead, Failure, Leaver, ModelCard, Piece, Refused, Stats
from penstock.loops import coalesced
from streaming.fleet.settings import NO_TARGETS, LaneTargets, LatencyTargets
from streaming.jobs.job import Job, Tokens, prompt_count, unsupported
from streaming.jobs.lease import Claim
from streaming.jobs.settings import NO_WEIGHTS
from streaming.jobs.waiting import answer_tokens, prompt_sizes
from streaming.order import Priority
from workers.attempt import Attempt
from workers.engines.checked_engine import FAILED
from workers.gate import Colocation, Gate, GateReason, HeldText, KvCapacity, LengthHistory, Smoothed, never_fits
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.slot_shares import SlotShares, reserved_slots, room_for_batch, tenant_slots

log = logging.getLogger(__name__)

PARTIAL_PER_SLOT = 4
"""Jobs with waiting choices per slot; a worker that holds more claims no jobs."""
MAX_CLAIM = 4
"""Jobs per claim of an engine limited by its KV cache, because their sizes are known only once they are claimed."""
RETRY_INTERVAL_S = 0.02
"""How often a text that waits at the gate is tried again while none ends."""
REPORT_INTERVAL_S = 1.0


class ChoiceStarter:
    """Starts one choice of each job at once, and further ones while the engine has room."""

    def __init__(
        self,
        engine: Engine,
        card: ModelCard,
        settings: WorkerSettings,
        recorder: Recorder,
        *,
        on_stopped: Callable[[Attempt], None],
        targets: LaneTargets = NO_TARGETS,
        weights: Mapping[str, float] = NO_WEIGHTS,
    ) -> None:
        """
        Args:
            on_stopped: called with an attempt whose choice the engine refused after others had started.
            targets: latencies that chats keep; without any, lane batch is limited by the cache alone.
            weights: of tenants, for their shares of the slots.
        """
        self._engine, self.card, self._settings, self._recorder = engine, card, settings, recorder
        self._on_stopped = on_stopped
        self.look = asyncio.Event()
        """Set when the claimer should look for jobs: there may be more room, or more work."""
        self.running: dict[str, tuple[Attempt, int]] = {}
        """Running choices, by the engine's request id: the attempt, and the index of the choice."""
        self.batch_texts = 0
        """Number of running choices of lane batch."""
        self._shares = SlotShares(weights)
        self.waiting: dict[str, Attempt] = {}
        """Attempts with choices that wait to start, by job id."""
        self._overtaken = -1
        """Rank of the lowest lane whose job took a slot while choices waited; -1: none since a waiting choice started.
        The next slot goes to a waiting choice, if its lane is not lower."""
        self._starts = 0
        """Choices started so far."""
        self.is_full = False
        """Whether the claimer found no room when it last looked: it looks again as soon as a slot is free."""
        self._is_offered = False
        """A free slot is kept for the claimer until it has looked for jobs."""
        self.dead: EngineDead | None = None
        """Raised in a callback, of which nobody hears; the worker's health check passes it on."""
        self._limits_cache = settings.gate and engine.stats().kv_tokens > 0
        """Whether the gate looks at the KV cache of this engine."""
        self.gate = Gate(LengthHistory(), Random())  # noqa: S311 - draws, no secrets
        chats = targets.interactive
        self._colocation = Colocation(chats.ttft_ms, chats.itl_ms) if chats != LatencyTargets() else None
        self._prompt, self._limit = Smoothed(), Smoothed()
        """Tokens of prompts, and of the longest answers they allow."""
        self._lane = str(Priority.STANDARD)
        """Of the text that was tried last."""
        self._scale = Smoothed()
        """Counted over estimated tokens of prompts sent as text."""
        self._at_gate: dict[str, tuple[str, HeldText]] = {}
        """By job: the choice that waits, by its request id, and is tried again as it is."""
        self._retry_at = 0.0
        self._ended = 0
        """Texts that have ended since the engine's evictions were judged."""
        self.begins = 0
        """How many jobs of the last `room` would begin at once; the others are prefetched."""

    # --- how many jobs to claim --------------------------------------------------------------------------------------

    @property
    def reserved(self) -> int:
        """Slots that lane batch may not fill."""
        return reserved_slots(self.stats().slots, self._settings.reserved_slots)

    @property
    def texts(self) -> int:
        """Number of choices that the engine runs or queues."""
        return len(self.running)

    def stats(self) -> Stats:
        """Statistics of the engine."""
        return self._engine.stats()

    def room(self) -> int | None:
        """How many jobs the claimer may claim: as many as find a slot, and `prefetch` to be at hand; none while a job
        above lane batch waits at the gate of an engine that is limited by its cache. Before the slots that are kept for
        others no more than find one: whose jobs these are says who gets none of the last. None: none, whatever their
        lane, because the engine takes nothing or too many held jobs have waiting choices."""
        stats, prefetch, self.is_full = self.stats(), self._settings.prefetch, False
        if self.dead is not None or not stats.accepts:
            return None
        if self.waiting and len(self.waiting) >= PARTIAL_PER_SLOT * stats.slots:
            self.is_full = True
            return None
        free = stats.slots - self.texts
        held_back = sum([each.job.priority is not Priority.BATCH for each in self._held_back()])
        if not self._limits_cache:
            self.begins = max(0, free - held_back)
            found = max(0, free - held_back + prefetch)
        else:
            self.begins = 0 if held_back else self._fitting(self._lane, free)
            found = 0 if held_back else min(self.begins + prefetch, MAX_CLAIM)
        if (kept := self._kept_slots()) and kept < free:
            self.begins, found = min(self.begins, free - kept), min(found, free - kept)
        self.is_full = not found
        return found

    def shared_slots(self) -> tuple[int, Sequence[str]]:
        """How many slots are for jobs of any tenant, and the tenants that get none beyond these: the last slots are
        kept for others."""
        slots, kept = self.stats().slots, self._kept_slots()
        crowding = self._shares.crowding(slots, time.monotonic()) if kept else ()
        return max(0, slots - kept - self.texts), crowding

    def loaded_adapters(self) -> Sequence[str]:
        """The adapters that are loaded, or that running texts need."""
        return (*self.stats().adapters, *{attempt.job.adapter for attempt, _ in self.running.values()})

    def _kept_slots(self) -> int:
        """How many slots are kept from tenants above their share; none while there is one tenant."""
        if self._shares.count < 2 or self._shares.tenants(time.monotonic()) < 2:
            return 0
        return tenant_slots(self.stats().slots, self._settings.tenant_slots)

    def chat_room(self) -> int:
        """How many jobs of lane interactive to claim while a job of lane standard waits at the gate: at least one if a
        slot is free, for chats may be smaller than the usual text.

        They may overtake it until all that ran when it began to wait has ended: without them it would have begun by
        then. Afterwards none is claimed until it begins.
        """
        held = self._held_back()
        standard = [each for each in held if each.job.priority is Priority.STANDARD]
        if not standard or any(each.job.priority is Priority.INTERACTIVE for each in held):
            return 0
        free = self.stats().slots - self.texts
        if not self._limits_cache or free <= 0 or any(each.ahead.isdisjoint(self.running) for each in standard):
            return 0
        return max(1, self._fitting(Priority.INTERACTIVE, free))

    def batch_room(self) -> int | None:
        """How many jobs of lane batch to claim at most, none while one waits at the gate; None: any number."""
        if any(each.job.priority is Priority.BATCH for each in self._held_back()):
            return 0
        free = room_for_batch(self.stats().slots, self.reserved, self.batch_texts)
        return 0 if free != 0 and self._harms_chats(round(self._prompt.value)) else free

    def _held_back(self) -> list[Attempt]:
        """Jobs that wait at the gate with their first choice."""
        return [each for each in self.waiting.values() if not each.last_start] if self.waiting else []

    def _fitting(self, lane: str, free: int) -> int:
        """How many texts of the usual size the engine takes now, at most MAX_CLAIM. `free`: slots."""
        self._sync()
        limit = round(self._limit.value) or answer_tokens(None, self.card)
        typical = self.gate.text(lane, "", round(self._prompt.value), limit)
        return self.gate.fitting([typical] * min(free, MAX_CLAIM), self._capacity())

    # --- whether a job can run ---------------------------------------------------------------------------------------

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
        if prompt_count(job.prompt) == 1 or unsupported(job, self.card):
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

    # --- starting choices --------------------------------------------------------------------------------------------

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
        return self._limits_cache and never_fits(self._text(attempt, attempt.next_choice[0]), self._capacity())

    def would_start(self, attempt: Attempt, without: Collection[str]) -> bool:
        """Whether a job of the highest lane that waits at the gate would begin, behind those of its lane that wait
        longer, if the engine no longer ran the jobs `without`."""
        if not self._limits_cache:
            return True
        lane = attempt.job.priority
        ahead = [each for each in self.waiting.values() if each.job.priority is lane and not each.last_start]
        gone = {request_id for request_id, (each, _) in self.running.items() if each.job.id in without}
        self._sync()
        texts = [self._text(each, each.next_choice[0]) for each in ahead[: ahead.index(attempt) + 1]]
        return self.gate.fitting(texts, self._capacity(), gone) == len(texts)

    def _passes(self, attempt: Attempt) -> bool:
        """Decide at the gate whether the next choice of a job begins now; counts one that waits once."""
        job, (index, request) = attempt.job, attempt.next_choice
        if job.task is not None or (not self._limits_cache and self._colocation is None):
            return True  # a task holds no part of the KV cache that other texts need
        self._sync()
        waiting_id, text = self._at_gate.get(job.id, ("", None))
        if text is None or waiting_id != request.id:
            text = self._text(attempt, index)
            self._note(job, text)
        reason: GateReason = self.gate.wait_reason(text, self._capacity()) if self._limits_cache else ""
        if not reason and job.priority is Priority.BATCH:
            reason = self._harms_chats(text.prompt + text.generated)
        if not reason:
            self._at_gate.pop(job.id, None)
            if self._colocation is not None:
                self._colocation.begin(text, self.gate.held.values())
            self.gate.held[request.id] = text
        elif waiting_id != request.id:
            self._at_gate[job.id] = request.id, text
            self._recorder.waits_at_gate(reason)
        return not reason

    def _start(self, attempt: Attempt) -> None:
        """Give the engine the next choice. If it refuses it or fails at it, the job fails. Raises EngineDead."""
        index, request = attempt.start_next()
        try:
            self._engine.submit(request)
        except EngineDead:
            raise
        except Exception as error:
            if not isinstance(error, Refused):  # in a callback of the event loop: the choice would wait for ever
                log.exception("the engine raised at a submit", extra={"job": attempt.job.id})
            self._forget_text(attempt.job.id, request.id)
            attempt.refuse(index, error.failure if isinstance(error, Refused) else FAILED)
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
        """Record that a new job overtook waiting choices: it took the last slot, or is prefetched beyond them."""
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
                self.look.set()

    def _start_next(self, attempt: Attempt) -> None:
        """Start the next choice of a waiting job; its first one is stamped as handed over now, not when it was queued.
        Raises EngineDead."""
        self._overtaken = -1
        if not attempt.last_start:
            attempt.stamps.released = time.monotonic()
        self._start(attempt)
        if attempt.stopped:
            self._on_stopped(attempt)

    def _may_start(self, attempt: Attempt, slots: int) -> bool:
        """Whether there is room for one more choice of a job: a slot; or, if a job of no higher lane overtook it, a
        prefetch beyond the slots, which is otherwise kept for claims. So on a full worker, waiting choices and new jobs
        of the same lane take turns, and a job of a higher lane gets the next slot."""
        if not attempt.waits or attempt.started >= attempt.share:
            return False
        if self.texts >= slots + (self._settings.prefetch if self._is_overtaken(attempt) else 0):
            return False
        if attempt.started:
            shared, crowding = self.shared_slots()
            if not shared and attempt.job.tenant in crowding:
                return False
        return attempt.job.priority is not Priority.BATCH or self.batch_texts < slots - self.reserved

    def _is_overtaken(self, attempt: Attempt) -> bool:
        return attempt.job.priority.rank <= self._overtaken

    def refill(self) -> None:
        """Called when a choice has ended: a waiting choice takes its slot. If no slot is kept for claims and the
        claimer found no room last time, the claimer looks first; on a full worker, every second time."""
        overtaken = any(self._is_overtaken(attempt) for attempt in self.waiting.values())
        if self.is_full and not self._settings.prefetch and not overtaken:
            self._is_offered = True
            self.look.set()
        else:
            self.start_waiting()

    def on_claim_round(self) -> None:
        """Called after each round of claims: waiting choices may use a slot that it left."""
        if self._is_offered:
            self._is_offered = False
            self.start_waiting()

    def cancel(self, request_id: str) -> None:
        """Stop one choice, which has ended for this worker already."""
        self._engine.cancel(request_id)

    def stop(self, attempt: Attempt) -> None:
        """Stop an attempt that starts no more choices; the engine still sends the last pieces of those that run."""
        if not attempt.waits:
            self.waiting.pop(attempt.job.id, None)
            self._forget_text(attempt.job.id)
        for request_id in attempt.live_ids():
            self._engine.cancel(request_id)

    def end(self, attempt: Attempt, index: int, piece: Piece) -> None:
        """Learn from the last piece of a choice: its length, and how long its first token took."""
        if piece.finish in ("stop", "length") and attempt.job.task is None:
            self._ended += 1
            self.gate.history.add(attempt.job.priority, attempt.job.tenant, attempt.generated(index))
        text = self.gate.held.get(piece.id)
        if self._colocation is not None and text is not None and (taken_s := attempt.first_token_s()) is not None:
            self._colocation.note_first(text, max(0, attempt.prompt_tokens(index) - piece.cached_tokens), taken_s)
        self.forget(piece.id)

    def let_go(self, attempt: Attempt, *, goes_on: bool = False) -> None:
        """Stop an attempt, and ignore what the engine still sends for it. `goes_on`: another worker continues it soon,
        or does so already."""
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        attempt.start_no_more()
        for request_id in attempt.live_ids():
            self.forget(request_id)  # first: an engine may send the last piece within `cancel`
            if goes_on and isinstance(self._engine, Leaver):
                self._engine.leave(request_id)
        self.stop(attempt)

    def forget(self, request_id: str) -> None:
        """Forget a choice that the engine no longer runs for this worker."""
        attempt, _ = self.running.pop(request_id, (None, 0))
        if attempt is not None:
            self._forget_text(attempt.job.id, request_id)
            self.batch_texts -= attempt.job.priority is Priority.BATCH
            self._shares.end(attempt.job.tenant, time.monotonic())

    def _forget_text(self, job_id: str, request_id: str = "") -> None:
        """Forget what of a job waits at the gate, and a choice that the engine no longer runs."""
        self._at_gate.pop(job_id, None)
        self.gate.held.pop(request_id, None)

    # --- the gate's view of the engine -------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Whether texts that wait at the gate are to be tried again though none has ended."""
        if not self._at_gate or now < self._retry_at:
            return False
        self._retry_at = now + RETRY_INTERVAL_S
        return True

    def note_step(self, texts: int, now: float) -> None:
        """Learn from a step that gave a token to `texts` texts and ended `now`, in monotonic seconds."""
        if self._colocation is not None and self._colocation.is_due(now):
            self._sync()
            self._colocation.note_step(texts, self.gate.held.values(), now)

    async def keep_reporting(self) -> None:
        """Judge the engine's evictions, and show reserve and predicted peak, for ever."""
        while True:
            await asyncio.sleep(coalesced(REPORT_INTERVAL_S))
            self.gate.reserve.note(self._ended, self.stats().evictions)
            self._ended = 0
            if self._limits_cache:
                self._sync()
                capacity = self._capacity()
                self._recorder.gate(self.gate.peak(capacity), capacity.reserve)

    def _harms_chats(self, tokens: int) -> GateReason:
        """Why a text of lane batch with so many tokens would keep chats from their targets; "" if it would not."""
        if self._colocation is None:
            return ""
        offline = sum([self.running[each][0].job.priority is Priority.BATCH for each in self.gate.held])
        return self._colocation.wait_reason(tokens, self.gate.held.values(), offline)

    def _capacity(self) -> KvCapacity:
        stats = self.stats()
        reserve = self.gate.reserve.share if stats.evicts else 0.0
        return KvCapacity(stats.slots, stats.kv_tokens, stats.kv_pinned, reserve, stats.evicts)

    def _text(self, attempt: Attempt, index: int) -> HeldText:
        job = attempt.job
        prompt = prompt_sizes(job.prompt, job.tools)[index // job.sampling.n]
        if not isinstance(job.prompt, Tokens) and self._scale.value:
            prompt = round(prompt * self._scale.value)
        prompt = max(1, min(prompt, self.card.context + 1))  # one beyond the context: the engine is to refuse it
        limit = max(1, answer_tokens(job.sampling.max_tokens, self.card, prompt))
        return self.gate.text(job.priority, job.tenant, prompt, limit, attempt.generated(index))

    def _note(self, job: Job, text: HeldText) -> None:
        """Learn how large texts are from one that is tried for the first time, unless no engine could run it."""
        if self._limits_cache and never_fits(text, self._capacity()):
            return
        self._prompt.note(text.prompt)
        self._limit.note(text.limit)
        self._lane = job.priority
        if job.priority is Priority.INTERACTIVE and self._colocation is not None:
            self._colocation.note_chat(text.prompt)

    def _sync(self) -> None:
        """Bring the texts of the gate up to what the engine has generated."""
        for request_id, text in self.gate.held.items():
            attempt, index = self.running[request_id]
            text.generated = attempt.generated(index)
            counted = attempt.prompt_tokens(index)
            if counted and counted != text.prompt:
                estimated = prompt_sizes(attempt.job.prompt, attempt.job.tools)[index // attempt.job.sampling.n]
                self._scale.note(counted / max(1, estimated))
                text.prompt = counted
