"""Detector of abandoned reply addresses: those of API processes that are gone, to which the worker stops sending.

Every address of a job costs a copy of its rows in the log. The worker drops an address only after several checks in a
row, on every Redis server, found no subscriber; they are far enough apart for a process that lost its connection to
reconnect. A process that reconnects later reads what it missed from the log, sees that its address was dropped, and
follows the job again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CHECK_INTERVAL_S = 5.0
MAX_SILENT_CHECKS = 3
"""Checks in a row without a subscriber after which an address counts as abandoned: 10 to 15 s."""


class Listeners:
    """Counts the checks in a row in which each address had no subscriber."""

    def __init__(self, checks: int = MAX_SILENT_CHECKS) -> None:
        self._max_checks = checks
        self._silent: dict[str, int] = {}

    def given_up(self, listening: Mapping[str, int]) -> list[str]:
        """Record one check. Returns the addresses that are now abandoned.

        Args:
            listening: number of subscribers of every address in use; the counts of other addresses are dropped.
        """
        self._silent = {address: self._silent.get(address, 0) + 1 for address, count in listening.items() if count == 0}
        return [address for address, checks in self._silent.items() if checks >= self._max_checks]


def in_use(addresses: Iterable[Iterable[str]], silent: str) -> list[str]:
    """All distinct addresses except `silent`, the placeholder of a job without readers."""
    return sorted({address for each in addresses for address in each if address != silent})
