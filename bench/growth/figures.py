"""From readings to rows, and from rows to unit costs: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from bench.load.plan import StreamReading
from bench.report import columns

TOKENS, STREAMS, PARTITIONS, APIS = "tokens", "streams", "partitions", "apis"
"""The series of whole deployments: what grows while the rest stays."""

STEP_TOKENS, STEP_READERS = "tokens of a step", "readers of a step"
"""The series of Redis alone, with many workers writing at once."""

ROLES = ("api", "redis", "worker")

COLUMNS = columns("""
    series: what grows; value: to; streams: c; tokens: tokens; partitions: partitions; apis: API processes;
    us_per_token: CPU us/token; us_per_request: us/request .0; api: API us/token .2; redis: Redis .2;
    worker: worker .2; errors: errors
""")

Row = dict[str, Any]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One setting that is measured."""

    series: str
    streams: int = 64
    tokens: int = 128
    partitions: int = 1
    apis: int = 1

    @property
    def value(self) -> int:
        """Of what grows."""
        return int(getattr(self, self.series))


def row(point: Point, reading: StreamReading) -> Row:
    """CPU of all processes of a role together."""
    by_role = {role: 1e6 * _of(role, reading.cpu) / max(1, reading.tokens) for role in ROLES}
    total = sum(by_role.values())
    return {
        "value": point.value,
        **msgspec.to_builtins(point),
        **by_role,
        "us_per_token": total,
        "us_per_request": total * reading.tokens / max(1, reading.requests),
        "errors": reading.errors,
        "own_cpu": reading.own_cpu,
    }


def step_row(series: str, tokens: int, readers: int, us: float) -> Row:
    """A step of so many tokens, in so many frames; `us` of Redis."""
    value = tokens if series == STEP_TOKENS else readers
    return {
        "series": series,
        "value": value,
        "streams": tokens,
        "tokens": 1,
        "partitions": 1,
        "apis": readers,
        "redis": us / tokens,
        "errors": 0,
    }


def _of(role: str, cpu: Mapping[str, float]) -> float:
    return sum(seconds for name, seconds in cpu.items() if name.split("-")[0] == role)


class LinearFit(msgspec.Struct, frozen=True):
    """y = base + slope * x."""

    base: float
    slope: float


def fit(points: Iterable[tuple[float, float]]) -> LinearFit:
    """Least squares through at least two points with different x. Raises ValueError."""
    known = list(points)
    mean_x = sum(x for x, _ in known) / max(1, len(known))
    mean_y = sum(y for _, y in known) / max(1, len(known))
    spread = sum((x - mean_x) ** 2 for x, _ in known)
    if not spread:
        raise ValueError("a line needs two points with different x")
    slope = sum((x - mean_x) * (y - mean_y) for x, y in known) / spread
    return LinearFit(mean_y - slope * mean_x, slope)


class UnitCosts(msgspec.Struct, frozen=True, kw_only=True):
    """CPU microseconds; none below 0, which a fit through noise may give."""

    api_request: float
    """A request, apart from its tokens."""
    api_token: float
    redis_request: float
    redis_step: float
    """One engine step of one worker in one partition, apart from its tokens, when many write at once."""
    redis_token: float
    redis_frame: float
    """Each API process that a step's tokens go to."""
    worker_token: float


def unit_costs(rows: Sequence[Row]) -> UnitCosts:
    """By fits over the series. Raises ValueError where a series has less than two points."""

    def series(name: str, role: str, x: str, per: str) -> LinearFit:
        return fit((each[x], each[role] * each[per]) for each in rows if each["series"] == name)

    # CPU of a request over its tokens; CPU of a step over its tokens, and over the processes it goes to.
    api, redis, worker = (series(TOKENS, role, "tokens", "tokens") for role in ROLES)
    step, frame = series(STEP_TOKENS, "redis", "value", "streams"), series(STEP_READERS, "redis", "value", "streams")
    return UnitCosts(
        api_request=max(0.0, api.base),
        api_token=max(0.0, api.slope),
        redis_request=max(0.0, redis.base),
        redis_step=max(0.0, step.base - frame.slope),
        redis_token=max(0.0, step.slope),
        redis_frame=max(0.0, frame.slope),
        worker_token=max(0.0, worker.slope),
    )
