"""Pool simulator: a queue and workers, event by event, which leaps over steps that are alike. Pure.

It shares engine, workers and queues with `Simulation`. A text wakes one worker that has room, as in the product; its
engine begins the text with its next step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from planner.simulator.engine import ModelEngine, ModelStep, ModelText
from planner.simulator.queues import ModelWorker, TextQueue


@dataclass(slots=True)
class Leap:
    """Steps that are taken at once: how many, and the time of the first and of each that follows it."""

    began_s: float
    steps: int
    first_s: float
    more_s: float

    def seconds(self, steps: int) -> float:
        """Of the first so many."""
        return steps * self.first_s + self.more_s * steps * (steps - 1) / 2

    def ended_by(self, now_s: float) -> int:
        """The steps that have ended by then."""
        passed_s = now_s - self.began_s
        if self.more_s <= 0:
            steps = passed_s / self.first_s if self.first_s else math.inf
        else:  # steps^2 more / 2 + steps (first - more / 2) = passed
            half = self.first_s - self.more_s / 2
            steps = (math.sqrt(half * half + 2 * self.more_s * passed_s) - half) / self.more_s
        return min(self.steps, int(steps + 1e-9))


@dataclass(slots=True, eq=False)
class PoolWorker:
    """One worker of a pool. `inner`: what takes texts from the queue, and its engine.

    Steps in which every text only gets its token are taken at once (`ModelEngine.leap`), up to the first end. If a text
    comes before that, the leap ends with the step under way.
    """

    inner: ModelWorker
    version: int = 0
    """Of the step under way: the event of another one's end is out of date."""
    step: ModelStep | None = None
    """The step under way, whose effects the engine has already."""
    leap: Leap | None = None
    """Or the steps under way, whose effects it has not."""

    @property
    def engine(self) -> ModelEngine:
        return self.inner.engine

    @property
    def is_stepping(self) -> bool:
        return self.step is not None or self.leap is not None

    @property
    def has_room(self) -> bool:
        held = len(self.engine.running) + len(self.engine.waiting) + len(self.inner.held)
        return held < self.engine.shape.slots

    def begin(self, now_s: float) -> float:
        """Begin the next step, or several alike. Returns when they end; infinite if there is nothing to do."""
        if self.engine.is_idle:
            return math.inf
        if (steps := self.engine.alike()) < 2:
            return self.begin_one(now_s)
        self.version += 1
        self.leap = Leap(now_s, steps, *self.engine.alike_s())
        return now_s + self.leap.seconds(steps)

    def interrupt(self, now_s: float) -> float:
        """Let a leap be the steps that have ended, and the one under way. Returns when that ends; infinite if nothing
        changes."""
        leap = self.leap
        if leap is None or (ended := leap.ended_by(now_s)) == leap.steps:
            return math.inf
        began_s = leap.began_s + leap.seconds(ended)
        if ended:
            self.inner.note(self.engine.leap(ended), began_s)
        self.leap = None
        return self.begin_one(began_s)

    def begin_one(self, now_s: float) -> float:
        """Begin a step. Returns when it ends."""
        self.version += 1
        self.step = self.engine.step()
        return now_s + self.step.duration_s

    def end(self, now_s: float) -> ModelStep:
        """What is under way has ended now; its effects, with the times of first tokens and ends."""
        step = self.step if self.leap is None else self.engine.leap(self.leap.steps)
        assert step is not None
        self.inner.note(step, now_s)
        self.step = self.leap = None
        return step


class PoolSimulation:
    """Lanes and workers in virtual time. The records are the texts themselves."""

    def __init__(self, queue: TextQueue, workers: Sequence[ModelWorker]) -> None:
        self._queue = queue
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._now_s = 0.0
        self._roomy = dict.fromkeys(map(PoolWorker, workers))
        """Workers with room; the last is the one that said so last."""

    def run(self, texts: Sequence[ModelText]) -> None:
        """Until every text is answered."""
        for text in texts:
            self._at(text.arrived_s, partial(self._put, text))
        while self._events:
            self._now_s, _, action = heapq.heappop(self._events)
            action()

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when_s, self._number, action))

    def _put(self, text: ModelText) -> None:
        self._queue.put(text, self._now_s)
        self._wake()

    def _wake(self, but: PoolWorker | None = None) -> None:
        """Let the worker that said last that it has room take what waits."""
        worker = next((each for each in reversed(self._roomy) if each is not but), None)
        if worker is None:
            return
        if not worker.is_stepping:
            self._go_on(worker)
            return
        self._expect(worker, worker.interrupt(self._now_s))
        self._fill(worker)

    def _go_on(self, worker: PoolWorker) -> None:
        """Take what fits, and begin the next step."""
        self._fill(worker)
        self._expect(worker, worker.begin(self._now_s))

    def _fill(self, worker: PoolWorker) -> None:
        if len(self._queue) or worker.inner.held:
            worker.inner.fill(self._queue, self._now_s)
        self._roomy.pop(worker, None)
        if worker.has_room:
            self._roomy[worker] = None

    def _expect(self, worker: PoolWorker, end_s: float) -> None:
        """Be there when what is under way ends."""
        version = worker.version

        def ends() -> None:
            if worker.version == version:
                self._end(worker)

        if end_s < math.inf:
            self._at(end_s, ends)

    def _end(self, worker: PoolWorker) -> None:
        for text in worker.end(self._now_s).ended:
            self._queue.note_end(text)
        self._go_on(worker)
        if len(self._queue):
            self._wake(but=worker)
