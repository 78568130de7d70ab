"""Slot shares: which tenants hold more than their share of one worker's slots while others use it, too. Pure.

Of the tenants that use a worker, each has the share of its slots that its weight is of all their weights.

A worker keeps a few slots free of such tenants (`tenant_slots`), so that a light tenant's job begins at once and does
not wait until a job of the flooding one ends. Nothing is kept while a single tenant uses the worker. Other slots are
reserved from lane batch (`reserved_slots`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from streaming.jobs.settings import DEFAULT_WEIGHT, NO_WEIGHTS

ACTIVE_S = 60.0
"""How long after its last text a tenant counts as one that uses the worker."""
SLOTS_PER_KEPT = 128
MAX_CROWDING = 16
"""Tenants that `crowding` names, those with the most texts."""


def tenant_slots(slots: int, wanted: int | None) -> int:
    """Slots that tenants with more than their share may not fill, never all of them. `wanted` None: one in 128,
    rounded; so none of fewer than 64, where a slot is a large part of what the worker computes."""
    usual = (2 * slots + SLOTS_PER_KEPT) // (2 * SLOTS_PER_KEPT)
    return min(slots - 1, usual if wanted is None else wanted)


def reserved_slots(slots: int, wanted: int | None) -> int:
    """Slots that lane batch may not fill, never all of them. `wanted` None: one in sixty-four, at least one."""
    return min(slots - 1, max(1, slots // 64) if wanted is None else wanted)


def room_for_batch(slots: int, reserved: int, batch_texts: int) -> int | None:
    """How many more jobs of lane batch may be held while the reserved slots stay free. None: any number."""
    return max(0, slots - reserved - batch_texts) if reserved else None


class SlotShares:
    """The tenants of one worker's texts. Times are monotonic seconds."""

    def __init__(self, weights: Mapping[str, float] = NO_WEIGHTS) -> None:
        """`weights`: of the tenants that have another one than DEFAULT_WEIGHT."""
        self._weights = weights
        self._texts = Counter[str]()
        """By tenant, the texts that the engine has."""
        self._left: dict[str, float] = {}
        """By tenant without texts, when its last one ended; the oldest first."""

    def begin(self, tenant: str) -> None:
        """The engine gets a text of a tenant."""
        self._texts[tenant] += 1
        self._left.pop(tenant, None)

    def end(self, tenant: str, now: float) -> None:
        """A text of a tenant has left the engine."""
        self._texts[tenant] -= 1
        if not self._texts[tenant]:
            del self._texts[tenant]
            self._left[tenant] = now

    def crowding(self, slots: int, now: float) -> tuple[str, ...]:
        """The tenants that hold more than their share of the slots; () if no other has used the worker lately."""
        for tenant in [tenant for tenant, ended in self._left.items() if ended < now - ACTIVE_S]:
            del self._left[tenant]
        tenants = len(self._texts) + len(self._left)
        if tenants < 2:
            return ()
        known = [tenant for tenant in self._weights if tenant in self._texts or tenant in self._left]
        total = DEFAULT_WEIGHT * (tenants - len(known)) + sum([self._weights[tenant] for tenant in known])
        over = Counter(
            {
                tenant: texts
                for tenant, texts in self._texts.items()
                if texts > max(1.0, slots * self._weights.get(tenant, DEFAULT_WEIGHT) / total)
            }
        )
        return tuple([tenant for tenant, _ in over.most_common(MAX_CROWDING)])
