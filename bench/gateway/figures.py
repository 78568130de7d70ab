"""From readings to rows and ratios: pure arithmetic, medians over the rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bench.load.plan import StreamReading
from bench.report import Ratio, columns
from bench.stats import known_median, over

COLUMNS = columns("""
    system: system; streams: c; requests: requests; tokens_per_s: tok/s .0; ttft_p50_ms: TTFT p50, ms; ttft_p99_ms: p99;
    itl_p99_ms: ITL p99, ms; share_pct: share % .1; cpu_us_per_token: us/tok; errors: errors;
    parts: CPU us/token of each process
""")

Row = dict[str, Any]
How = Callable[[float | None, float | None], float | None]
"""Two figures into one; None if one of them is not there."""
Readings = Mapping[tuple[str, int], Sequence[StreamReading]]

OF_ROUNDS = "_of_rounds"
"""Behind a figure's key: the same in each round alone."""

FLOOR, PENSTOCK, ROUTER, DYNAMO = "floor", "penstock", "router", "dynamo"
ALWAYS, UPSTREAM = "penstock-d2", "penstock-upstream"
"""Systems the goals speak of."""
ENGINE = "engine"
"""The process that other gateways, and Penstock's engine `upstream`, forward to."""
SYNC_LEVELS = (16, 64, 256)
"""Concurrency at which the cost of fsync always decides whether it is the default."""


def rows(readings: Readings, systems: Sequence[str]) -> list[Row]:
    """One row for each system and level, systems in this order."""
    made = {at: _row(at, rounds) for at, rounds in readings.items()}
    for (_, streams), row in made.items():
        row["share_pct"] = gateway_share(row, made.get((FLOOR, streams)))
    return [made[at] for at in sorted(made, key=lambda at: (systems.index(at[0]), at[1]))]


def _row(at: tuple[str, int], rounds: Sequence[StreamReading]) -> Row:
    def mid(figure: Callable[[StreamReading], float | None]) -> float | None:
        return known_median(map(figure, rounds))

    system, streams = at
    answered = [reading for reading in rounds if reading.requests]
    row: Row = {
        "system": system,
        "streams": streams,
        "rounds": len(rounds),
        "requests": sum(reading.requests for reading in rounds),
        "errors": sum(reading.errors for reading in rounds),
        "wrong": dict(sum((Counter(reading.wrong) for reading in rounds), Counter())),
        "cut_short": any(reading.cut_short for reading in rounds),
        "load_cpu": max(reading.own_cpu for reading in rounds),
        "tokens_per_s": mid(lambda reading: reading.tokens_per_s),
        "cpu_us_per_token": mid(lambda reading: reading.cpu_us_per_token),
        "cpu_us_per_token" + OF_ROUNDS: [reading.cpu_us_per_token for reading in rounds],
        "own_us_per_token" + OF_ROUNDS: [_own(reading) for reading in rounds],
        "parts": _parts(rounds),
    }
    if answered:
        row |= {
            "ttft_p50_ms": median(reading.ttft.p50 for reading in answered),
            "ttft_p50_ms" + OF_ROUNDS: [reading.ttft.p50 for reading in answered],
            "ttft_p99_ms": median(reading.ttft.p99 for reading in answered),
            "itl_p99_ms": median(reading.itl.p99 for reading in answered),
            "e2e_ms": median(reading.e2e.mean for reading in answered),
        }
    return row


def _own(reading: StreamReading) -> float | None:
    """CPU us per token of all processes but the engine server."""
    spent = sum(cpu for name, cpu in reading.cpu.items() if name != ENGINE)
    return 1e6 * spent / reading.tokens if reading.tokens else None


def _parts(rounds: Sequence[StreamReading]) -> str:
    """CPU us per token of each process, the costliest first."""
    some = [reading for reading in rounds if reading.tokens]
    names = {name for reading in some for name in reading.cpu}
    each = {name: median(1e6 * reading.cpu.get(name, 0.0) / reading.tokens for reading in some) for name in names}
    return ", ".join(f"{name} {each[name]:.1f}" for name in sorted(each, key=lambda name: -each[name]))


def gateway_share(row: Row, floor: Row | None) -> float | None:
    """(e2e - the floor's e2e) / e2e, in percent: what the gateway adds to an answer's whole time, from means. No
    request queues here, for the engine has a slot for every stream."""
    mine, least = row.get("e2e_ms"), (floor or {}).get("e2e_ms")
    return None if not mine or not least else 100 * (mine - least) / mine


class Goals:
    """Ratios of one run. A system that was not asked for gives no line; one that failed gives a line without figure."""

    def __init__(self, found: Sequence[Row], asked: Sequence[str]) -> None:
        self._rows = {(row["system"], row["streams"]): row for row in found}
        self._asked = set(asked)
        self._levels = sorted({row["streams"] for row in found})

    def of_sweep(self, step_ms: float) -> list[Ratio]:
        """Cost against the others at the highest level (against the router at each, of fsync always at SYNC_LEVELS),
        steadiness, and share of time."""
        if PENSTOCK not in self._asked or not self._levels:
            return []
        top, cost = self._levels[-1], "Penstock's CPU per token /"
        compared: list[tuple[str, str, str, int, str | None]] = [
            (f"{cost} Dynamo's", PENSTOCK, DYNAMO, top, "gateway.dynamo_cpu")
        ]
        for level in self._levels:  # where the router is the cheaper one is shown; the goal is for the highest level
            goal = "gateway.router_cpu" if level == top else None
            compared.append((f"{cost} SGLang router + engine server", PENSTOCK, ROUTER, level, goal))
        compared.append((f"{cost} the floor's", PENSTOCK, FLOOR, top, "gateway.floor_cpu"))
        what = "CPU per token with fsync always / every second"
        syncs = [level for level in self._levels if level in SYNC_LEVELS]
        compared += [(what, ALWAYS, PENSTOCK, level, "gateway.fsync_always") for level in syncs]
        return [
            *(
                self._compared(f"c={level}: {what}", over, ours, other, level, "cpu_us_per_token", goal)
                for what, ours, other, level, goal in compared
                if {ours, other} <= self._asked
            ),
            self._steadiness(step_ms),
            *self._shares(),
            Ratio.none("Penstock's errors", self._errors(PENSTOCK)),
        ]

    def of_upstream(self) -> list[Ratio]:
        """What it costs to stand in front of a server that runs already. The goals are for the highest level."""
        ratios = self._forwarding() if {PENSTOCK, UPSTREAM, ROUTER} <= self._asked else []
        for level in self._levels if FLOOR in self._asked else ():
            for name in (PENSTOCK, UPSTREAM, ROUTER):
                if name in self._asked:
                    what = f"c={level}: TTFT p50 of {name} - the engine server's own, ms"
                    goal = "gateway.upstream_ttft" if (name, level) == (UPSTREAM, self._levels[-1]) else None
                    ratios.append(self._compared(what, _less, name, FLOOR, level, "ttft_p50_ms", goal))
        return [*ratios, Ratio.none("Penstock's errors in front of the engine server", self._errors(UPSTREAM))]

    def _forwarding(self) -> list[Ratio]:
        """CPU against the whole path with the engine in its worker and a router's own share: of all processes, which
        is judged, and without the engine server, whose work the worker does otherwise."""
        ratios = []
        for level in self._levels:
            goal = "gateway.upstream_cpu" if level == self._levels[-1] else None
            for words, key, judged in (("", "cpu", goal), (" without the engine server", "own", None)):
                keys = (f"{key}_us_per_token", f"{key}_us_per_token", "own_us_per_token")
                each = [
                    self._of_rounds(name, level, of)
                    for name, of in zip((UPSTREAM, PENSTOCK, ROUTER), keys, strict=True)
                ]
                rounds = tuple(
                    ours / (inside + router)
                    for ours, inside, router in zip(*each, strict=False)
                    if ours is not None and inside is not None and router is not None
                )
                what = f"c={level}: CPU per token{words}, {UPSTREAM} / ({PENSTOCK} + {ROUTER})"
                ratios.append(Ratio.held(judged, what, median(rounds) if rounds else None, rounds=rounds))
        return ratios

    def _compared(self, what: str, how: How, ours: str, other: str, level: int, key: str, goal: str | None) -> Ratio:
        """One system's figure against another's: the median of the rounds, in each of which both ran within minutes,
        for what else the machine does changes from round to round; of the medians where a round lacks one of them."""
        mine, theirs = (self._of_rounds(name, level, key) for name in (ours, other))
        rounds = [how(each, its) for each, its in zip(mine, theirs, strict=True)] if len(mine) == len(theirs) else []
        known = tuple(value for value in rounds if value is not None)
        value = median(known) if known else how(self._at(ours, level, key), self._at(other, level, key))
        return Ratio.held(goal, what, value, rounds=known)

    def _steadiness(self, step_ms: float) -> Ratio:
        worst = _most([over(self._at(PENSTOCK, level, "itl_p99_ms"), step_ms) for level in self._levels])
        what = f"Penstock's ITL p99 / a {step_ms:g} ms step, worst of all c"
        return Ratio.held("gateway.step_p99", what, worst, digits=3)

    def _shares(self) -> list[Ratio]:
        if FLOOR not in self._asked:
            return []
        high = [level for level in self._levels if level >= 64]
        shares = [self._at(PENSTOCK, level, "share_pct") for level in high]
        ratios = [
            Ratio.held("gateway.share", "Penstock's share of end-to-end time, %, worst of c >= 64", _most(shares))
        ]
        if len(high) > 1:
            what = f"Penstock's share, growth from c={high[0]} to {high[-1]}, points"
            ratios.append(Ratio.held("gateway.share_growth", what, _less(shares[-1], shares[0])))
        return ratios

    def _errors(self, system: str) -> float | None:
        counts = [row["errors"] for (name, _), row in self._rows.items() if name == system]
        return float(sum(counts)) if counts else None

    def _of_rounds(self, system: str, level: int, key: str) -> list[float | None]:
        """A figure in each round; empty if the system was not measured."""
        return list(self._rows.get((system, level), {}).get(key + OF_ROUNDS, []))

    def _at(self, system: str, level: int, key: str) -> float | None:
        value = self._rows.get((system, level), {}).get(key)
        return None if value is None else float(value)


def _less(mine: float | None, other: float | None) -> float | None:
    return None if mine is None or other is None else mine - other


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
