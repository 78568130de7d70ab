"""The scheduler's life: sweep, observe, decide, act, say why; once a tick, whatever Redis does.

Several schedulers may run: one leads and decides, the others only sweep and stand by.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from scheduler.observe import observe
from scheduler.policy import Decision, Limits, State, decide
from scheduler.pools import Pools
from streaming.backlog import Backlog
from streaming.errors import Unavailable
from streaming.fleet import Fleet
from streaming.messages import Process
from streaming.reaper import Reaper
from telemetry.metrics import Metrics

log = logging.getLogger(__name__)

REPORT_S = 2.0
"""How often it says that it is there."""

LEAD_TICKS = 3
LEAD_LEAST_S = 5.0
"""A leader silent for so many ticks, and for so long, is replaced."""


@dataclass(frozen=True, slots=True)
class Me:
    """Who this scheduler is to the fleet."""

    id: str
    pid: int
    host: str

    @property
    def holder(self) -> str:
        """The name it leads under: two machines may use the same id."""
        return f"{self.id}@{self.host}:{self.pid}"

    def process(self, state: str, since: float) -> Process:
        return Process(role="scheduler", id=self.id, pid=self.pid, host=self.host, state=state, since=since)


@dataclass(frozen=True, slots=True)
class Parts:
    """The pieces of the wire a scheduler works with."""

    fleet: Fleet
    backlog: Backlog
    reaper: Reaper
    now_ms: Callable[[], Awaitable[int]]


class Loop:
    """Made once per process; `run` lives until it is told to stop."""

    def __init__(
        self,
        parts: Parts,
        limits: Mapping[str, Limits],
        me: Me,
        metrics: Metrics,
        *,
        tick_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        on_state: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._parts, self._limits, self._me, self._metrics = parts, limits, me, metrics
        self._pools = Pools(parts.fleet)
        self._tick_s, self._clock, self._on_state = tick_s, clock, on_state
        self._began = clock()
        self._since: float | None = None
        self._state = "starting"
        self._down = False
        self._leads = False
        self._states: dict[str, State] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Tick and report until `stop` is set, then take leave."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._every(self._tick_s, self.tick, stop))
            tasks.create_task(self._every(REPORT_S, self.report, stop))
        self._enter("draining")
        await self._tried(self.leave)

    async def tick(self) -> None:
        """One round. Raises Unavailable."""
        await self._parts.reaper.sweep()
        if await self._lead():
            await self._schedule()
        if self._state == "starting":
            self._enter("ready")
            await self.report()

    async def report(self) -> None:
        """Tell the fleet that this scheduler is there. Raises Unavailable."""
        if self._since is None:
            self._since = await self._parts.now_ms() / 1000 - (self._clock() - self._began)
        await self._parts.fleet.report(self._me.process(self._state, self._since))

    async def leave(self) -> None:
        """Tell the fleet that it goes, and let another lead at once. Raises Unavailable."""
        if self._leads:
            await self._parts.fleet.lead(self._me.holder, 1)
        await self._parts.fleet.leave("scheduler", self._me.id)

    def _enter(self, state: str) -> None:
        self._state = state
        self._on_state(state)

    async def _lead(self) -> bool:
        ttl_s = max(LEAD_TICKS * self._tick_s, LEAD_LEAST_S)
        leads = await self._parts.fleet.lead(self._me.holder, int(ttl_s * 1000))
        if leads != self._leads:
            log.info("this scheduler leads now" if leads else "another scheduler leads now")
            self._leads = leads
            self._states.clear()  # the other's plans, not what this one remembers, are what to go on from
        return leads

    async def _schedule(self) -> None:
        published = await self._pools.wanted()
        for seen in await observe(self._limits, self._parts.fleet, self._parts.backlog):
            before = published.get(seen.model)
            state = self._states.get(seen.model) or (None if before is None else State(before))
            decision = decide(seen, self._limits[seen.model], state, self._clock())
            self._metrics.workers_wanted.labels(decision.model).set(decision.want)
            if await self._pools.follow(decision, before):
                self._say(decision, before)
            self._states[seen.model] = decision.state

    def _say(self, decision: Decision, before: int | None) -> None:
        if before is not None:
            self._metrics.decisions.labels(decision.model, "up" if decision.want > before else "down").inc()
        log.info(
            "%s: %d workers wanted: %s",
            decision.model,
            decision.want,
            decision.reason,
            extra={"model": decision.model, "want": decision.want, "was": before, "reason": decision.reason},
        )

    async def _every(self, seconds: float, act: Callable[[], Awaitable[None]], stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._tried(act)
            await _pause(seconds, stop)

    async def _tried(self, act: Callable[[], Awaitable[None]]) -> None:
        """An outage is said once when it begins and once when it ends; in between the workers stay as they are."""
        try:
            await act()
        except Unavailable as error:
            if not self._down:
                log.warning("nothing is scheduled until Redis is back: %s", error)
            self._down = True
        else:
            if self._down:
                log.info("Redis is back: scheduling goes on")
            self._down = False


async def _pause(seconds: float, stop: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass  # the usual case: nobody stopped it
