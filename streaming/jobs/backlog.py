"""Backlog: counts the waiting and running jobs of each lane, with the oldest job's age and the nearest deadlines.

It also says how long the next job of each tenant has waited.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from streaming.keys import parse_lane
from streaming.order import Priority
from streaming.redis.client import ClientUser

MAX_DEADLINES = 32
"""Deadlines read from each partition."""
MAX_TENANTS = 50
"""Tenants read of each lane of each partition: 5 us each, in which the server does nothing else."""


@dataclass(frozen=True, slots=True)
class LaneDepth:
    """Counts of one lane of one model, summed over all partitions."""

    model: str
    priority: Priority
    waiting: int
    running: int
    oldest_ms: int
    """Age of the job that waits longest; 0 when none waits."""
    added: int = 0
    """Jobs ever put here; 0 on a server that does not count them."""


@dataclass(frozen=True, slots=True)
class WaitingDeadline:
    """A waiting job with a deadline."""

    model: str
    priority: Priority
    in_ms: int
    """Until it expires."""
    age_ms: int


@dataclass(frozen=True, slots=True)
class BacklogSnapshot:
    """Lanes and deadlines of all partitions at one time."""

    lanes: list[LaneDepth]
    due: list[WaitingDeadline]


class Backlog(ClientUser):
    """Reads the backlog, with one call per partition: one round trip per server."""

    async def lanes(self, models: Iterable[str]) -> list[LaneDepth]:
        """Count every lane of these models. Raises Unavailable."""
        return (await self.look(models, deadlines=0)).lanes

    async def ages(self, models: Iterable[str]) -> dict[tuple[str, Priority], dict[str, int]]:
        """Read how long the next job of each tenant has waited, in milliseconds, by lane: of each partition, of the
        MAX_TENANTS that were served least. Raises Unavailable."""
        models = tuple(models)
        args: list[str | int] = [MAX_TENANTS, *models]
        answers = await self._client.calls([("ages", partition, args) for partition in self._client.partitions])
        names = [(model, priority) for model in models for priority in Priority]
        parts = zip(*([(now, lane) for lane in lanes] for now, lanes in answers), strict=True)
        return {name: _oldest(each) for name, each in zip(names, parts, strict=True)}

    async def look(self, models: Iterable[str], deadlines: int = MAX_DEADLINES) -> BacklogSnapshot:
        """Count every lane of these models, and read the nearest deadlines of waiting jobs of all models. Raises
        Unavailable."""
        models = tuple(models)
        args: list[str | int] = [deadlines, *models]
        answers = await self._client.calls([("lanes", partition, args) for partition in self._client.partitions])
        names = [(model, priority) for model in models for priority in Priority]
        parts = zip(*([(now, *lane) for lane in lanes] for now, lanes, _ in answers), strict=True)
        return BacklogSnapshot(
            [_lane(model, priority, each) for (model, priority), each in zip(names, parts, strict=True)],
            [due for now, _, nearest in answers for each in nearest if (due := _due(now, *each)) is not None],
        )


def _oldest(parts: Iterable[tuple[int, list[bytes | int]]]) -> dict[str, int]:
    """Merge one lane's tenants of all partitions: the longest wait of each, in milliseconds."""
    found: dict[str, int] = {}
    for now, pairs in parts:
        for name, since in zip(pairs[::2], pairs[1::2], strict=True):
            tenant = bytes(name).decode()
            found[tenant] = max(found.get(tenant, 0), now - int(since))
    return found


def _lane(model: str, priority: Priority, parts: Iterable[tuple[int, int, int, int, int]]) -> LaneDepth:
    """Sum one lane. `parts`, by partition: its time (ms), waiting, running, the oldest waiting job's time, ever put."""
    waiting = running = added = oldest_ms = 0
    for now, here, there, first, put in parts:
        waiting, running, added = waiting + here, running + there, added + put
        oldest_ms = max(oldest_ms, now - first if first else 0)
    return LaneDepth(model, priority, waiting, running, oldest_ms, added)


def _due(now: int, lane: bytes, created: bytes, at: bytes) -> WaitingDeadline | None:
    """Decode a deadline; None for a job whose record is malformed."""
    try:
        model, priority = parse_lane(lane.decode())
        return WaitingDeadline(model, priority, max(0, int(float(at)) - now), now - int(float(created)))
    except (ValueError, OverflowError, LookupError, TypeError):
        return None
