"""Rows and unit costs: arithmetic, what an engine step costs Redis when many workers write at once, and on paper what
a thousand machines would need.

A step is measured alone: real appends under real leases, and readers that get the frames; only the engine is left out.
Nothing of the calculation on paper was ever run. In it a machine runs one worker whose engine always has all its slots
full. The streams of a worker are spread evenly over the API processes that share its Redis, so each of its steps
becomes one frame for nearly each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import linear_regression
from typing import Any
from urllib.parse import urlsplit

import msgspec

from bench.load.plan import StreamReading
from bench.processes import Processes, spent
from bench.report import columns
from streaming.jobs.codec import encode_delta
from streaming.jobs.frames import Delta
from streaming.jobs.lease import Lease
from streaming.keys import channel
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

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
    try:
        slope, base = linear_regression(*zip(*points, strict=True))
    except (TypeError, ValueError) as error:
        raise ValueError("a line needs two points with different x") from error
    return LinearFit(base, slope)


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


WORKERS = 16
WARMUP_S = 0.5


async def step_us(store: Processes, url: str, tokens: int, readers: int, seconds: float) -> float:
    """CPU microseconds of Redis for one step of so many tokens, spread over so many API processes.

    Raises Unavailable.
    """
    addresses = [channel("api", f"reader-{number}") for number in range(readers)]
    wire = RedisClient.open(RedisSettings(url=url))
    try:
        async with _listening(url, addresses):
            written = [0]
            rows = _rows(tokens, addresses)
            writers = [asyncio.create_task(_write(wire, rows, written)) for _ in range(WORKERS)]
            await asyncio.sleep(WARMUP_S)
            before, begun = store.cpu_s(), written[0]
            await asyncio.wait(writers, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            cost, steps = spent(before, store.cpu_s()), written[0] - begun
            for writer in writers:
                writer.cancel()
            outcomes = await asyncio.gather(*writers, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
            return 1e6 * cost / steps
    finally:
        await wire.close()


def _rows(tokens: int, addresses: Sequence[str]) -> Mapping[str, Sequence[bytes]]:
    rows: dict[str, list[bytes]] = {}
    for number, address in zip(range(tokens), itertools.cycle(addresses), strict=False):
        rows.setdefault(address, []).append(encode_delta(Delta(number, number + 1, 0, f" word{number}", (number,), 1)))
    return rows


async def _write(wire: RedisClient, rows: Mapping[str, Sequence[bytes]], written: list[int]) -> None:
    lease = Lease(wire, "bench")
    await lease.register()
    while True:
        await lease.calls([lease.append_call(0, rows, max(1, lease.next_frame(0) - 100), openings={})])
        written[0] += 1


@asynccontextmanager
async def _listening(url: str, addresses: Sequence[str]) -> AsyncIterator[None]:
    """A connection for each address that takes what is published there, and does nothing with it."""
    place = urlsplit(url)
    async with contextlib.AsyncExitStack() as stack:
        for address in addresses:
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.write(b"SUBSCRIBE " + address.encode() + b"\r\n")
            stack.callback(writer.close)
            stack.callback(asyncio.create_task(_drain(reader)).cancel)
        yield


async def _drain(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 20):
        pass


class AssumedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What is assumed."""

    machines: int = 1000
    slots: int = 256
    step_ms: float = 15.0
    tokens: int = 256
    """Of an answer."""
    busy: float = 0.6
    """How far a core may be used."""

    @property
    def steps_per_s(self) -> float:
        """Of one machine."""
        return 1000 / self.step_ms

    @property
    def tokens_per_s(self) -> float:
        """Of one machine."""
        return self.slots * self.steps_per_s

    @property
    def requests_per_s(self) -> float:
        """Of one machine."""
        return self.tokens_per_s / self.tokens


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Machines that share one Redis primary, and the API processes they need."""

    machines: int
    apis: int
    redis_busy: float
    """Share of the primary's core."""
    api_busy: float


def api_cores(costs: UnitCosts, load: AssumedLoad) -> float:
    """Cores' worth of API work that one machine makes."""
    return (load.tokens_per_s * costs.api_token + load.requests_per_s * costs.api_request) / 1e6


def frames(apis: int, streams: int) -> float:
    """API processes (or partitions) that a step's tokens go to, on average: streams fall on them evenly, at random."""
    return apis * (1 - (1 - 1 / apis) ** streams)


def redis_cores(costs: UnitCosts, load: AssumedLoad, apis: int) -> float:
    """A Redis core's worth of work that one machine makes, with so many API processes beside it."""
    step = costs.redis_step + load.slots * costs.redis_token + frames(apis, load.slots) * costs.redis_frame
    return (load.steps_per_s * step + load.requests_per_s * costs.redis_request) / 1e6


def cell(costs: UnitCosts, load: AssumedLoad) -> Cell:
    """The largest number of machines that one Redis primary bears. Raises ValueError when it does not bear one."""
    found = None
    for machines in range(1, load.machines + 1):
        work = machines * api_cores(costs, load)
        apis = max(1, math.ceil(work / load.busy))
        redis = machines * redis_cores(costs, load, apis)
        if redis > load.busy:
            break
        found = Cell(machines=machines, apis=apis, redis_busy=redis, api_busy=work / apis)
    if found is None:
        raise ValueError("one Redis primary does not bear one such machine")
    return found


def on_paper(costs: UnitCosts, load: AssumedLoad) -> str:
    """The unit costs, and what follows from them."""
    one = cell(costs, load)
    cells = math.ceil(load.machines / one.machines)
    # In one cluster, the same number of primaries: every worker writes to every partition it has jobs of, and a plain
    # PUBLISH goes to every node.
    partitions = frames(cells, load.slots)
    spread = redis_cores(costs, load, one.apis * cells) + load.steps_per_s * (partitions - 1) * costs.redis_step / 1e6
    unit = [
        ("API, a request", costs.api_request),
        ("API, a token", costs.api_token),
        ("Redis, a request", costs.redis_request),
        ("Redis, an engine step of a worker in one partition", costs.redis_step),
        ("Redis, a token in it", costs.redis_token),
        ("Redis, each API process it goes to", costs.redis_frame),
        ("worker, a token (with the simulated engine)", costs.worker_token),
    ]
    needs = [
        ("assumed of a machine", f"{load.slots} streams, {load.step_ms:g} ms steps, {load.tokens} tokens an answer"),
        ("its tokens and requests per second", f"{load.tokens_per_s:,.0f}, {load.requests_per_s:,.1f}"),
        ("machines that one Redis primary bears", f"{one.machines:,}"),
        ("API processes beside them", f"{one.apis:,}"),
        (f"cores of Redis and API used, at most {load.busy:.0%}", f"{one.redis_busy:.0%} and {one.api_busy:.0%}"),
        (f"for {load.machines:,} machines: cells, each with its own Redis primary and partition", f"{cells:,}"),
        ("API processes in all", f"{cells * one.apis:,}"),
        ("cores for API and Redis in all, replicas aside", f"{cells * (one.apis + 1):,}"),
        (
            "the same as one deployment on a cluster: Redis work of a machine, times that in a cell",
            f"{spread / redis_cores(costs, load, one.apis):.1f}",
        ),
    ]
    lines = ["| unit cost | CPU us |", "| --- | ---: |"]
    lines += [f"| {what} | {value:.1f} |" for what, value in unit]
    lines += ["", "| on paper | |", "| --- | ---: |"]
    lines += [f"| {what} | {value} |" for what, value in needs]
    return "\n".join(lines)
