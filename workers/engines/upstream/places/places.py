"""Places at servers: gives each waiting request a place at one of a model's servers, the most urgent first."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.engines.upstream.places.endpoint import ServerEndpoint, ServerPlace

MAX_SLEEP_S = 5.0


@dataclass(order=True, slots=True)
class _Waiting:
    rank: tuple[float, int]
    cost: int = field(compare=False)
    place: asyncio.Future[ServerPlace | None] = field(compare=False)


class ServerPlaces:
    """The queue in front of the servers. It holds little: a worker claims no more than fits."""

    def __init__(self, endpoints: Sequence[ServerEndpoint]) -> None:
        self._endpoints = endpoints
        self._waiting: list[_Waiting] = []
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return sum(not each.place.done() for each in self._waiting)

    @property
    def ready(self) -> list[ServerEndpoint]:
        """The servers that may get requests."""
        return [each for each in self._endpoints if each.ready]

    async def wait(self, priority: float, cost: int) -> ServerPlace | None:
        """A place for one request, once there is one; None if no server is there.

        Args:
            priority: higher first.
            cost: tokens of its prompt and its longest answer.
        """
        self._number += 1
        place: asyncio.Future[ServerPlace | None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, _Waiting((-priority, self._number), cost, place))
        self.fill()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and (taken := place.result()) is not None:
                self.leave(taken, 0)
            raise

    def leave(self, place: ServerPlace, spent: int) -> None:
        """Give a place back."""
        place.endpoint.leave(place, spent)
        self.fill()

    def fill(self) -> None:
        """Give out the places that are free now."""
        if not self.ready:
            for each in self._waiting:
                if not each.place.done():
                    each.place.set_result(None)
            self._waiting.clear()
            return
        now = time.monotonic()
        while self._waiting:
            first = self._waiting[0]
            if not first.place.done():
                endpoint = self._choose(first.cost, now)
                if endpoint is None:
                    self._wake_in(self._soonest(first.cost, now))
                    return
                first.place.set_result(endpoint.enter(first.cost, now))
            heapq.heappop(self._waiting)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _choose(self, cost: int, now: float) -> ServerEndpoint | None:
        """Of the servers with room, the one that runs the smallest part of what it may run."""
        free = [each for each in self.ready if each.budget.has_room(each.in_flight) and each.wait_s(cost, now) <= 0]
        return min(free, key=lambda each: each.in_flight / each.budget.limit, default=None)

    def _soonest(self, cost: int, now: float) -> float:
        waits = [wait for each in self.ready if (wait := each.wait_s(cost, now)) > 0]
        return min([*waits, MAX_SLEEP_S])

    def _wake_in(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.fill)
