"""Prefix cache of the simulated engine: counts how much of a prompt an earlier prompt of the same tenant shares.

It models what real engines cache of finished requests, so that end-to-end tests see what a tenant sees.
"""

from __future__ import annotations

from collections import OrderedDict

from workers.engines.prefix import shared_characters


class PrefixCache:
    """LRU cache of prompts. A tenant's prompt matches only that tenant's earlier prompts."""

    def __init__(self, prompts: int) -> None:
        self._size = prompts
        self._kept: OrderedDict[tuple[str, str], None] = OrderedDict()

    def use(self, tenant: str, prompt: str) -> int:
        """Return how many characters of this prompt are cached, and cache all of it."""
        known = [kept for owner, kept in self._kept if owner == tenant]
        cached = max((shared_characters(kept, prompt) for kept in known), default=0)
        self._kept[tenant, prompt] = None
        self._kept.move_to_end((tenant, prompt))
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)
        return cached
