"""Choice scheduler of a worker: decides which choices of its jobs run in the engine, and which start next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.engine import Engine, EngineDead, ModelCard, Refused, Stats
from streaming.jobs.job import Job
from streaming.jobs.work import answer_tokens, prompt_sizes
from streaming.priority import Priority
from workers.attempt import Attempt
from workers.claimer import reserved_slots
from workers.settings import WorkerSettings

PARTIAL_PER_SLOT = 4
"""Jobs with choices that wait, for each slot, that a worker holds before it claims no more."""


class ChoiceStarter:
    """Gives the engine one choice of each job at once, and further ones while there is room."""

    def __init__(
        self,
        engine: Engine,
        card: ModelCard,
        settings: WorkerSettings,
        room: asyncio.Event,
        *,
        is_full: Callable[[], bool],
        on_stopped: Callable[[Attempt], None],
        on_started: Callable[[], None],
    ) -> None:
        """
        Args:
            room: set when the claimer should look for jobs.
            is_full: whether the claimer found no room when it last looked.
            on_stopped: called with an attempt whose choice the engine refused after others had started.
            on_started: called once choices that waited have been started.
        """
        self._engine, self._card, self._settings, self._room = engine, card, settings, room
        self._is_full, self._on_stopped, self._on_started = is_full, on_stopped, on_started
        self.running: dict[str, tuple[Attempt, int]] = {}
        """What the engine runs, by its id there: whose it is, and which of its texts."""
        self.batch_texts = 0
        """Those of lane batch among them."""
        self.waiting: dict[str, Attempt] = {}
        """By job id, attempts with choices that wait to be started."""
        self._overtaken = -1
        """The lowest lane, by rank, of the jobs that took a place while choices waited; -1: none since the last of
        these was started. The next place is for one that waits, if its lane is not lower."""
        self._starts = 0
        """Texts given to the engine so far."""
        self._is_offered = False
        """A place is left to the claimer until it has looked."""
        self.dead: EngineDead | None = None
        """Raised by the engine in a callback; the worker's health check passes it on."""

    @property
    def reserved(self) -> int:
        """Slots that lane batch may not fill."""
        return reserved_slots(self.stats().slots, self._settings.reserved_slots)

    @property
    def is_laden(self) -> bool:
        """So many jobs have choices that wait that others are left to other workers."""
        return len(self.waiting) >= PARTIAL_PER_SLOT * self.stats().slots if self.waiting else False

    @property
    def texts(self) -> int:
        """What the engine runs, or queues, of the jobs held."""
        return len(self.running)

    def stats(self) -> Stats:
        """The engine's."""
        return self._engine.stats()

    def submit(self, attempt: Attempt) -> None:
        """Start the first choice. The others are started once all jobs of this claim have their first one."""
        attempt.stamps.release()
        attempt.queue_choices()
        if attempt.waits:
            self._start(attempt)
            if self.waiting:
                self._note_overtaking(attempt.job.priority)
        if attempt.waits:
            attempt.share = self._share(attempt.job)
            self.waiting[attempt.job.id] = attempt
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
        self.running[request.id] = (attempt, index)
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
        waiting = sorted(self.waiting.values(), key=lambda each: each.job.priority.rank)
        slots = self.stats().slots
        try:
            for attempt in sorted(waiting, key=lambda each: (each.job.priority.rank, each.last_start)):
                if not attempt.started and self._may_start(attempt, slots):
                    self._start_next(attempt)
            for attempt in waiting:
                while self._may_start(attempt, slots):
                    self._start_next(attempt)
        except EngineDead as error:
            self.dead = error  # this is called by the event loop and by the engine itself
            return
        for attempt in waiting:
            if not attempt.waits:
                del self.waiting[attempt.job.id]
                self._room.set()
        self._on_started()

    def _start_next(self, attempt: Attempt) -> None:
        """Start one more choice of a job that has begun. Raises EngineDead."""
        self._overtaken = -1
        self._start(attempt)
        if attempt.stopped:
            self._on_stopped(attempt)

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

    def refill(self) -> None:
        """A choice has ended: its place is taken by one that waits. Where no place is kept for claims, the claimer
        looks first, if it found no room the last time; every second time, while all is full."""
        owed = any(self._is_owed(attempt) for attempt in self.waiting.values())
        if self._is_full() and not self._settings.prefetch and not owed:
            self._is_offered = True
            self._room.set()
        else:
            self._start_waiting()

    def looked(self) -> None:
        """The claimer has begun what it found: a place that it has left is for choices that wait."""
        if self._is_offered:
            self._is_offered = False
            self._start_waiting()

    def stop(self, attempt: Attempt) -> None:
        for request_id in attempt.live_ids():
            self._engine.cancel(request_id)

    def let_go(self, attempt: Attempt) -> None:
        """Stop it, and take nothing more of it."""
        attempt.start_no_more()
        self.waiting.pop(attempt.job.id, None)
        self.stop(attempt)
        for request_id in attempt.live_ids():
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """The engine has nothing more of it to give."""
        attempt, _ = self.running.pop(request_id, (None, 0))
        if attempt is not None:
            self.batch_texts -= attempt.job.priority is Priority.BATCH
