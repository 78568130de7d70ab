"""Workers of the simulator: what stands between the queue and one engine. Pure.

`ModelWorker` gives the engine whatever an admission rule lets through. `PenstockWorker` decides with the code of the
product: the gate, the latency predictor of co-location, and the choice of victims.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random

from planner.simulator.admission import AdmissionRule, PastFuture
from planner.simulator.engine import ModelEngine, ModelStep, ModelText
from planner.simulator.queues import LANES, TextQueue
from streaming.fleet.settings import LatencyTargets
from streaming.priority import Priority
from workers.slot_shares import SlotShares, reserved_slots, room_for_batch, tenant_slots
from workers.victims import MAX_VICTIMS, RunningJob, choose_victims, preemptible

NOT_BATCH = tuple(lane for lane in LANES if lane is not Priority.BATCH)


class ModelWorker:
    """One engine behind an admission rule: what the rule refuses is tried again after the next step."""

    def __init__(self, engine: ModelEngine, rule: AdmissionRule) -> None:
        self.engine, self.rule = engine, rule
        self.held: list[ModelText] = []
        """Taken from the queue, and refused by the rule so far."""

    def fill(self, queue: TextQueue, now_s: float) -> None:
        """Take what the engine may have now."""
        while self.has_place:
            if not self.held:
                if (text := queue.take(now_s, LANES)) is None:
                    return
                self.held.append(text)
            if not self.admits(self.held[0]):
                return
            self.submit(self.held.pop(), now_s)

    @property
    def has_place(self) -> bool:
        """Whether a further text may be taken, whatever its size."""
        return True

    def admits(self, text: ModelText) -> bool:
        """Whether the engine may have it now."""
        return self.rule.admits(text, self.engine)

    def submit(self, text: ModelText, now_s: float) -> None:
        """Give it to the engine."""
        text.handed_s = now_s
        text.begun_s = now_s if text.begun_s is None else text.begun_s
        self.engine.submit(text)

    def note(self, step: ModelStep, now_s: float) -> None:
        """Learn from a step that has ended now."""
        self.rule.note(step)

    def give_up(self, text: ModelText, now_s: float) -> bool:
        """Abort a text; False if this worker has not got it."""
        if text in self.held:
            self.held.remove(text)
        elif text in self.engine.running or text in self.engine.waiting:
            self.abort(text, now_s)
        else:
            return False
        return True

    def abort(self, text: ModelText, now_s: float) -> None:
        """Take a text out of the engine."""
        self.engine.abort(text)
        self.rule.forget(text)


class SlotWorker(ModelWorker):
    """One that takes from the queue only for a free slot."""

    @property
    def has_place(self) -> bool:
        engine = self.engine
        return len(engine.running) + len(engine.waiting) < engine.shape.slots


class PenstockWorker(ModelWorker):
    """Claims, holds back, begins and preempts as a worker of the product does."""

    rule: PastFuture

    def __init__(self, engine: ModelEngine, random: Random, targets: LatencyTargets | None = None) -> None:
        super().__init__(engine, PastFuture(random, targets))
        self.preemptions = 0
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

    def abort(self, text: ModelText, now_s: float) -> None:
        super().abort(text, now_s)
        self._shares.end(text.tenant, now_s)

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
        """The lanes from which a text may be claimed now. Where no place is free, the highest lane alone, if a batch
        text may be preempted for it."""
        slots, texts = self.engine.shape.slots, [*self.engine.running, *self.engine.waiting]
        is_batch = [text.lane == Priority.BATCH for text in self.held]
        if len(texts) >= slots or not all(is_batch):
            blocked = any(text.lane == Priority.INTERACTIVE for text in self.held)
            return () if blocked or not preemptible(self._jobs(), now_s) else (Priority.INTERACTIVE,)
        batch = sum([text.lane == Priority.BATCH for text in texts])
        room = room_for_batch(slots, reserved_slots(slots, None), batch)
        return NOT_BATCH if is_batch or room == 0 else LANES

    def _crowding(self, now_s: float) -> Collection[str]:
        """The tenants that get no place now: those with more than their share, once few slots are free."""
        slots = self.engine.shape.slots
        if len(self.engine.running) + len(self.engine.waiting) < slots - tenant_slots(slots, None):
            return ()
        return self._shares.crowding(slots, now_s)

    def _make_way(self, text: ModelText, queue: TextQueue, now_s: float) -> bool:
        """Preempt batch texts one by one until the gate lets a text of lane interactive begin."""
        if text.lane != Priority.INTERACTIVE:
            return False
        for _ in range(MAX_VICTIMS):
            texts, victims = self._texts(), choose_victims(self._jobs(), 1, now_s)
            for victim in [texts[int(job_id)] for job_id in victims.jobs]:
                self.abort(victim, now_s)
                victim.preemptions += 1
                self.preemptions += 1
                queue.put_back(victim)
            if not victims.jobs or self.admits(text):
                return bool(victims.jobs)
        return False

    def _texts(self) -> list[ModelText]:
        return [*self.engine.running, *self.engine.waiting]

    def _jobs(self) -> list[RunningJob]:
        return [
            RunningJob(f"{place:06}", Priority(text.lane), text.handed_s, 1, text.preemptions > 0, True)
            for place, text in enumerate(self._texts())
            if text.lane == Priority.BATCH
        ]
