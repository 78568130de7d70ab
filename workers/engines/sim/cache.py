"""Prefix cache of the simulated engine: how much of a prompt was computed before, for the same tenant.

A model of what real engines keep of finished requests, so that tests of the whole path see what a tenant sees.
"""

from __future__ import annotations

from collections import OrderedDict

from workers.engines.prefix import shared_characters


class PrefixCache:
    """The last prompts of all tenants; one tenant's are never used for another's."""

    def __init__(self, prompts: int) -> None:
        self._size = prompts
        self._kept: OrderedDict[tuple[str, str], None] = OrderedDict()

    def use(self, tenant: str, prompt: str) -> int:
        """The characters of this prompt that are cached; all of it is from now on."""
        known = [kept for owner, kept in self._kept if owner == tenant]
        cached = max((shared_characters(kept, prompt) for kept in known), default=0)
        self._kept[tenant, prompt] = None
        self._kept.move_to_end((tenant, prompt))
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)
        return cached
