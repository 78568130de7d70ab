"""Slot allocator of the embedded engine: which slot of llama.cpp runs a request, and whose prompt that slot has cached.

A slot keeps the KV cache of the request that ran in it last, and a request that begins with the same tokens is spared
their computation. That saving shows in `cached_tokens` and in the time to the first token, so a request may only build
on a prompt of its own tenant: otherwise one tenant could guess another's prompts and see which guess was right.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.engines.llamacpp.request import Generation
from workers.engines.prefix import length, shared_length

MIN_SHARED = 0.1
"""Part of a prompt that a slot must have cached to be chosen for it; for less, the least recently used slot is."""


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of llama.cpp. `inbox` is what its thread waits for; None ends the thread."""

    number: int
    inbox: queue.SimpleQueue[Generation | None] = field(default_factory=queue.SimpleQueue)
    owner: str | None = None
    """The tenant whose prompt the slot's KV cache holds; None: unknown, so nothing in it may be used again."""
    prompt: Sequence[str | int] = ()
    """That prompt."""
    last_used: int = 0

    def begin(self, generation: Generation) -> bool:
        """Whether this request may use what the slot has cached. Until `own`, nobody's next request may: a request that
        is refused before its prompt is computed leaves the cache of the one before it in place."""
        reusable = self.owner == generation.tenant
        if not reusable:
            self.disown()
        return reusable

    def own(self, generation: Generation) -> None:
        """The slot's cache holds this request's prompt, or the part of it that was computed, and nothing else."""
        self.owner, self.prompt = generation.tenant, generation.prompt

    def disown(self) -> None:
        """No request may use what the slot has cached."""
        self.owner, self.prompt = None, ()


class Slots:
    """All slots of one engine. Not thread-safe: the engine's lock guards it."""

    def __init__(self, count: int) -> None:
        self.all = [Slot(number) for number in range(count)]
        self._idle = list(self.all)
        self._waiting: deque[Generation] = deque()
        self._uses = 0

    def submit(self, generation: Generation) -> None:
        """Give the request to an idle slot's thread, or let it wait for the first slot that is free."""
        if not self._idle:
            self._waiting.append(generation)
            return
        slot = max(self._idle, key=lambda each: self._fitness(each, generation))
        self._idle.remove(slot)
        self._give(slot, generation)

    def free(self, slot: Slot) -> None:
        """The slot's thread has nothing to do: give it the oldest waiting request."""
        if self._waiting:
            self._give(slot, self._waiting.popleft())
        else:
            self._idle.append(slot)

    def _give(self, slot: Slot, generation: Generation) -> None:
        self._uses += 1
        slot.last_used = self._uses
        slot.inbox.put(generation)

    @staticmethod
    def _fitness(slot: Slot, generation: Generation) -> tuple[int, int]:
        """What the slot has cached of the prompt, if it is this tenant's. Of several that have as much the last used
        one is best, whose prompt may go on as this one does; of those that have nothing the first used one."""
        shared = 0
        if slot.owner == generation.tenant:
            shared = shared_length(slot.prompt, generation.prompt)
            shared = shared if shared >= MIN_SHARED * length(generation.prompt) else 0
        return shared, slot.last_used if shared else -slot.last_used
