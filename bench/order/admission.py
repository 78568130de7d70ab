"""Admission rules in front of the engine model: which waiting text an engine gets, and when.

`simulated` drives one engine over a list of texts under one rule, and returns what came of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Protocol

from msgspec import Struct

from bench.order.engine import EngineShape, KvPolicy, ModelEngine, ModelStep, ModelText
from workers.gate.gate import Gate, HeldText, KvCapacity
from workers.gate.lengths import LengthHistory

CURVE_S = 5.0


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


class Ungated:
    """The engine takes everything at once, and decides by its own policy."""

    def __init__(self, kv_policy: KvPolicy) -> None:
        self.kv_policy = kv_policy

    def admits(self, text: ModelText, engine: ModelEngine) -> bool:
        return len(engine.waiting) < engine.shape.slots

    def note(self, step: ModelStep) -> None:
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


class PastFuture:
    """The gate of the workers, as they use it."""

    kv_policy: KvPolicy = "MAX_UTILIZATION"

    def __init__(self, random: Random) -> None:
        self.gate = Gate(LengthHistory(), random)
        self._evicted = 0
        self._next: tuple[ModelText, HeldText] | None = None
        """The text that waits, with its draws."""

    def admits(self, text: ModelText, engine: ModelEngine) -> bool:
        shape, gate = engine.shape, self.gate
        if self._next is None or self._next[0] is not text:
            self._next = text, gate.text(text.lane, text.tenant, text.prompt, text.limit, text.generated)
        capacity = KvCapacity(shape.slots, shape.kv_tokens, 0, gate.reserve.share)
        if gate.admit(self._next[1], capacity).admitted:
            gate.held[str(id(text))] = self._next[1]
            return True
        return False

    def note(self, step: ModelStep) -> None:
        for text in step.tokens:
            self.gate.held[str(id(text))].generated += 1
        for text in step.ended:
            del self.gate.held[str(id(text))]
            self.gate.history.add(text.lane, text.tenant, text.generated)
        self._evicted += len(step.evicted)
        self.gate.reserve.note(len(step.ended), self._evicted)


class Outcome(Struct, frozen=True, kw_only=True):
    """What came of one simulation."""

    seconds: float
    tokens: int
    evictions: int
    evicted_texts: int
    recomputed: int
    kv_use: float
    """Mean share of the KV cache in use."""
    most_running: int
    steps: int
    curve: list[tuple[float, float, int]]
    """(second, share of the KV cache in use, evictions so far), about once in five seconds."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def simulated(texts: Sequence[ModelText], rule: AdmissionRule, shape: EngineShape) -> Outcome:
    """Run the texts, which arrive in this order at their times, through one engine."""
    engine, coming, backlog = ModelEngine(shape), deque(texts), deque[ModelText]()
    now = used = 0.0
    tokens = evictions = most = steps = 0
    curve: list[tuple[float, float, int]] = []
    while coming or backlog or not engine.is_idle:
        while coming and coming[0].arrived_s <= now:
            backlog.append(coming.popleft())
        while backlog and rule.admits(backlog[0], engine):
            engine.submit(backlog.popleft())
        if engine.is_idle:
            now = max(now, coming[0].arrived_s)
            continue
        step = engine.step()
        rule.note(step)
        now += step.duration_s
        used += step.duration_s * engine.held / shape.kv_tokens
        steps, most = steps + 1, max(most, len(engine.running))
        tokens, evictions = tokens + len(step.tokens), evictions + len(step.evicted)
        if now >= CURVE_S * len(curve):
            curve.append((round(now, 1), round(engine.held / shape.kv_tokens, 3), evictions))
    return Outcome(
        seconds=now,
        tokens=tokens,
        evictions=evictions,
        evicted_texts=sum(text.evictions > 0 for text in texts),
        recomputed=sum(text.recomputed for text in texts),
        kv_use=used / now,
        most_running=most,
        steps=steps,
        curve=curve,
    )
