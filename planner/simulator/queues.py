"""Simulation in virtual time: a queue, workers that take from it, a run. Pure."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from random import Random

from planner.simulator.engine import AdmissionRule, ModelEngine, ModelStep, ModelText, PastFuture
from streaming.fleet.settings import LatencyTargets
from streaming.order import Priority
from workers.slot_shares import (
    MAX_VICTIMS,
    RunningJob,
    SlotShares,
    choose_victims,
    preemptible,
    reserved_slots,
    room_for_batch,
    tenant_slots,
)

LANES = tuple(Priority)


def by_arrival(text: ModelText) -> tuple[int, float]:
    """First come, first served."""
    return 0, text.arrived_s


def by_lane(text: ModelText) -> tuple[int, float]:
    """Strict priority between lanes; in a lane, by arrival."""
    return Priority(text.lane).rank, text.arrived_s


class TextQueue:
    """Where texts wait until a worker takes them: by a key, and the one that was put first if equal."""

    def __init__(self, key: Callable[[ModelText], tuple[int, float]]) -> None:
        self._key = key
        self._lines: dict[tuple[str, str | None], list[tuple[tuple[int, float], int, ModelText]]] = {}
        """By lane and tenant, a heap; those of no tenant were put back. None is empty."""
        self._puts = 0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def put(self, text: ModelText, now_s: float) -> None:
        """A text arrives."""
        self._wait(text, text.tenant)

    def put_back(self, text: ModelText) -> None:
        """A text that a worker had begun waits again."""
        self._wait(text, None)

    def _wait(self, text: ModelText, tenant: str | None) -> None:
        self._puts += 1
        heapq.heappush(self._lines.setdefault((text.lane, tenant), []), (self._key(text), self._puts, text))

    def take(self, now_s: float, lanes: Collection[Priority], crowding: Collection[str] = ()) -> ModelText | None:
        """Remove the next text of these lanes; None if there is none. One that arrives is not of the tenants
        `crowding`."""
        open_lines = [line for line in self._lines if line[0] in lanes and line[1] not in crowding]
        if not open_lines:
            return None
        first = min(open_lines, key=lambda line: self._lines[line][0])
        text = heapq.heappop(self._lines[first])[2]
        if not self._lines[first]:
            del self._lines[first]
        return text

    def note_end(self, text: ModelText) -> None:
        """A text has been answered."""


NOT_BATCH = tuple(lane for lane in LANES if lane is not Priority.BATCH)


class ModelWorker:
    """One engine behind an admission rule: what the rule refuses is tried again after the next step."""

    def __init__(self, engine: ModelEngine, rule: AdmissionRule) -> None:
        self.engine, self.rule = engine, rule
        self.held: list[ModelText] = []
        """Taken from the queue, and refused by the rule so far."""

    def fill(self, queue: TextQueue, now_s: float) -> None:
        """Take what the engine may have now."""
        while True:
            if not self.held:
                if (text := queue.take(now_s, LANES)) is None:
                    return
                self.held.append(text)
            if not self.admits(self.held[0]):
                return
            self.submit(self.held.pop(), now_s)

    def admits(self, text: ModelText) -> bool:
        """Whether the engine may have it now."""
        return self.rule.admits(text, self.engine)

    def submit(self, text: ModelText, now_s: float) -> None:
        """Give it to the engine."""
        text.handed_s = now_s
        text.begun_s = now_s if text.begun_s is None else text.begun_s
        self.engine.submit(text)

    def note(self, step: ModelStep, now_s: float) -> None:
        """Learn from a step that has ended now, and write its time to texts that got their first or last token."""
        for text in step.tokens:
            if text.first_s is None:
                text.first_s = now_s
        for text in step.ended:
            text.ended_s = now_s
        self.rule.note(step)


class PenstockWorker(ModelWorker):
    """Claims, holds back, begins and preempts by the code of the product: the gate, the latency predictor of
    co-location, and the choice of victims."""

    rule: PastFuture

    def __init__(self, engine: ModelEngine, random: Random, targets: LatencyTargets | None = None) -> None:
        super().__init__(engine, PastFuture(random, targets))
        self._shares = SlotShares()

    def fill(self, queue: TextQueue, now_s: float) -> None:
        self._begin_held(now_s)
        while lanes := self._lanes(now_s):
            if (text := queue.take(now_s, lanes, self._crowding(now_s))) is None:
                return
            if not self.admits(text) and not self._make_way(text, queue, now_s):
                self.held.append(text)
                continue
            self.submit(text, now_s)

    def submit(self, text: ModelText, now_s: float) -> None:
        super().submit(text, now_s)
        self._shares.begin(text.tenant)
        if text.lane == Priority.INTERACTIVE:
            self.rule.colocation.note_chat(text.prompt)

    def note(self, step: ModelStep, now_s: float) -> None:
        super().note(step, now_s)
        for text in step.ended:
            self._shares.end(text.tenant, now_s)
        if self.rule.colocation.is_due(now_s):
            self.rule.colocation.note_step(len(step.tokens), self.rule.gate.held.values(), now_s)

    def _begin_held(self, now_s: float) -> None:
        """What waits at the gate first holds back its lane and the lower ones."""
        for text in sorted(self.held, key=lambda each: Priority(each.lane).rank):
            if not self.admits(text):
                return
            self.held.remove(text)
            self.submit(text, now_s)

    def _lanes(self, now_s: float) -> Collection[Priority]:
        """The lanes from which a text may be claimed now. Where no slot is free, the highest lane alone, if a batch
        text may be preempted for it."""
        slots, texts = self.engine.shape.slots, self.engine.texts
        is_batch = [text.lane == Priority.BATCH for text in self.held]
        if len(texts) >= slots or not all(is_batch):
            blocked = any(text.lane == Priority.INTERACTIVE for text in self.held)
            return () if blocked or not preemptible(self._jobs(), now_s) else (Priority.INTERACTIVE,)
        batch = sum([text.lane == Priority.BATCH for text in texts])
        room = room_for_batch(slots, reserved_slots(slots, None), batch)
        return NOT_BATCH if is_batch or room == 0 else LANES

    def _crowding(self, now_s: float) -> Collection[str]:
        """The tenants that get no slot now: those with more than their share, once few slots are free."""
        slots = self.engine.shape.slots
        is_roomy = len(self.engine.texts) < slots - tenant_slots(slots, None)
        return () if is_roomy else self._shares.crowding(slots, now_s)

    def _make_way(self, text: ModelText, queue: TextQueue, now_s: float) -> bool:
        """Preempt batch texts one by one until the gate lets a text of lane interactive begin."""
        if text.lane != Priority.INTERACTIVE:
            return False
        for _ in range(MAX_VICTIMS):
            texts, victims = self.engine.texts, choose_victims(self._jobs(), 1, now_s)
            for victim in [texts[int(job_id)] for job_id in victims]:
                self.engine.abort(victim)
                self.rule.forget(victim)
                self._shares.end(victim.tenant, now_s)
                victim.preemptions += 1
                queue.put_back(victim)
            if not victims or self.admits(text):
                return bool(victims)
        return False

    def _jobs(self) -> list[RunningJob]:
        return [
            RunningJob(f"{place:06}", Priority(text.lane), text.handed_s, 1, text.preemptions > 0, True)
            for place, text in enumerate(self.engine.texts)
            if text.lane == Priority.BATCH
        ]


class Simulation:
    """One run of workers that take from a queue.

    Every decision is made by the code of the product or by a rule that stands beside it. The records are the texts
    themselves. The same texts give the same records.
    """

    def __init__(self, queue: TextQueue, workers: Sequence[ModelWorker]) -> None:
        self._queue, self._workers = queue, workers
        self._steps: list[tuple[float, int, ModelStep]] = []
        """The steps under way, by their ends, with the numbers of their workers."""
        self._busy: set[int] = set()
        self.now_s = 0.0

    def run(self, texts: Sequence[ModelText], until_s: float = math.inf) -> float:
        """Until every text is answered, or the time is over. Returns the time."""
        coming = deque(sorted(texts, key=lambda text: text.arrived_s))
        while coming or self._steps or len(self._queue):
            arrival_s = coming[0].arrived_s if coming else math.inf
            end_s = self._steps[0][0] if self._steps else math.inf
            if min(arrival_s, end_s) == math.inf:
                raise RuntimeError(f"{len(self._queue)} texts wait, and no worker takes one")
            self.now_s = max(self.now_s, min(arrival_s, end_s))
            if self.now_s > until_s:
                break
            if end_s < arrival_s:
                self._end_step()
            while coming and coming[0].arrived_s <= self.now_s:
                self._arrive(coming.popleft())
            self._fill()
        return self.now_s

    def _arrive(self, text: ModelText) -> None:
        self._queue.put(text, self.now_s)

    def _fill(self) -> None:
        """Every worker without a step takes texts and begins one."""
        for number, worker in enumerate(self._workers):
            if number not in self._busy:
                worker.fill(self._queue, self.now_s)
                self._begin_step(number)

    def _begin_step(self, number: int) -> None:
        worker = self._workers[number]
        if worker.engine.texts:
            step = worker.engine.step()
            heapq.heappush(self._steps, (self.now_s + self._duration_s(worker, step), number, step))
            self._busy.add(number)

    def _duration_s(self, worker: ModelWorker, step: ModelStep) -> float:
        """How long a step takes beside those that are under way."""
        return step.duration_s

    def _end_step(self) -> int:
        """End the step that ends first. Returns the number of its worker."""
        _, number, step = heapq.heappop(self._steps)
        self._busy.discard(number)
        self._workers[number].note(step, self.now_s)
        for text in step.ended:
            self._queue.note_end(text)
        return number


class PoolSimulation(Simulation):
    """A run in which a text wakes one worker that has room, as in the product: the one that said so last. A worker that
    computes a step begins the text with its next one."""

    def __init__(self, queue: TextQueue, workers: Sequence[ModelWorker]) -> None:
        super().__init__(queue, workers)
        self._roomy = dict.fromkeys(range(len(workers)))
        """Workers with room; the last is the one that said so last."""

    def _arrive(self, text: ModelText) -> None:
        super()._arrive(text)
        self._wake(None)

    def _end_step(self) -> int:
        ended = super()._end_step()
        self._go_on(ended)
        if len(self._queue):
            self._wake(ended)
        return ended

    def _fill(self) -> None:
        """Those that are woken do so."""

    def _wake(self, but: int | None) -> None:
        number = next((each for each in reversed(self._roomy) if each != but), None)
        if number is not None:
            self._go_on(number)

    def _go_on(self, number: int) -> None:
        worker = self._workers[number]
        worker.fill(self._queue, self.now_s)
        self._roomy.pop(number, None)
        if len(worker.engine.texts) + len(worker.held) < worker.engine.shape.slots:
            self._roomy[number] = None
        if number not in self._busy:
            self._begin_step(number)
