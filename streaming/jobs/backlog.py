"""How much waits in each lane, and since when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from streaming.keys import parse_lane
from streaming.priority import Priority
from streaming.redis.client import RedisClient

NEAREST = 32
"""Deadlines looked at, of each partition."""


@dataclass(frozen=True, slots=True)
class LaneDepth:
    """One lane of one model, all partitions together."""

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
    """What all partitions said at one time."""

    lanes: list[LaneDepth]
    due: list[WaitingDeadline]


class Backlog:
    """Stateless; many may share a wire. Every look is one call for each partition: one round trip a server."""

    def __init__(self, wire: RedisClient) -> None:
        self._wire = wire

    async def lanes(self, models: Iterable[str]) -> list[LaneDepth]:
        """Every lane of these models. Raises Unavailable."""
        return (await self.look(models, deadlines=0)).lanes

    async def look(self, models: Iterable[str], deadlines: int = NEAREST) -> BacklogSnapshot:
        """Every lane of these models, and the nearest deadlines of waiting jobs, of all models. Raises Unavailable."""
        models = tuple(models)
        args: list[str | int] = [deadlines, *models]
        answers = await self._wire.calls([("lanes", partition, args) for partition in self._wire.partitions])
        names = [(model, priority) for model in models for priority in Priority]
        parts = zip(*([(now, *lane) for lane in lanes] for now, lanes, _ in answers), strict=True)
        return BacklogSnapshot(
            [_lane(model, priority, each) for (model, priority), each in zip(names, parts, strict=True)],
            [due for now, _, nearest in answers for each in nearest if (due := _due(now, *each)) is not None],
        )


def _lane(model: str, priority: Priority, parts: Iterable[tuple[int, int, int, int, int]]) -> LaneDepth:
    """Of each partition: its time, what waits and runs, the time of the oldest that waits, what was ever put."""
    waiting = running = added = oldest_ms = 0
    for now, here, there, first, put in parts:
        waiting, running, added = waiting + here, running + there, added + put
        oldest_ms = max(oldest_ms, now - first if first else 0)
    return LaneDepth(model, priority, waiting, running, oldest_ms, added)


def _due(now: int, lane: bytes, created: bytes, at: bytes) -> WaitingDeadline | None:
    """None for a job whose record cannot be read."""
    try:
        model, priority = parse_lane(lane.decode())
        return WaitingDeadline(model, priority, max(0, int(float(at)) - now), now - int(float(created)))
    except (ValueError, OverflowError, LookupError, TypeError):
        return None
