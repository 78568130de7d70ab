"""Worker of a simulated pool: it starts, takes texts, drains and goes, and reports itself as a real one does. Pure.

Steps in which every text only gets its token are taken at once (`ModelEngine.leap`), up to the first end. If a text
comes before that, the leap ends with the step under way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from planner.simulator.engine import ModelStep, ModelText
from planner.simulator.queues import TextQueue
from planner.simulator.workers import ModelWorker
from streaming.fleet.process import Process, Served

REPORT_INTERVAL_S = 2.0
"""A worker says how it is doing this often; in between the scheduler knows what it said last."""


def worker_report(name: str, state: str = "ready", **load: Any) -> Process:
    """The report of a worker with this load."""
    return Process(role="worker", id=name, life=name, pid=0, host="", state=state, since=0.0, **load)


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
    """One worker of a pool. `inner`: what takes texts from the queue, and its engine."""

    id: str
    inner: ModelWorker
    ordered_s: float
    shape: str = ""
    """Which of the pool's shapes it has."""
    state: str = "starting"
    slow: float = 1.0
    """How many times longer its steps take than the engine's costs say."""
    version: int = 0
    """Of the step under way: the event of another one's end is out of date."""
    step: ModelStep | None = None
    """The step under way, whose effects the engine has already."""
    leap: Leap | None = None
    """Or the steps under way, whose effects it has not."""
    steps: int = 0
    step_s: float = 0.0
    step_tokens: int = 0
    """Of the steps that have ended."""
    served: dict[str, Served] = field(default_factory=dict)
    _said: Process | None = None
    _said_s: float = -math.inf

    @property
    def is_stepping(self) -> bool:
        return self.step is not None or self.leap is not None

    @property
    def running(self) -> int:
        """Texts that it holds."""
        return len(self.inner.engine.running) + len(self.inner.engine.waiting) + len(self.inner.held)

    @property
    def has_room(self) -> bool:
        return self.state == "ready" and self.running < self.inner.engine.shape.slots

    def fill(self, queue: TextQueue, now_s: float) -> None:
        """Take what it may."""
        if self.state == "ready" and (len(queue) or self.inner.held):
            self.inner.fill(queue, now_s)

    def begin(self, now_s: float) -> float:
        """Begin the next step, or several alike. Returns when they end; infinite if there is nothing to do."""
        engine = self.inner.engine
        if engine.is_idle:
            return math.inf
        if (steps := engine.alike()) < 2:
            return self.begin_one(now_s)
        self.version += 1
        first_s, more_s = engine.alike_s()
        self.leap = Leap(now_s, steps, self.slow * first_s, self.slow * more_s)
        return now_s + self.leap.seconds(steps)

    def interrupt(self, now_s: float) -> float:
        """Let a leap be the steps that have ended, and the one under way. Returns when that ends; infinite if nothing
        changes."""
        leap, (ended, seconds) = self.leap, self._ended_by(now_s)
        if leap is None or ended == leap.steps:
            return math.inf
        if ended:
            self._note(self.inner.engine.leap(ended), ended, seconds, leap.began_s + seconds)
        self.leap = None
        return self.begin_one(leap.began_s + seconds)

    def begin_one(self, now_s: float) -> float:
        """Begin a step. Returns when it ends."""
        self.version += 1
        self.step = self.inner.engine.step()
        self.step.duration_s *= self.slow
        return now_s + self.step.duration_s

    def end(self, now_s: float) -> ModelStep:
        """What is under way has ended now; its effects, with the times of first tokens and ends."""
        if self.leap is not None:
            step = self.inner.engine.leap(self.leap.steps)
            self._note(step, self.leap.steps, self.leap.seconds(self.leap.steps), now_s)
        else:
            assert self.step is not None
            step = self.step
            self._note(step, 1, step.duration_s, now_s)
        self.step = self.leap = None
        return step

    def _note(self, step: ModelStep, count: int, seconds: float, now_s: float) -> None:
        self.steps += count
        self.step_s += seconds
        self.step_tokens += count * len(step.tokens)
        for text in step.tokens:
            text.first_s = now_s if text.first_s is None else text.first_s
        for text in step.ended:
            text.ended_s = now_s
            self._count(text)
        self.inner.note(step, now_s)

    def _count(self, text: ModelText) -> None:
        past = self.served.get(text.lane, Served())
        self.served[text.lane] = Served(past.jobs + 1, past.tokens + text.prompt + text.generated)

    def seen(self, now_s: float) -> Process:
        """As the scheduler sees it: what it said last."""
        if self._said is None or self._said.state != self.state or now_s - self._said_s >= REPORT_INTERVAL_S:
            self._said, self._said_s = self._says(now_s), now_s
        return self._said

    def tokens_by(self, now_s: float) -> int:
        """Tokens of all steps that have ended."""
        return self.step_tokens + self._ended_by(now_s)[0] * len(self.inner.engine.running)

    def _ended_by(self, now_s: float) -> tuple[int, float]:
        """The steps of the leap under way that have ended, and their seconds."""
        if self.leap is None:
            return 0, 0.0
        steps = self.leap.ended_by(now_s)
        return steps, self.leap.seconds(steps)

    def _says(self, now_s: float) -> Process:
        engine = self.inner.engine
        steps, step_s = self._ended_by(now_s)
        return worker_report(
            self.id,
            self.state,
            slots=engine.shape.slots,
            running=self.running,
            kv_tokens=engine.shape.kv_tokens,
            kv_used=engine.held + steps * len(engine.running),
            served=dict(self.served),
            steps=self.steps + steps,
            step_s=self.step_s + step_s,
            step_tokens=self.step_tokens + steps * len(engine.running),
            shape=self.shape,
        )
