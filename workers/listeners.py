"""Addresses that nobody listens at any more, of API processes that are gone: their rows are no longer logged and sent.

Every address of a job has a copy of its rows in the log. An address is dropped only after several looks in a row, on
every server, that are far enough apart for a process which has lost its connection to be back. Whoever is back later
all the same finds what it missed in the log, sees that its address is gone, and follows again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LOOK_INTERVAL_S = 5.0
LOOKS = 3
"""In a row, after which an address counts as given up: 10 to 15 s."""


class Listeners:
    """Remembers in how many looks each address had no listener."""

    def __init__(self, looks: int = LOOKS) -> None:
        self._looks = looks
        self._silent: dict[str, int] = {}

    def given_up(self, listening: Mapping[str, int]) -> list[str]:
        """The addresses that have now been without a listener often enough. `listening`: all that are in use, with how
        many listen; one that is not among them is forgotten."""
        self._silent = {address: self._silent.get(address, 0) + 1 for address, count in listening.items() if count == 0}
        return [address for address, looks in self._silent.items() if looks >= self._looks]


def in_use(addresses: Iterable[Iterable[str]], silent: str) -> list[str]:
    """Each address once, without the one that stands for nobody."""
    return sorted({address for each in addresses for address in each if address != silent})
