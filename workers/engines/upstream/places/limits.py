"""Rate limits of hosted servers, per API key: reads their headers, and paces requests so that none is refused. Pure.

Each key has a bucket of requests and one of tokens, filled at the limit per minute and corrected by each reply. A
request reserves its prompt and its longest answer, and gives back what it did not use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime

WINDOW_S = 60.0
MAX_WAIT_S = 3600.0
REFUSED_S = 300.0
"""For how long a key that the server did not take is left out."""
ROUNDING = 1e-6
"""A bucket that lacks less than this is full enough."""
PART = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
FAMILIES = (
    "x-ratelimit-{what}-{unit}",  # OpenAI and most others
    "anthropic-ratelimit-{unit}-{what}",
)


def retry_after_s(headers: Mapping[str, str], wall_s: float) -> float | None:
    """Seconds to wait as `retry-after-ms` or `retry-after` say; None: they say nothing. `wall_s`: Unix time."""
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return _bounded(milliseconds / 1000)
    value = headers.get("retry-after")
    if (seconds := _number(value)) is not None:
        return _bounded(seconds)
    try:
        return None if not value else _bounded(parsedate_to_datetime(value).timestamp() - wall_s)
    except (ValueError, OverflowError):
        return None


def reset_s(value: str | None, wall_s: float) -> float | None:
    """Seconds until a limit is whole again: "12ms", "6m0s", "1.5", or a time of RFC 3339; None if it is none."""
    if not value:
        return None
    if (seconds := _number(value)) is not None:
        return _bounded(seconds)
    parts = PART.findall(value)
    if parts and "".join(number + unit for number, unit in parts) == value:
        return _bounded(sum(float(number) * UNITS_S[unit] for number, unit in parts))
    try:
        return _bounded(datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp() - wall_s)
    except (ValueError, OverflowError):
        return None


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _bounded(seconds: float) -> float:
    return min(max(0.0, seconds), MAX_WAIT_S)


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
    """One API key. `secret` is shown by nothing: neither repr nor log."""

    def __init__(self, name: str, secret: str) -> None:
        """`name`: of its variable."""
        self.name, self.secret = name, secret
        self.requests, self.tokens = Bucket(), Bucket()
        self.blocked_until = -math.inf
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

    def refund(self, cost: int, spent: int, now: float) -> None:
        """A reply ended that had reserved `cost` tokens and spent `spent`."""
        self.tokens.take(spent - cost, now)

    def note(self, headers: Mapping[str, str], now: float, wall_s: float) -> None:
        """Learn from the headers of a reply."""
        for unit, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            for family in FAMILIES:
                limit, remaining, reset = (
                    headers.get(family.format(what=what, unit=unit)) for what in ("limit", "remaining", "reset")
                )
                if limit is not None:
                    bucket.correct(self._part(limit), self._part(remaining), reset_s(reset, wall_s), now)

    def _part(self, value: str | None) -> float | None:
        number = _number(value)
        return None if number is None else number / self.workers

    def block(self, seconds: float, now: float) -> None:
        """Send nothing with it for so long."""
        self.blocked_until = max(self.blocked_until, now + seconds)


class KeyPool:
    """The keys of one server: the one that may be used first is next. Without keys, one that is empty."""

    def __init__(self, keys: Sequence[UpstreamKey]) -> None:
        self.keys = list(keys) or [UpstreamKey("", "")]
        self.secrets = [key.secret for key in self.keys if key.secret]

    def choose(self, cost: int, now: float) -> tuple[UpstreamKey, float]:
        """The key that may be used first, and in how many seconds; among equals the one with the most left."""
        if len(self.keys) == 1:
            return self.keys[0], self.keys[0].wait_s(cost, now)
        waits = [(key.wait_s(cost, now), -key.requests.level, number, key) for number, key in enumerate(self.keys)]
        wait, _, _, key = min(waits)
        return key, wait
