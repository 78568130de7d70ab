"""Deadline queue: tracks one timeout for many connections, at one dictionary operation each.

All items of a queue have the same timeout, so they expire in the order in which they entered, and a sweep reads only
the expired ones. That is cheaper than a timer of the event loop for each connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class DeadlineQueue(Generic[Item]):
    """Items that expire `timeout_s` after they entered.

    Args:
        timeout_s: how long an item may stay.
        on_expired: called by `sweep` with each item that stayed longer; the item has left the queue by then.
    """

    __slots__ = ("_entered", "_on_expired", "timeout_s")

    def __init__(self, timeout_s: float, on_expired: Callable[[Item], None]) -> None:
        self.timeout_s = timeout_s
        self._on_expired = on_expired
        self._entered: dict[Item, float] = {}

    def __len__(self) -> int:
        return len(self._entered)

    def enter(self, item: Item, now_s: float) -> None:
        """Start the item's timeout. An item that is in the queue must leave it first."""
        self._entered[item] = now_s

    def leave(self, item: Item) -> None:
        """End the item's timeout. Idempotent."""
        self._entered.pop(item, None)

    def sweep(self, now_s: float, at_most: int) -> int:
        """Expire up to `at_most` items whose timeout has passed; returns how many expired."""
        last_s = now_s - self.timeout_s
        expired: list[Item] = []
        for item, entered_s in self._entered.items():
            if entered_s > last_s or len(expired) == at_most:
                break
            expired.append(item)
        for item in expired:
            del self._entered[item]
        for item in expired:
            self._on_expired(item)
        return len(expired)
