"""Pool simulator: a queue and workers that come and go, event by event, as the scheduler steers them. Pure.

It shares engine, workers, queues and admission with `Simulation`. A text wakes one worker that has room, as in the
product; its engine begins the text with its next step. A worker that is to go ends what it runs first.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from planner.simulator.engine import EngineShape, Greedy, ModelEngine, ModelStep, ModelText
from planner.simulator.queues import LANES, ModelWorker, SlotWorker, SortedQueue, TextQueue, by_lane
from planner.simulator.trace import TraceRow
from scheduler.policy.snapshot import LaneLoad, Snapshot
from streaming.fleet.process import Process, Served
from streaming.order import Priority

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
    """One worker of a pool. `inner`: what takes texts from the queue, and its engine.

    Steps in which every text only gets its token are taken at once (`ModelEngine.leap`), up to the first end. If a text
    comes before that, the leap ends with the step under way.
    """

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


OnText: TypeAlias = Callable[[ModelText, float], None]
"""Called with a text and the seconds it waited, or was held."""
WakeRule: TypeAlias = Literal["freshest", "freest"]
"""Who is woken for a new text: the worker that said last that it has room, or the freest."""
Action: TypeAlias = Callable[[float], None]
MakeWorker: TypeAlias = Callable[[ModelEngine], ModelWorker]


@dataclass(frozen=True, slots=True)
class PoolEngine:
    """One worker's engine, and what it takes to get one."""

    shape: EngineShape
    start_s: float = 60.0
    """From order to ready, in the mean; evenly spread over a fifth less and a fifth more."""


def next_power_of_two(tokens: int) -> int:
    """Clients that do not know the length of their answer allow a round number."""
    return 1 << (tokens - 1).bit_length()


def greedy_worker(engine: ModelEngine) -> ModelWorker:
    """One that fills its slots, while the cache holds what there is."""
    return SlotWorker(engine, Greedy())


@dataclass(slots=True)
class LaneCounts:
    """What waits and runs in one lane."""

    waiting: dict[int, ModelText] = field(default_factory=dict)
    """By id(), oldest first."""
    running: int = 0
    added: int = 0


class CountedQueue:
    """A queue whose lanes are counted. `on_begun` hears of each text when it is first taken, and how long it waited."""

    def __init__(self, inner: TextQueue, on_begun: OnText | None) -> None:
        self._inner, self._on_begun, self._size = inner, on_begun, 0
        self.lanes = {lane: LaneCounts() for lane in LANES}

    def __len__(self) -> int:
        return self._size

    def put(self, text: ModelText, now_s: float) -> None:
        lane = self.lanes[Priority(text.lane)]
        lane.added += 1
        self._size += 1
        lane.waiting[id(text)] = text
        self._inner.put(text, now_s)

    def put_back(self, text: ModelText) -> None:
        lane = self.lanes[Priority(text.lane)]
        lane.running -= 1
        self._size += 1
        lane.waiting[id(text)] = text
        self._inner.put_back(text)

    def take(self, now_s: float, lanes: Collection[Priority], crowding: Collection[str] = ()) -> ModelText | None:
        text = self._inner.take(now_s, lanes, crowding)
        if text is not None:
            lane = self.lanes[Priority(text.lane)]
            del lane.waiting[id(text)]
            lane.running += 1
            self._size -= 1
            if self._on_begun is not None and text.claimed_s is None:
                self._on_begun(text, now_s - text.arrived_s)
            text.claimed_s = now_s if text.claimed_s is None else text.claimed_s
        return text

    def drop(self, text: ModelText) -> None:
        del self.lanes[Priority(text.lane)].waiting[id(text)]
        self._size -= 1
        self._inner.drop(text)

    def note_end(self, text: ModelText) -> None:
        self.lanes[Priority(text.lane)].running -= 1
        self._inner.note_end(text)


class PoolSimulation:
    """Lanes and workers in virtual time. `on_begun` and `on_ended` hear of every text."""

    def __init__(
        self,
        engine: PoolEngine,
        seed: int = 0,
        *,
        queue: TextQueue | None = None,
        make_worker: MakeWorker = greedy_worker,
        wake: WakeRule = "freshest",
        on_begun: OnText | None = None,
        on_ended: OnText | None = None,
        limit_of: Callable[[int], int] = next_power_of_two,
    ) -> None:
        """`limit_of`: the most tokens that a client allows, by those of its answer."""
        self.now_s = 0.0
        self.engine = engine
        self.queue = CountedQueue(SortedQueue(by_lane) if queue is None else queue, on_begun)
        self.workers: dict[str, PoolWorker] = {}
        """Those that are there, by age."""
        self.worker_s = 0.0
        """Of workers that are gone, from order to end."""
        self.dispatch = ""
        """Only workers of this shape take texts; "": all do."""
        self._chance = random.Random(seed)  # noqa: S311 - a simulation, not a secret
        self._make_worker, self._wake_rule, self._on_ended = make_worker, wake, on_ended
        self._limit_of = limit_of
        self._events: list[tuple[float, int, Action]] = []
        self._number = 0
        self._roomy: dict[str, PoolWorker] = {}
        """Workers with room; the last is the one that said so last."""

    # --- time ------------------------------------------------------------------------------------------------------

    def at(self, when_s: float, action: Action) -> None:
        """Do this then."""
        self._number += 1
        heapq.heappush(self._events, (when_s, self._number, action))

    def every(self, seconds: float, action: Action) -> None:
        """Do this every so many seconds, from now on."""

        def again(now_s: float) -> None:
            action(now_s)
            self.at(now_s + seconds, again)

        self.at(self.now_s, again)

    def feed(self, rows: Iterable[TraceRow]) -> None:
        """Put each request when its time comes; they are asked for one by one."""
        rest = iter(rows)

        def come(row: TraceRow) -> Action:
            def put(_: float) -> None:
                self.put(row)
                if (following := next(rest, None)) is not None:
                    self.at(following.at, come(following))

            return put

        if (first := next(rest, None)) is not None:
            self.at(first.at, come(first))

    def run(self, until_s: float) -> None:
        """Let everything happen up to then."""
        events = self._events
        while events and events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(events)
            action(self.now_s)
        self.now_s = until_s

    # --- texts -----------------------------------------------------------------------------------------------------

    def put(self, row: TraceRow) -> None:
        """A request arrives."""
        limit = self._limit_of(row.answer)
        self.put_text(ModelText(row.prompt, row.answer, limit, self.now_s, row.lane, row.session))

    def put_text(self, text: ModelText) -> None:
        """It arrives now."""
        self.queue.put(text, self.now_s)
        self._wake()

    def _wake(self, but: PoolWorker | None = None) -> None:
        """Let a worker with room take what waits."""
        others = [worker for worker in self._roomy.values() if worker is not but]
        if not others:
            return
        worker = others[-1] if self._wake_rule == "freshest" else min(others, key=lambda each: each.running)
        if not worker.is_stepping:
            self._go_on(worker)
            return
        if (end_s := worker.interrupt(self.now_s)) < math.inf:
            self._expect(worker, end_s)
        self._fill(worker)

    def _go_on(self, worker: PoolWorker) -> None:
        """Take what fits, and begin the next step."""
        self._fill(worker)
        if worker.inner.engine.is_idle and worker.state == "draining":
            self._leave(worker)
        elif (end_s := worker.begin(self.now_s)) < math.inf:
            self._expect(worker, end_s)

    def _fill(self, worker: PoolWorker) -> None:
        if not self.dispatch or worker.shape == self.dispatch:
            worker.fill(self.queue, self.now_s)
        self._note_room(worker)

    def _note_room(self, worker: PoolWorker) -> None:
        self._roomy.pop(worker.id, None)
        if worker.has_room and (not self.dispatch or worker.shape == self.dispatch):
            self._roomy[worker.id] = worker

    def _expect(self, worker: PoolWorker, end_s: float) -> None:
        """Be there when what is under way ends."""
        version = worker.version

        def ends(now_s: float) -> None:
            if worker.version == version:
                self._end(worker, now_s)

        self.at(end_s, ends)

    def _end(self, worker: PoolWorker, now_s: float) -> None:
        for text in worker.end(now_s).ended:
            self.queue.note_end(text)
            if self._on_ended is not None:
                self._on_ended(text, now_s - (text.begun_s or 0.0))
        self._go_on(worker)
        if len(self.queue):
            self._wake(but=worker)

    # --- workers ---------------------------------------------------------------------------------------------------

    def order(
        self, count: int = 1, *, engine: PoolEngine | None = None, shape: str = "", at_once: bool = False
    ) -> None:
        """Start workers; `at_once`: they are ready now."""
        engine = engine or self.engine
        for _ in range(count):
            self._number += 1
            inner = self._make_worker(ModelEngine(engine.shape))
            worker = PoolWorker(f"w{self._number}", inner, self.now_s, shape)
            self.workers[worker.id] = worker
            start_s = 0.0 if at_once else engine.start_s * self._chance.uniform(0.8, 1.2)
            self.at(self.now_s + start_s, partial(self._ready, worker))

    def _ready(self, worker: PoolWorker, _: float) -> None:
        if worker.state == "starting" and worker.id in self.workers:
            worker.state = "ready"
            self._go_on(worker)

    def slow_down(self, worker: PoolWorker, factor: float) -> None:
        """From its next step on it is so many times slower than its engine."""
        if (end_s := worker.interrupt(self.now_s)) < math.inf:
            self._expect(worker, end_s)
        worker.slow = factor

    def drain(self, worker: PoolWorker) -> None:
        """Take nothing more, and go when what runs has ended."""
        worker.state = "draining"
        self._roomy.pop(worker.id, None)
        for text in worker.inner.held:
            self.queue.put_back(text)
        worker.inner.held.clear()
        if not worker.is_stepping:
            self._leave(worker)

    def _leave(self, worker: PoolWorker) -> None:
        worker.version += 1
        self.worker_s += self.now_s - worker.ordered_s
        del self.workers[worker.id]

    def send_to(self, shape: str) -> None:
        """New texts go to workers of this shape from now on."""
        if shape != self.dispatch:
            self.dispatch = shape
            self._roomy.clear()
            for worker in list(self.workers.values()):
                self._note_room(worker)
                if not worker.is_stepping and worker.state == "ready":
                    self._go_on(worker)

    def resize(self, want: int, cordoned: Iterable[str] = ()) -> None:
        """Have so many workers that are meant to stay: order some, or let the newest go, starting ones first."""
        for name in cordoned:
            if (worker := self.workers.get(name)) and worker.state == "ready":
                self.drain(worker)
        staying = [worker for worker in self.workers.values() if worker.state != "draining"]
        if len(staying) < want:
            self.order(want - len(staying))
        surplus = sorted(staying, key=lambda each: (each.state == "starting", each.ordered_s))[want:]
        for worker in reversed(surplus):
            self.drain(worker)

    def total_worker_s(self) -> float:
        """Worker-seconds so far, from order to end."""
        return self.worker_s + sum(self.now_s - worker.ordered_s for worker in self.workers.values())

    # --- seen from outside -----------------------------------------------------------------------------------------

    def snapshot(self, model: str = "m") -> Snapshot:
        """What the scheduler sees now."""
        lanes = []
        for name, lane in self.queue.lanes.items():
            oldest = next(iter(lane.waiting.values()), None)
            oldest_s = 0.0 if oldest is None else self.now_s - oldest.arrived_s
            lanes.append(LaneLoad(name, len(lane.waiting), lane.running, oldest_s, lane.added))
        return Snapshot(model, tuple(lanes), tuple(worker.seen(self.now_s) for worker in self.workers.values()))
