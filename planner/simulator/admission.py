"""Admission rules in front of the engine model: which waiting text an engine gets, and when. Pure."""

from __future__ import annotations

from random import Random
from typing import Protocol

from planner.simulator.engine import KvPolicy, ModelEngine, ModelStep, ModelText
from streaming.fleet.settings import LatencyTargets
from streaming.priority import Priority
from workers.gate import Colocation, Gate, HeldText, KvCapacity, LengthHistory


class AdmissionRule(Protocol):
    """What stands between the queue and one engine."""

    kv_policy: KvPolicy
    """Of the engine behind it."""

    def admits(self, text: ModelText, engine: ModelEngine) -> bool:
        """Whether the engine gets the text now; then the caller submits it."""
        ...

    def note(self, step: ModelStep) -> None:
        """Learn from a step."""
        ...

    def forget(self, text: ModelText) -> None:
        """A text that it let through has left the engine before its end, or was not submitted."""
        ...


class Ungated:
    """The engine takes everything at once, and decides by its own policy."""

    def __init__(self, kv_policy: KvPolicy) -> None:
        self.kv_policy = kv_policy

    def admits(self, text: ModelText, engine: ModelEngine) -> bool:
        return engine.shape.by_rank or len(engine.waiting) < engine.shape.slots

    def note(self, step: ModelStep) -> None:
        return

    def forget(self, text: ModelText) -> None:
        return


class Greedy:
    """Admits while the texts fit as they are now, with a twentieth of the cache free."""

    kv_policy: KvPolicy = "MAX_UTILIZATION"

    def admits(self, text: ModelText, engine: ModelEngine) -> bool:
        coming = sum(each.held for each in engine.waiting)
        fits = engine.held + coming + text.held + 1 <= 0.95 * engine.shape.kv_tokens
        return fits and len(engine.running) + len(engine.waiting) < engine.shape.slots

    def note(self, step: ModelStep) -> None:
        return

    def forget(self, text: ModelText) -> None:
        return


class PastFuture:
    """The gate of the workers, as they use it."""

    kv_policy: KvPolicy = "MAX_UTILIZATION"

    def __init__(self, random: Random, targets: LatencyTargets | None = None) -> None:
        """`targets`: latencies that chats keep beside lane batch."""
        self.gate = Gate(LengthHistory(), random)
        self.colocation = Colocation(targets.ttft_ms, targets.itl_ms) if targets else Colocation()
        self._evicted = 0
        self._next: tuple[ModelText, HeldText] | None = None
        """The text that waits, with its draws."""

    def admits(self, text: ModelText, engine: ModelEngine) -> bool:
        shape, gate, held = engine.shape, self.gate, self.gate.held.values()
        if self._next is None or self._next[0] is not text:
            self._next = text, gate.text(text.lane, text.tenant, text.prompt, text.limit, text.generated)
        capacity = KvCapacity(shape.slots, shape.kv_tokens, 0, gate.reserve.share)
        if not gate.admit(self._next[1], capacity).admitted:
            return False
        if text.lane == Priority.BATCH and not self._lets_in(text, engine):
            return False
        self.colocation.begin(self._next[1], held)
        gate.held[str(id(text))] = self._next[1]
        return True

    def _lets_in(self, text: ModelText, engine: ModelEngine) -> bool:
        offline = sum([each.lane == Priority.BATCH for each in (*engine.running, *engine.waiting)])
        return self.colocation.admit(text.held, self.gate.held.values(), offline).admitted

    def note(self, step: ModelStep) -> None:
        for text in step.tokens:
            if held := self.gate.held.get(str(id(text))):
                held.generated = text.generated
        for text in step.ended:
            self.note_first(text)
            self.forget(text)
            self.gate.history.add(text.lane, text.tenant, text.generated)
        self._evicted += len(step.evicted)
        self.gate.reserve.note(len(step.ended), self._evicted)

    def note_first(self, text: ModelText) -> None:
        """Learn how long the first token of a text took that was never preempted."""
        held = self.gate.held.get(str(id(text)))
        if held is not None and text.first_s is not None and not text.preemptions:
            self.colocation.note_first(held, text.prompt, text.first_s - text.handed_s)

    def forget(self, text: ModelText) -> None:
        self.gate.held.pop(str(id(text)), None)
