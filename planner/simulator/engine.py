"""Engine model, iteration by iteration: in-flight batching with a KV cache, prefill, eviction and abort. Pure.

It has no clock: each `step` returns how long it took. A text holds its prompt and what it has generated. A text that is
evicted or aborted loses that and computes it again when it returns.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from streaming.fleet.settings import LatencyTargets
from streaming.order import Priority
from workers.gate import Colocation, Gate, HeldText, KvCapacity, LengthHistory


class StepTime(Protocol):
    """How long a step takes."""

    def step_s(self, texts: int, held: int, prefilled: int, squares: int | None = None) -> float:
        """Seconds of a step that gives `texts` texts a token, with `held` tokens in the KV cache, and computes
        `prefilled` tokens of prompts; `squares`: the sum of the squares of those of each prompt, if it is not one."""
        ...


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Duration of a step in seconds: assumed constants that rank policies, and no claim about any device."""

    fixed_s: float = 0.006
    text_s: float = 0.00003
    """Per text in the batch."""
    held_s: float = 0.0000002
    """Per token in the KV cache."""
    prefill_s: float = 0.00005
    """Per prompt token that the step computes."""

    def step_s(self, texts: int, held: int, prefilled: int, squares: int | None = None) -> float:
        return self.fixed_s + self.text_s * texts + self.held_s * held + self.prefill_s * prefilled


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What one engine can hold, and how fast it is."""

    kv_tokens: int = 20_000
    slots: int = 256
    prefill_tokens: int = 8192
    """Prompt tokens per step."""
    costs: StepTime = StepCosts()
    by_slot: bool = False
    """Whether it works as llama.cpp does: a text takes a free slot at once, prompts are computed in the order of their
    slots, not of their arrival, and the tokens of running texts count among `prefill_tokens`."""


@dataclass(slots=True, eq=False)
class ModelText:
    """One request, and the record of what came of it. Times are seconds of the simulation. `output`: how many tokens it
    will generate, which only the engine knows."""

    prompt: int
    output: int
    limit: int
    """The most tokens it may generate, as its client says."""
    arrived_s: float = 0.0
    lane: str = "standard"
    tenant: str = ""
    generated: int = 0
    to_prefill: int = 0
    """Tokens to compute before its next token."""
    evictions: int = 0
    recomputed: int = 0
    """Tokens that were computed again after evictions."""
    begun_s: float | None = None
    """When an engine got it first."""
    handed_s: float = 0.0
    """When an engine got it last."""
    first_s: float | None = None
    """Its first token."""
    ended_s: float | None = None
    """Its last token; None: it has not ended."""
    preemptions: int = 0
    is_prefilled: bool = False
    """Whether another engine has computed its prompt, whose cache comes with it; an eviction loses that."""

    @property
    def held(self) -> int:
        """Tokens of KV cache, while it runs."""
        return self.prompt + self.generated

    @property
    def ttft_s(self) -> float:
        """Infinite before its first token."""
        return (math.inf if self.first_s is None else self.first_s) - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Seconds for each token after the first: infinite before its end, 0 for one token."""
        if self.first_s is None or self.ended_s is None:
            return math.inf
        return (self.ended_s - self.first_s) / (self.output - 1) if self.output > 1 else 0.0


@dataclass(slots=True)
class ModelStep:
    """What one step did."""

    duration_s: float
    tokens: list[ModelText] = field(default_factory=list)
    """The texts that got a token."""
    ended: list[ModelText] = field(default_factory=list)
    evicted: list[ModelText] = field(default_factory=list)


class ModelEngine:
    """One engine: `submit` texts, and `step` until it has none. It takes a text from its own queue if it fits now, and
    evicts the youngest when they grow."""

    def __init__(self, shape: EngineShape) -> None:
        self.shape = shape
        self.running: list[ModelText] = []
        """The youngest last."""
        self.waiting: deque[ModelText] = deque()
        """Inside the engine, where their order is fixed."""
        self.held = 0
        """Tokens in the KV cache."""
        self._slots: dict[ModelText, int] = {}
        self._free = deque(range(shape.slots)) if shape.by_slot else deque[int]()
        """The slot that was left first is taken first."""

    @property
    def texts(self) -> list[ModelText]:
        """All that it has: those that run, and those that wait inside."""
        return [*self.running, *self.waiting]

    def submit(self, text: ModelText) -> None:
        """Queue a text; one that was aborted continues."""
        self.waiting.append(text)

    def abort(self, text: ModelText) -> None:
        """Remove a text, which keeps what it has generated."""
        if text in self.running:
            self._drop(text)
        else:
            self.waiting.remove(text)

    def step(self) -> ModelStep:
        """Let every running text generate a token, after its prefill."""
        evicted = self._evict()
        decoding = sum([not text.to_prefill for text in self.running]) if self.shape.by_slot else 0
        self._take()
        prefilled = self._prefill(max(0, self.shape.prefill_tokens - decoding))
        tokens = [text for text in self.running if not text.to_prefill]
        seconds = self.shape.costs.step_s(len(tokens), self.held, *prefilled)
        for text in tokens:
            text.generated += 1
        self.held += len(tokens)
        ended = [text for text in tokens if text.generated >= text.output]
        for text in ended:
            self._drop(text)
        return ModelStep(seconds, tokens, ended, evicted)

    def _take(self) -> None:
        budget = self.shape.prefill_tokens - sum([text.to_prefill for text in self.running])
        while self.waiting and len(self.running) < self.shape.slots:
            text = self.waiting[0]
            waits = text.held > budget and budget < self.shape.prefill_tokens and not text.is_prefilled
            if not self._fits(text) or (waits and not self.shape.by_slot):
                break
            budget -= 0 if text.is_prefilled else text.held
            self.waiting.popleft()
            text.to_prefill = 0 if text.is_prefilled else text.held
            self.running.append(text)
            self.held += text.held
            if self.shape.by_slot:
                self._slots[text] = self._free.popleft()

    def _fits(self, text: ModelText) -> bool:
        return self.held + len(self.running) + text.held + 1 <= self.shape.kv_tokens

    def _prefill(self, budget: int) -> tuple[int, int]:
        """Compute up to `budget` tokens of prompts, the oldest first, or those of the first slot. Returns how many, and
        the sum of the squares of those of each."""
        left, squares, texts = budget, 0, [text for text in self.running if text.to_prefill]
        if self.shape.by_slot:
            texts.sort(key=self._slots.__getitem__)
        for text in texts:
            taken = min(left, text.to_prefill)
            text.to_prefill -= taken
            left -= taken
            squares += taken**2
        return budget - left, squares

    def _evict(self) -> list[ModelText]:
        """Evict the youngest texts until the next tokens of the others fit."""
        evicted: list[ModelText] = []
        while len(self.running) > 1 and self.held + len(self.running) > self.shape.kv_tokens:
            text = self.running[-1]
            self._drop(text)
            text.evictions += 1
            text.is_prefilled = False
            text.recomputed += text.held - text.to_prefill
            self._put_back(text)
            evicted.append(text)
        return evicted

    def _put_back(self, text: ModelText) -> None:
        self.waiting.appendleft(text)

    def _drop(self, text: ModelText) -> None:
        self.running.remove(text)
        self.held -= text.held
        if self.shape.by_slot:
            self._free.append(self._slots.pop(text))


class AdmissionRule:
    """What stands between the queue and one engine. This one lets everything through that the engine's queue has room
    for: the engine decides."""

    def admits(self, text: ModelText, engine: ModelEngine) -> bool:
        """Whether the engine gets the text now; then the caller submits it."""
        return len(engine.waiting) < engine.shape.slots

    def note(self, step: ModelStep) -> None:
        """Learn from a step."""

    def forget(self, text: ModelText) -> None:
        """A text that it let through has left the engine before its end, or was not submitted."""


class Greedy(AdmissionRule):
    """Admits while the texts fit as they are now, with a twentieth of the cache free."""

    def admits(self, text: ModelText, engine: ModelEngine) -> bool:
        coming = sum(each.held for each in engine.waiting)
        fits = engine.held + coming + text.held + 1 <= 0.95 * engine.shape.kv_tokens
        return fits and len(engine.running) + len(engine.waiting) < engine.shape.slots


class PastFuture(AdmissionRule):
    """The gate of the workers, as they use it."""

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
        if gate.wait_reason(self._next[1], capacity):
            return False
        if text.lane == Priority.BATCH:
            offline = sum([each.lane == Priority.BATCH for each in engine.texts])
            if self.colocation.wait_reason(text.held, held, offline):
                return False
        self.colocation.begin(self._next[1], held)
        gate.held[str(id(text))] = self._next[1]
        return True

    def note(self, step: ModelStep) -> None:
        """Learn the lengths of texts that ended, and how long first tokens took, but for those of preempted texts."""
        for text in step.tokens:
            if held := self.gate.held.get(str(id(text))):
                held.generated = text.generated
        for text in step.ended:
            held = self.gate.held.get(str(id(text)))
            if held is not None and text.first_s is not None and not text.preemptions:
                self.colocation.note_first(held, text.prompt, text.first_s - text.handed_s)
            self.forget(text)
            self.gate.history.add(text.lane, text.tenant, text.generated)
        self._evicted += len(step.evicted)
        self.gate.reserve.note(len(step.ended), self._evicted)

    def forget(self, text: ModelText) -> None:
        self.gate.held.pop(str(id(text)), None)
