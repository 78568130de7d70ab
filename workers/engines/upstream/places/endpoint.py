"""Server endpoint: one server of a model, with what is known of it and what runs there."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from workers.engines.upstream.http.address import ServerAddress
from workers.engines.upstream.http.client import UpstreamClient
from workers.engines.upstream.http.errors import without
from workers.engines.upstream.places.breaker import Breaker
from workers.engines.upstream.places.budget import InFlightBudget
from workers.engines.upstream.places.limits import KeyPool, UpstreamKey
from workers.engines.upstream.server.kinds import ServerFacts
from workers.engines.upstream.server.probe import ProbeFailed, ServerProbe, gauges
from workers.engines.upstream.settings import UpstreamSettings

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 60.0
MAX_PROBE_WORDS = 1000
"""Characters of a failed probe's reason."""


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """A request's place at a server, until `ServerEndpoint.leave`."""

    endpoint: ServerEndpoint
    key: UpstreamKey
    cost: int
    """Tokens that it has reserved of the key's limit."""


class ServerEndpoint:
    """One server. It counts what runs there; others send."""

    def __init__(self, url: str, model: str, settings: UpstreamSettings, keys: Sequence[UpstreamKey]) -> None:
        self.url, self._model, self._settings = url, model, settings
        self.client = UpstreamClient(ServerAddress.of(url), settings.connect_s, settings.proxy)
        self.keys = KeyPool(keys)
        self.breaker, self.budget = Breaker(), InFlightBudget(settings.max_in_flight)
        self.facts: ServerFacts | None = None
        self.unfit = ""
        """Why it gets no requests although it answers: it can do less than the model's card says."""
        self.in_flight = 0
        self.held_until = 0.0
        """Until then no request is sent: the server had no room (monotonic)."""
        self.bare_ends = 0
        """Replies in a row that came to their end without a finish reason."""
        self._asked_at = 0.0

    @property
    def ready(self) -> bool:
        """Whether it may get requests."""
        return self.breaker.closed and self.facts is not None and not self.unfit

    def wait_s(self, cost: int, now: float) -> float:
        """Seconds until a request of so many tokens may be sent, as far as the clock decides."""
        _, wait = self.keys.choose(cost, now)
        return max(wait, self.held_until - now, 0.0)

    def enter(self, cost: int, now: float) -> ServerPlace:
        """Take a place."""
        key, _ = self.keys.choose(cost, now)
        key.reserve(cost, now)
        self.in_flight += 1
        return ServerPlace(self, key, cost)

    def share(self, workers: int) -> None:
        """So many workers use this server, this one included."""
        self.budget.share(workers)
        for key in self.keys.keys:
            key.workers = workers

    def leave(self, place: ServerPlace, spent: int) -> None:
        """Give a place back; `spent`: tokens of prompt and reply."""
        self.in_flight -= 1
        place.key.refund(place.cost, min(spent, place.cost), time.monotonic())

    async def probe(self) -> None:
        """Ask the server what it is; the breaker learns whether it is there. Raises ProbeFailed."""
        before, key = self.facts, self.keys.keys[0].secret
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                facts = await ServerProbe(self.client, self._settings, self._model, key).facts()
        except Exception as error:  # noqa: BLE001 - the boundary of a probe: it must not be the last one
            failed = self._failed_probe(error)
            self.breaker.fail_probe(str(failed), time.monotonic(), lasting=failed.lasting)
            raise failed from None
        if facts.assumed and before is not None:  # its API process has just started
            facts = before
        self.facts = facts
        if before is None or before.slots != facts.slots or not self.breaker.closed:
            self.budget.reset(facts.slots or self._settings.slots)
        self.breaker.half_open()

    def _failed_probe(self, error: Exception) -> ProbeFailed:
        if isinstance(error, TimeoutError):
            return ProbeFailed(f"no answer within {PROBE_TIMEOUT_S:g} s")
        if isinstance(error, ProbeFailed):
            return ProbeFailed(without(self.keys.secrets, str(error))[:MAX_PROBE_WORDS], lasting=error.lasting)
        log.exception("%s: a probe cannot read what it says", self.url, exc_info=error)
        return ProbeFailed(f"its pages cannot be read ({type(error).__name__})")

    def fail(self, reason: str, *, request: str = "", down: bool = False, answered_at: float = -math.inf) -> None:
        """A request failed by this server's fault. As in Breaker.fail."""
        was_closed = self.breaker.closed
        self.breaker.fail(reason, time.monotonic(), request=request, down=down, answered_at=answered_at)
        if was_closed and not self.breaker.closed:
            log.warning("%s gets no requests until it is back: %s", self.url, reason)

    async def read_gauges(self, now: float) -> None:
        """Adapt the budget to what the server says of its load, at most once per interval and only while it runs
        something."""
        if self.facts is None or not self.in_flight or now - self._asked_at < self._settings.gauges_s:
            self.budget.saturated = self.budget.saturated and self.in_flight > 0
            return
        self._asked_at = now
        read = await gauges(self.client, self.facts.kind, self.keys.keys[0].secret)
        if read is not None:
            self.budget.note_gauges(*read, self.in_flight, time.monotonic())
