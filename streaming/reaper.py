"""Take work from dead hands: fence lapsed workers, put their jobs back, expire what waited too long.

Any process may sweep, as often as it likes: each sweep is one atomic script per partition.
"""

from __future__ import annotations

from dataclasses import dataclass

from streaming.lease import LOG_KEEP_S
from streaming.wire import Wire

MOST_WORKERS = 4
MOST_JOBS = 256
"""Per sweep, so that a script never holds the server for long."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep did."""

    lapsed_workers: int = 0
    requeued: int = 0
    expired: int = 0
    given_up: int = 0

    def __bool__(self) -> bool:
        return any((self.lapsed_workers, self.requeued, self.expired, self.given_up))


class Reaper:
    """Stateless; many may share a wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def sweep(self) -> Swept:
        """Raises Unavailable."""
        most_attempts = self._wire.settings.max_attempts
        answers = await self._wire.calls(
            [("reap", p, (MOST_WORKERS, MOST_JOBS, most_attempts, LOG_KEEP_S)) for p in self._wire.partitions]
        )
        return Swept(*(sum(column) for column in zip(*answers, strict=True)))
