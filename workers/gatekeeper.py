"""Gatekeeper: applies the gate (workers/gate.py) to one worker's engine, and learns from what the engine does.

It follows the texts that the engine runs, says which may begin and how many jobs may be claimed, and notes how long
answers become and how long steps take.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from random import Random

from penstock.engine import Engine, Failure, ModelCard, Piece
from penstock.loops import coalesced
from streaming.fleet.settings import LaneTargets, LatencyTargets
from streaming.jobs.codec import Terminal
from streaming.jobs.job import Job, JobState, Tokens
from streaming.jobs.places import answer_tokens, prompt_sizes
from streaming.order import Priority
from streaming.redis.clock import Clock
from workers.attempt import Attempt
from workers.gate import (
    Colocation,
    Gate,
    GateReason,
    HeldText,
    KvCapacity,
    LengthHistory,
    Smoothed,
    never_fits,
)
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.writer import Writer

MAX_CLAIM = 4
"""Jobs per claim of an engine limited by its KV cache, because their sizes are known only once they are claimed."""
RETRY_INTERVAL_S = 0.02
"""How often a text that waits at the gate is tried again while none ends."""
REPORT_INTERVAL_S = 1.0


class Gatekeeper:
    """The gate of one worker."""

    def __init__(
        self,
        engine: Engine,
        card: ModelCard,
        settings: WorkerSettings,
        targets: LaneTargets,
        recorder: Recorder,
    ) -> None:
        """`targets`: latencies that chats keep; without any, lane batch is limited by the cache alone."""
        self._engine, self._card, self._settings, self._recorder = engine, card, settings, recorder
        self.running: dict[str, tuple[Attempt, int]] = {}
        """What the engine runs, by its request id: the attempt, and the index of the choice. The caller keeps it."""
        self.limits_cache = settings.gate and engine.stats().kv_tokens > 0
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
        self._waiting: dict[str, tuple[str, HeldText]] = {}
        """By job: the choice that waits, by its request id, and is tried again as it is."""
        self._retry_at = 0.0
        self._ended = 0
        self.begins = 0
        """How many jobs of the last `room` would begin at once."""

    # --- what may begin ----------------------------------------------------------------------------------------------

    def room(self, held_back: int) -> int:
        """How many jobs to claim: as many as find a place, and `prefetch` to be at hand.

        Args:
            held_back: jobs above lane batch that wait at the gate. While there are any, the worker claims none.
        """
        stats, prefetch = self._engine.stats(), self._settings.prefetch
        free = stats.slots - len(self.running)
        if not self.limits_cache:
            self.begins = free - held_back
            return self.begins + prefetch
        self.begins = 0 if held_back else self._fitting(self._lane, free)
        return 0 if held_back else min(self.begins + prefetch, MAX_CLAIM)

    def chat_room(self) -> int:
        """How many jobs of lane interactive to claim while one of a lower lane waits at the gate: at least one if a
        slot is free, for chats may be smaller than the usual text."""
        free = self._engine.stats().slots - len(self.running)
        return max(1, self._fitting(Priority.INTERACTIVE, free)) if self.limits_cache and free > 0 else 0

    def _fitting(self, lane: str, free: int) -> int:
        """How many texts of the usual size the engine takes now, at most MAX_CLAIM. `free`: slots."""
        self._sync()
        limit = round(self._limit.value) or answer_tokens(None, self._card)
        typical = self.gate.text(lane, "", round(self._prompt.value), limit)
        return self.gate.fitting([typical] * min(free, MAX_CLAIM), self._capacity())

    def batch_room(self, slots: int | None, held_back: int) -> int | None:
        """How many jobs of lane batch to claim; None: any number.

        Args:
            slots: how many the slots reserved for higher lanes allow.
            held_back: jobs of lane batch that wait at the gate.
        """
        if held_back:
            return 0
        if self._colocation is None or slots == 0:
            return slots
        reason = self._colocation.wait_reason(round(self._prompt.value), self.gate.held.values(), self._offline())
        return 0 if reason else slots

    def admits(self, attempt: Attempt, index: int, request_id: str) -> bool:
        """Decide whether a choice begins now; counts one that waits once."""
        job = attempt.job
        if job.task is not None or (not self.limits_cache and self._colocation is None):
            return True  # a task holds no part of the KV cache that other texts need
        self._sync()
        waiting_id, text = self._waiting.get(job.id, ("", None))
        if text is None or waiting_id != request_id:
            text = self._text(attempt, index)
            self._note(job, text)
        reason = self._wait_reason(job, text)
        if not reason:
            self._waiting.pop(job.id, None)
            if self._colocation is not None:
                self._colocation.begin(text, self.gate.held.values())
            self.gate.held[request_id] = text
        elif waiting_id != request_id:
            self._waiting[job.id] = request_id, text
            self._recorder.waits_at_gate(reason)
        return not reason

    def would_admit(self, choices: Iterable[tuple[Attempt, int]], without: Collection[str]) -> bool:
        """Whether all these choices would begin if the engine no longer ran the requests `without`."""
        if not self.limits_cache:
            return True
        self._sync()
        texts = [self._text(attempt, index) for attempt, index in choices]
        return self.gate.fitting(texts, self._capacity(), without) == len(texts)

    def never_fits(self, attempt: Attempt, index: int) -> bool:
        """Whether the engine cannot run a choice even alone, so that it is to refuse it."""
        return self.limits_cache and never_fits(self._text(attempt, index), self._capacity())

    def is_due(self, now: float) -> bool:
        """Whether texts that wait at the gate are to be tried again though none has ended."""
        if not self._waiting or now < self._retry_at:
            return False
        self._retry_at = now + RETRY_INTERVAL_S
        return True

    def _wait_reason(self, job: Job, text: HeldText) -> GateReason:
        reason: GateReason = self.gate.wait_reason(text, self._capacity()) if self.limits_cache else ""
        if reason or job.priority is not Priority.BATCH or self._colocation is None:
            return reason
        return self._colocation.wait_reason(text.prompt + text.generated, self.gate.held.values(), self._offline())

    def _offline(self) -> int:
        """How many of the texts that the engine holds are of lane batch."""
        running = self.running
        return sum([running[request_id][0].job.priority is Priority.BATCH for request_id in self.gate.held])

    def _capacity(self) -> KvCapacity:
        stats = self._engine.stats()
        reserve = self.gate.reserve.share if stats.evicts else 0.0
        return KvCapacity(stats.slots, stats.kv_tokens, stats.kv_pinned, reserve, stats.evicts)

    def _text(self, attempt: Attempt, index: int) -> HeldText:
        job = attempt.job
        prompt = prompt_sizes(job.prompt, job.tools)[index // job.sampling.n]
        if not isinstance(job.prompt, Tokens) and self._scale.value:
            prompt = round(prompt * self._scale.value)
        prompt = max(1, min(prompt, self._card.context + 1))  # one beyond the context: the engine is to refuse it
        limit = max(1, answer_tokens(job.sampling.max_tokens, self._card, prompt))
        return self.gate.text(job.priority, job.tenant, prompt, limit, attempt.generated(index))

    def _note(self, job: Job, text: HeldText) -> None:
        """Learn how large texts are from one that is tried for the first time, unless no engine could run it."""
        if self.limits_cache and never_fits(text, self._capacity()):
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

    # --- what is learned ---------------------------------------------------------------------------------------------

    def note_step(self, texts: int, now: float) -> None:
        """Learn from a step that gave a token to `texts` texts and ended `now`, in monotonic seconds."""
        if self._colocation is not None and self._colocation.is_due(now):
            self._sync()
            self._colocation.note_step(texts, self.gate.held.values(), now)

    def note_end(self, attempt: Attempt, index: int, piece: Piece) -> None:
        """Learn from a choice that has ended: its length, and how long its first token took."""
        if piece.finish in ("stop", "length") and attempt.job.task is None:
            self._ended += 1
            self.gate.history.add(attempt.job.priority, attempt.job.tenant, attempt.generated(index))
        text = self.gate.held.get(piece.id)
        if self._colocation is not None and text is not None and (taken_s := attempt.first_token_s()) is not None:
            self._colocation.note_first(text, max(0, attempt.prompt_tokens(index) - piece.cached_tokens), taken_s)

    def forget(self, job_id: str, request_id: str = "") -> None:
        """Forget what of a job waits at the gate, and a choice that the engine no longer runs."""
        self._waiting.pop(job_id, None)
        self.gate.held.pop(request_id, None)

    async def keep_reporting(self) -> None:
        """Judge the engine's evictions, and show reserve and predicted peak, for ever."""
        while True:
            await asyncio.sleep(coalesced(REPORT_INTERVAL_S))
            self.report()

    def report(self) -> None:
        """Judge the engine's evictions since the last call, and show reserve and predicted peak."""
        stats = self._engine.stats()
        self.gate.reserve.note(self._ended, stats.evictions)
        self._ended = 0
        if self.limits_cache:
            self._sync()
            self._recorder.gate(self.gate.peak(self._capacity()), self._capacity().reserve)


log = logging.getLogger(__name__)

MAX_TOTAL = 2**53 - 1
"""The largest token count of a job: the store's scripts count exactly up to it."""


def unusable_piece(
    attempt: Attempt, index: int, piece: Piece, error: Exception, stop: Callable[[Attempt], None]
) -> Piece:
    """Fail the job of a piece that `Attempt.take` raised on, and call `stop` if its choice has not ended. Returns the
    piece without its content."""
    failure = _failure(attempt, error)
    if not attempt.stopped:
        log.error("%s", failure.message, extra={"job": attempt.job.id})
        attempt.stop(JobState.FAILED, failure)
        if not piece.last:
            stop(attempt)
    if not piece.last:
        return Piece(piece.id)
    attempt.refuse(index, failure)
    return Piece(piece.id, failure=failure)


def end_job(attempt: Attempt, worker: str, clock: Clock, writer: Writer) -> Terminal:
    """Write the end of a job that is over: failed, without counts and times, if those cannot be stored. Else they would
    stay in the worker's writer, and no later job of the partition would ever end."""
    try:
        end = attempt.terminal(worker, attempt.stamps.generated(clock, attempt.partition))
        if max(end.usage.prompt, end.usage.completion, end.usage.cached) > MAX_TOTAL:
            raise OverflowError(f"a token count above {MAX_TOTAL}")
        writer.finish(attempt.finish(end))
    except Exception as error:  # noqa: BLE001 - boundary: whatever the engine gave fails its own job, and no other
        failure = _failure(attempt, error)
        log.error("%s", failure.message, extra={"job": attempt.job.id})
        end = attempt.failed_terminal(worker, failure)
        writer.finish(attempt.finish(end))
    return end


def _failure(attempt: Attempt, error: Exception) -> Failure:
    cause = f"{type(error).__name__}: {ascii(str(error))[1:-1][:200]}"
    message = f"The engine of {attempt.job.model} gave a value that cannot be stored ({cause})."
    return Failure("engine_error", message, 500)
