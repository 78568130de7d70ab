"""Slot allocator of the embedded engine: chooses llama.cpp's slot for a request by whose prompt the slot has cached.

A slot keeps the KV cache of its last request, and a request with the same prefix need not compute it again. That shows
in `cached_tokens` and in the time to first token, so a request may reuse only its own tenant's prompts: otherwise one
tenant could guess another's prompts and see which guess was right.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.engines.llamacpp.request import Generation
from workers.engines.prefix import length, shared_length

MIN_SHARED = 0.1
"""Share of a prompt that a slot must have cached to be preferred; otherwise the least recently used slot is chosen."""


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of llama.cpp. Its thread takes requests from `inbox`; None ends the thread."""

    number: int
    inbox: queue.SimpleQueue[Generation | None] = field(default_factory=queue.SimpleQueue)
    owner: str | None = None
    """The tenant whose prompt the slot's KV cache holds; None: unknown, so that it may not be reused."""
    prompt: Sequence[str | int] = ()
    """The cached prompt."""
    last_used: int = 0

    def begin(self, generation: Generation) -> bool:
        """Return whether this request may reuse the slot's cache. If not, no other request may either until `own`: a
        request that is refused before its prefill leaves the previous request's cache in place."""
        reusable = self.owner == generation.tenant
        if not reusable:
            self.disown()
        return reusable

    def own(self, generation: Generation) -> None:
        """Record that the slot's cache holds only this request's prompt, or the part that was computed."""
        self.owner, self.prompt = generation.tenant, generation.prompt

    def disown(self) -> None:
        """Forbid the reuse of the slot's cache."""
        self.owner, self.prompt = None, ()


class Slots:
    """All slots of one engine. Not thread-safe: the engine's lock guards it."""

    def __init__(self, count: int) -> None:
        self.all = [Slot(number) for number in range(count)]
        self._idle = list(self.all)
        self._waiting: deque[Generation] = deque()
        self._uses = 0

    def submit(self, generation: Generation) -> None:
        """Give the request to an idle slot's thread, or queue it for the first slot that is free."""
        if not self._idle:
            self._waiting.append(generation)
            return
        slot = max(self._idle, key=lambda each: self._fitness(each, generation))
        self._idle.remove(slot)
        self._give(slot, generation)

    def free(self, slot: Slot) -> None:
        """Give an idle slot's thread the oldest waiting request, or mark the slot idle."""
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
        """Sort key of a slot: the length of this tenant's prompt prefix in its cache. Among equals the most recently
        used slot is best, or the least recently used one if nothing is cached."""
        shared = 0
        if slot.owner == generation.tenant:
            shared = shared_length(slot.prompt, generation.prompt)
            shared = shared if shared >= MIN_SHARED * length(generation.prompt) else 0
        return shared, slot.last_used if shared else -slot.last_used
