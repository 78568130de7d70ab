"""Simulator: one queue and its engines in virtual time, step by step of each engine. Arrivals in, records out. Pure.

Every decision is made by the code of the product (`planner/simulator/queues.py`, `planner/simulator/workers.py`) or by
a rule that stands beside it. The records are the texts themselves. The same texts give the same records.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence

from planner.simulator.engine import ModelStep, ModelText
from planner.simulator.queues import TextQueue
from planner.simulator.workers import ModelWorker

OnStep = Callable[[float, ModelWorker, ModelStep], None]
"""Called with the time at the end of a step, the worker and the step."""


class Simulation:
    """One run. `workers` take from `queue`; texts whose deadline has passed are given up wherever they are."""

    def __init__(self, queue: TextQueue, workers: Sequence[ModelWorker], on_step: OnStep | None = None) -> None:
        self._queue, self._workers, self._on_step = queue, workers, on_step
        self._steps: list[tuple[float, int, ModelStep]] = []
        """The steps under way, by their ends."""
        self._deadlines: list[tuple[float, int, ModelText]] = []
        self._puts = 0
        self.now_s = 0.0

    def run(self, texts: Sequence[ModelText], until_s: float = math.inf) -> float:
        """Until every text is answered or given up, or the time is over. Returns the time."""
        coming = deque(sorted(texts, key=lambda text: text.arrived_s))
        busy: set[int] = set()
        while coming or self._steps or len(self._queue):
            arrival_s = coming[0].arrived_s if coming else math.inf
            end_s = self._steps[0][0] if self._steps else math.inf
            if min(arrival_s, end_s) == math.inf:
                raise RuntimeError(f"{len(self._queue)} texts wait, and no worker takes one")
            self.now_s = max(self.now_s, min(arrival_s, end_s))
            if self.now_s > until_s:
                break
            if end_s <= arrival_s:
                _, number, step = heapq.heappop(self._steps)
                busy.discard(number)
                self._end_step(self._workers[number], step)
            while coming and coming[0].arrived_s <= self.now_s:
                self._arrive(coming.popleft())
            self._expire()
            for number, worker in enumerate(self._workers):
                if number not in busy and self._begin_step(number, worker):
                    busy.add(number)
        return self.now_s

    def _arrive(self, text: ModelText) -> None:
        self._queue.put(text, self.now_s)
        if text.deadline_s < math.inf:
            self._puts += 1
            heapq.heappush(self._deadlines, (text.deadline_s, self._puts, text))

    def _begin_step(self, number: int, worker: ModelWorker) -> bool:
        worker.fill(self._queue, self.now_s)
        if worker.engine.is_idle:
            return False
        step = worker.engine.step()
        heapq.heappush(self._steps, (self.now_s + step.duration_s, number, step))
        return True

    def _end_step(self, worker: ModelWorker, step: ModelStep) -> None:
        for text in step.tokens:
            if text.first_s is None:
                text.first_s = self.now_s
        for text in step.ended:
            text.ended_s = self.now_s
            self._queue.note_end(text)
        worker.note(step, self.now_s)
        if self._on_step is not None:
            self._on_step(self.now_s, worker, step)

    def _expire(self) -> None:
        """Give up what is too late. What runs leaves its engine when the step has ended."""
        while self._deadlines and self._deadlines[0][0] <= self.now_s:
            text = heapq.heappop(self._deadlines)[2]
            # A text that is done gets its last token when the step that is under way ends.
            if not text.is_done and not any(worker.give_up(text, self.now_s) for worker in self._workers):
                self._queue.drop(text)
