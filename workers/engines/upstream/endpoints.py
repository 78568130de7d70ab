"""Servers of a model: how much each takes, with which key, and which are open."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.config import ConfigError, hide
from penstock.engine import ModelCard
from penstock.loops import spawn
from workers.engines.upstream.http import BrokenReply, ConnectError, ServerAddress, UpstreamClient, proxy_for, without
from workers.engines.upstream.server import ProbeFailed, ServerFacts, ServerProbe, gauges, lacking
from workers.engines.upstream.settings import UpstreamSettings

if TYPE_CHECKING:
    from workers.engines.upstream.generation import StreamReader

MAX_FAILURES = 3
MIN_OPEN_S, MAX_OPEN_S = 0.5, 15.0
ANSWERS_S = 1.0
"""So long after its last token a server counts as one that answers, also if it fails several requests at once."""
PROBE_INTERVAL_S = 1.0
"""Between two probes of a server that does not answer them, give or take a quarter: workers do not ask together."""


Fault: TypeAlias = Literal["", "down", "cut"]


class Breaker:
    """Circuit breaker of one server; `now` in monotonic seconds throughout.

    It opens at once when no connection can be opened, and otherwise after failures of MAX_FAILURES requests in a row.
    While the server does not answer probes, one is due about every second: each costs it one connection, and its return
    is seen soon. If a probe succeeds, the breaker is half-open: requests are sent, and the first that fails opens it
    again, for twice as long each time until an answer is completed. So a server that answers probes and fails requests
    is left alone.

    One request counts once, however often it fails, and failures while the server gives tokens to other requests are
    not in a row: they may be the requests' own fault, and bad requests must not keep a server from the others.
    """

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        """`draw`: a random number from 0 to 1."""
        self.reason = ""
        """Why it is open; "" while it is closed."""
        self._draw = draw
        self._failures = 0
        """Requests that have failed in a row."""
        self._failed: set[str] = set()
        """Their names."""
        self._failing_since = -math.inf
        self._delay_s = self._lasting_delay_s = MIN_OPEN_S
        self._probe_at = 0.0
        self._probing = False
        self.in_doubt = False
        """Whether it is open only until a probe says if the server is there."""

    @property
    def closed(self) -> bool:
        """Whether requests may be sent."""
        return not self.reason

    def succeed(self) -> None:
        """An answer was completed. What only other settings change is known by a probe alone."""
        self._forget()
        self._delay_s = MIN_OPEN_S
        if self._lasting_delay_s == MIN_OPEN_S:
            self.reason, self._probing, self.in_doubt = "", False, False

    def half_open(self) -> None:
        """A probe found the server there."""
        if not self.closed and not self.in_doubt:
            self._failures = MAX_FAILURES - 1
        self.reason, self._probing, self.in_doubt, self._lasting_delay_s = "", False, False, MIN_OPEN_S

    def fail(self, reason: str, now: float, how: Fault = "", name: str = "", answered_at: float = -math.inf) -> None:
        """A request failed by the server's fault.

        Args:
            how: "down": the server took no connection. "cut": the connection ended without a token, as those to a proxy
                end whose server is gone. Once may be chance; if it happens to the same request again, a probe decides
                before anything else is sent.
            name: of the request, the same each time it is sent; "": it has none, and counts each time.
            answered_at: when another request last got a token.
        """
        if answered_at > min(self._failing_since, now - ANSWERS_S):
            self._forget()
        self._failing_since = self._failing_since if self._failures else now
        again = name in self._failed
        if not again:
            self._failures += 1
            self._failed |= {name} - {""}
        if self.closed and (how == "down" or self._failures >= MAX_FAILURES):
            self.reason, self._probe_at = reason, now + self._delay_s
            self._delay_s = min(2 * self._delay_s, MAX_OPEN_S)
        elif self.closed and how == "cut" and again:
            self.reason, self._probe_at, self.in_doubt = reason, now, True

    def _forget(self) -> None:
        self._failures, self._failed = 0, set()

    def fail_probe(self, reason: str, now: float, *, lasting: bool = False) -> None:
        """A probe failed. `lasting`: by what only other settings change, so the next ones are made ever later."""
        delay_s = PROBE_INTERVAL_S * (0.75 + self._draw() / 2)
        if lasting:
            self._lasting_delay_s = min(2 * self._lasting_delay_s, MAX_OPEN_S)
            delay_s = max(delay_s, self._lasting_delay_s)
        self.reason, self._probe_at, self._probing, self.in_doubt = reason, now + delay_s, False, False

    def may_probe(self, now: float) -> bool:
        """Whether a probe is due; if so, it counts as begun, and `half_open` or `fail_probe` must follow."""
        if self.closed or self._probing or now < self._probe_at:
            return False
        self._probing = True
        return True


START = 16
"""Slots at first of a server that does not say how many requests it runs."""
START_FACTOR = 2.0
BUSY_FACTOR, WAITING_FACTOR = 0.5, 0.9
MAX_KV = 0.8
"""Share of the KV cache in use from which on no more is begun."""
CUT_INTERVAL_S = 1.0
"""Within this time one cut is enough: what is in flight was sent before it."""


class InFlightBudget:
    """The budget of one server; `now` is in monotonic seconds.

    Requests that wait inside a server are ordered by it, not by our lanes. So the budget grows while the server
    computes all that it has, and shrinks when requests wait in it, when its KV cache fills up, or when it refuses one.
    A new server with gauges is tried with twice as many each time they say that none waits, until one does (TCP's slow
    start).
    """

    def __init__(self, cap: int, slots: int = 0) -> None:
        """
        Args:
            cap: the most, by the settings.
            slots: how many the server runs at once, if it says so.
        """
        self._cap, self._limit = cap, 1.0
        self.workers = 1
        """How many workers share the budget, each an equal part."""
        self._cut_at = -math.inf
        self.reset(slots)

    @property
    def limit(self) -> int:
        """Requests at once."""
        return max(1, min(int(self._limit), self._most // self.workers))

    def reset(self, slots: int) -> None:
        """Begin again, with a server that runs `slots` at once; 0: it does not say."""
        self._most = min(self._cap, slots) if slots else self._cap
        self._limit = float(self._most if slots else min(self._cap, START))
        self._clean, self.saturated = 0, False
        """`saturated`: whether the gauges last said that the server has no room."""
        self._starting = not slots
        """Whether it was never too much yet."""

    def has_room(self, in_flight: int) -> bool:
        """Whether one more request may be sent. With none in flight always: others may hold the gauges up."""
        return in_flight < self.limit and not (self.saturated and in_flight)

    def note_success(self) -> None:
        """An answer was completed. After as many as the limit, the limit grows by one."""
        self._clean += 1
        if self._clean >= self.limit and not self.saturated:
            self._limit, self._clean = min(self._limit + 1, float(self._most)), 0

    def note_busy(self, now: float) -> None:
        """The server refused a request for want of room."""
        self._cut(BUSY_FACTOR, now)

    def note_gauges(self, waiting: float, kv_share: float, in_flight: int, now: float) -> None:
        """The server says how many requests wait in it, and how full its KV cache is; `in_flight`: this worker's there.
        Those that do not wait are what it runs: no more are sent, but at least half as many as before."""
        self.saturated = waiting > 0 or kv_share > MAX_KV
        if waiting > 0:
            runs = (in_flight - waiting) / max(1.0, min(self._limit, self._most))
            self._cut(max(BUSY_FACTOR, min(WAITING_FACTOR, runs)), now)
        elif self._starting and not self.saturated and in_flight >= self.limit:
            self._limit, self._clean = min(START_FACTOR * self._limit, float(self._most)), 0

    def _cut(self, factor: float, now: float) -> None:
        self._clean, self._starting = 0, False
        if now - self._cut_at >= CUT_INTERVAL_S:
            self._limit, self._cut_at = max(1.0, min(self._limit, self._most) * factor), now


WINDOW_S = 60.0
MAX_WAIT_S = 3600.0
REFUSED_S = 300.0
"""For how long a key that the server did not take is left out."""
ROUNDING = 1e-6
"""A bucket that lacks less than this is full enough."""
PART = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
FAMILIES = "x-ratelimit-{what}-{unit}", "anthropic-ratelimit-{unit}-{what}"
"""Headers of a limit: those of OpenAI and most others, and of Anthropic."""
TOLD = "limit", "remaining", "reset"


def retry_after_s(headers: Mapping[str, str], wall_s: float) -> float | None:
    """Seconds to wait as `retry-after-ms` or `retry-after` say; None: they say nothing. `wall_s`: Unix time."""
    told = told_s(headers.get("retry-after-ms", "") + "ms", wall_s)
    return told_s(headers.get("retry-after", ""), wall_s) if told is None else told


def told_s(value: str, wall_s: float) -> float | None:
    """Seconds that a header names, from 0 to MAX_WAIT_S: "12ms", "6m0s", "1.5", or until a time of RFC 3339 or of HTTP;
    None if it names none."""
    found, parts = _number(value), PART.findall(value)
    if parts and "".join(number + unit for number, unit in parts) == value:
        found = sum(float(number) * UNITS_S[unit] for number, unit in parts)
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        if found is None:
            with suppress(ValueError, OverflowError):
                found = read(value).timestamp() - wall_s
    return None if found is None else min(max(0.0, found), MAX_WAIT_S)


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class Bucket:
    """Token bucket of one limit per minute; without a limit until a header names one."""

    def __init__(self) -> None:
        self.limit = self.level = math.inf
        self._at = 0.0

    def take(self, amount: float, now: float) -> None:
        """Reserve. A negative amount gives back."""
        self._fill(now)
        self.level = min(self.limit, self.level - amount)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until the amount can be reserved. More than the limit waits for a full bucket."""
        if self.limit == math.inf:
            return 0.0
        self._fill(now)
        lacking = min(amount, self.limit) - self.level
        return lacking * WINDOW_S / self.limit if lacking > ROUNDING else 0.0

    def correct(self, limit: float | None, remaining: float | None, reset: float | None, now: float) -> None:
        """Take what a reply says. Servers without a limit may say 0 or -1, which is ignored."""
        if limit is None or limit <= 0:
            return
        self._fill(now)
        if self.limit == math.inf:
            self.level = limit
        self.limit = limit
        if remaining is not None and remaining >= 0 and not (remaining > 0 and reset == 0):
            self.level = min(self.level, remaining)

    def _fill(self, now: float) -> None:
        if self.limit < math.inf:
            self.level = min(self.limit, self.level + max(0.0, now - self._at) * self.limit / WINDOW_S)
        self._at = now


class UpstreamKey:
    """One API key. `secret` is shown by nothing: neither repr nor log.

    It has a bucket of requests and one of tokens, filled at the limit per minute and corrected by each reply. A request
    reserves its prompt and its longest answer, and gives back what it did not use.
    """

    def __init__(self, name: str, secret: str) -> None:
        """`name`: of its variable."""
        self.name, self.secret = name, secret
        self.requests, self.tokens = Bucket(), Bucket()
        self.blocked_until = -math.inf
        self.refused: set[str] = set()
        """Requests that were refused since the server last took one."""
        self.workers = 1
        """How many workers use it, each an equal part of its limits."""

    def __repr__(self) -> str:
        return f"UpstreamKey({self.name})"

    def wait_s(self, cost: int, now: float) -> float:
        """Seconds until a request of `cost` tokens may be sent."""
        blocked = self.blocked_until - now
        return max(0.0, blocked, self.requests.wait_s(1, now), self.tokens.wait_s(cost, now))

    def reserve(self, cost: int, now: float) -> None:
        self.requests.take(1, now)
        self.tokens.take(cost, now)

    def note(self, headers: Mapping[str, str], now: float, wall_s: float) -> None:
        """Learn from the headers of a reply."""
        for unit, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            for family in FAMILIES:
                said = [headers.get(family.format(what=what, unit=unit), "") for what in TOLD]
                if said[0]:
                    counts = map(_number, said[:2])
                    limit, remaining = [None if each is None else each / self.workers for each in counts]
                    bucket.correct(limit, remaining, told_s(said[2], wall_s), now)

    def block(self, seconds: float, now: float) -> None:
        """Send nothing with it for so long."""
        self.blocked_until = max(self.blocked_until, now + seconds)


def choose_key(keys: Sequence[UpstreamKey], cost: int, now: float) -> tuple[UpstreamKey, float]:
    """The key that may be used first, and in how many seconds; among equals the one with the most left."""
    waits = [(key, key.wait_s(cost, now)) for key in keys]
    return min(waits, key=lambda each: (each[1], -each[0].requests.level))


log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 60.0
MAX_PROBE_WORDS = 1000
"""Characters of a failed probe's reason."""


@dataclass(frozen=True, slots=True)
class ServerSlot:
    """A request's slot at a server, until `ServerEndpoint.leave`."""

    endpoint: ServerEndpoint
    facts: ServerFacts
    """What the server's last probe found."""
    key: UpstreamKey
    cost: int
    """Tokens that it has reserved of the key's limit."""


class ServerEndpoint:
    """One server. It counts what runs there; others send."""

    def __init__(self, url: str, model: UpstreamModel) -> None:
        self.url, self._model, self._settings = url, model, model.settings
        self.client = UpstreamClient(ServerAddress.of(url), self._settings.connect_s, self._settings.proxy)
        self.keys = list(model.keys) or [UpstreamKey("", "")]
        self.breaker, self.budget = Breaker(), InFlightBudget(self._settings.max_in_flight)
        self.facts: ServerFacts | None = None
        self.in_flight = 0
        self.replies: dict[str, StreamReader] = {}
        """By request id, the replies that are being read."""
        self.held_until = 0.0
        """Until then no request is sent: the server had no room (monotonic)."""
        self.bare_ends = 0
        """Replies in a row that came to their end without a finish reason."""
        self._asked_at = 0.0
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        """Whether it may get requests."""
        return self.breaker.closed and self.facts is not None

    @property
    def secrets(self) -> list[str]:
        """What no log may repeat."""
        return [key.secret for key in self.keys]

    @property
    def answered_at(self) -> float:
        """When the last token of the replies came that are being read (monotonic); -inf: none came."""
        return max([each.generation.progress_at for each in self.replies.values() if each.received], default=-math.inf)

    def wait_s(self, cost: int, now: float) -> float:
        """Seconds until a request of so many tokens may be sent, as far as the clock decides."""
        _, wait = choose_key(self.keys, cost, now)
        return max(wait, self.held_until - now, 0.0)

    def slots(self, now: float) -> int:
        """Its budget; while it has no room or a rate limit holds, no more than what runs."""
        return self.budget.limit if not self.budget.saturated and self.wait_s(1, now) <= 0 else self.in_flight

    def enter(self, cost: int, now: float) -> ServerSlot:
        """Take a slot at a server that is ready."""
        assert self.facts is not None
        key, _ = choose_key(self.keys, cost, now)
        key.reserve(cost, now)
        self.in_flight += 1
        return ServerSlot(self, self.facts, key, cost)

    def share(self, workers: int) -> None:
        """So many workers use this server, this one included."""
        self.budget.workers = max(1, workers)
        for key in self.keys:
            key.workers = workers

    def leave(self, slot: ServerSlot, spent: int) -> None:
        """Give a slot back; `spent`: tokens of prompt and reply."""
        self.in_flight -= 1
        slot.key.tokens.take(min(spent, slot.cost) - slot.cost, time.monotonic())

    def spawn(self, call: Coroutine[Any, Any, object]) -> None:
        """Make a call whose failure changes nothing, such as one that stops a request, which stops as well without."""

        async def quietly() -> None:
            with suppress(ConnectError, BrokenReply):
                await call

        spawn(quietly(), self._calls)

    async def probe(self, card: ModelCard | None) -> None:
        """Ask the server what it is; the breaker learns whether it is there, and can do what the model's `card` says.
        Raises ProbeFailed."""
        before, failed = self.facts, None
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                key, adapters = self.keys[0].secret, self._model.adapters.values()
                facts = await ServerProbe(self.client, self._settings, self._model.name, key, adapters).facts()
            if facts.assumed and before is not None:  # its API process has just started
                facts = before
            if card is not None and (reason := lacking(card, facts)):
                raise ProbeFailed(reason, lasting=True)
        except ProbeFailed as error:
            failed = ProbeFailed(without(self.secrets, str(error))[:MAX_PROBE_WORDS], lasting=error.lasting)
        except TimeoutError:
            failed = ProbeFailed(f"no answer within {PROBE_TIMEOUT_S:g} s")
        except Exception as error:  # the boundary of a probe: it must not be the last one
            log.exception("%s: a probe cannot read what it says", self.url)
            failed = ProbeFailed(f"its pages cannot be read ({type(error).__name__})")
        if failed is not None:
            self.breaker.fail_probe(str(failed), time.monotonic(), lasting=failed.lasting)
            raise failed
        self.facts = facts
        if before is None or before.slots != facts.slots or not (self.breaker.closed or self.breaker.in_doubt):
            self.budget.reset(facts.slots or self._settings.slots)
        self.breaker.half_open()

    async def read_gauges(self, now: float) -> None:
        """Adapt the budget to what the server says of its load, at most once per interval and only while it runs
        something."""
        if self.facts is None or not self.in_flight or now - self._asked_at < self._settings.gauges_s:
            self.budget.saturated = self.budget.saturated and self.in_flight > 0
            return
        self._asked_at = now
        read = await gauges(self.client, self.facts.kind, self.keys[0].secret)
        if read is not None:
            self.budget.note_gauges(*read, self.in_flight, time.monotonic())


OtherModels: TypeAlias = Callable[[str], UpstreamSettings | None]
"""The settings of another model with this engine, by its name; None if there is none."""


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """One model. `keys` are those of its settings, read from the environment."""

    name: str
    settings: UpstreamSettings
    keys: Sequence[UpstreamKey]
    adapters: Mapping[str, str] = field(default_factory=dict)
    """By name, the name of each at the servers."""


def checked_models(model: str, settings: UpstreamSettings, others: OtherModels) -> Iterator[UpstreamModel]:
    """The model, then its fallbacks in their order. Raises ConfigError for settings that cannot be used."""
    where = f"models.{model}.options"
    if not settings.urls:
        raise ConfigError(f"{where}.urls", "no server is named", 'e.g. options.urls = ["http://gpu-1:8000/v1"]')
    yield _checked(model, settings)
    for name in settings.fallback:
        other = others(name)
        if other is None or not other.urls:
            problem, hint = "is no model with engine upstream and urls", "add it, or name another one"
        elif settings.fallback.count(name) > 1:
            problem, hint = "is named twice", "name it once"
        elif model == name:
            problem, hint = "is the model itself", "leave it out"
        else:
            yield _checked(name, other)
            continue
        raise ConfigError(f"{where}.fallback", f"{name} {problem}", hint)


def _checked(model: str, settings: UpstreamSettings) -> UpstreamModel:
    """Raises ConfigError if the environment lacks a key, or names no proxy that can be used."""
    where = f"models.{model}.options"
    for address in map(ServerAddress.of, settings.urls):
        try:
            proxy_for(settings.proxy, address.host, address.port, secure=address.secure)
        except ValueError as error:
            raise ConfigError(f"{where}.proxy", str(error), "correct the variable, or name a proxy here") from None
    return UpstreamModel(model, settings, keys_of(settings, where))


def keys_of(settings: UpstreamSettings, where: str) -> list[UpstreamKey]:
    """The keys in the environment. Raises ConfigError if a variable is not set."""
    keys = []
    for name in settings.key_env:
        secret = os.environ.get(name, "").strip()
        if not secret:
            raise ConfigError(f"{where}.key_env", f"the variable {name} is not set", "export it where workers start")
        if not secret.isascii() or not secret.isprintable():
            raise ConfigError(f"{where}.key_env", f"the variable {name} holds no API key", "keys are printable ASCII")
        hide([secret])
        keys.append(UpstreamKey(name, secret))
    return keys
