"""Tuning: which concurrencies to measure within a budget of time, and which settings the measured frontier recommends.

A measured server has concurrent requests for a batch: it runs as many at once as clients ask it at once. The latency of
a request grows in a straight line with them, a + b c, for a step takes t_mem + t_comp B. Two short probes give that
line, and so the time that a sweep will take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from statistics import fmean, median
from typing import Protocol

from planner.facts.catalogue import Accelerator, PlanError
from planner.facts.model import ModelShape
from planner.knee import GAIN, FrontierPoint, Knee, doublings, fitted, knee, pareto
from planner.load import PlanInput, Precision, RequestLengths
from planner.memory import BLOCK_TOKENS, kv_tokens_of, replicas_for

ROUNDS = 8
"""Requests of one client at low concurrency."""
MIN_ROUNDS = 2
MAX_REPEATS = 5
ENOUGH = 0.95
"""Confidence in the knee at which measuring ends."""
MIN_REPEATS = 3
MIN_HELD_OUT = 4
"""Concurrencies of which half are predicted from the other half."""


@dataclass(frozen=True, slots=True)
class SweepLevel:
    """One concurrency: so many clients ask so many requests."""

    clients: int
    requests: int


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What is measured, once or several times."""

    levels: tuple[SweepLevel, ...]
    expected_s: float
    """Of one pass over all levels."""
    note: str = ""
    """What was cut to keep within the budget."""
    left_out: tuple[int, ...] = ()
    """Concurrencies that do not fit into the budget."""


@dataclass(frozen=True, slots=True)
class LatencyLine:
    """Seconds of a request by concurrency: a + b c."""

    a: float
    b: float

    def level_s(self, level: SweepLevel) -> float:
        """Seconds of a level: its clients answer requests / clients rounds one after the other."""
        return level.requests / level.clients * (self.a + self.b * level.clients)


def line_of(alone_s: float, clients: int, together_s: float) -> LatencyLine:
    """The line through a request alone and one of `clients` at once, which is no faster."""
    slope = max(0.0, together_s - alone_s) / (clients - 1)
    return LatencyLine(alone_s - slope, slope)


def sweep_plan(line: LatencyLine, requests: int, most: int, budget_s: float, protocol: int = 0) -> SweepPlan:
    """Levels of 1, 2, 4, ... `most` clients that fit into the budget, with at most `requests` requests each.

    `protocol`: so many requests in every level, if that fits. If the levels do not fit, there are fewer requests for
    each client; then the highest levels are left out. Raises PlanError if not even two levels fit.
    """
    most = min(most, requests)
    if protocol:
        levels = tuple(SweepLevel(each, protocol) for each in doublings(min(most, protocol)))
        if (expected := sum(map(line.level_s, levels))) <= budget_s:
            return SweepPlan(levels, expected)
        plan = sweep_plan(line, requests, most, budget_s)
        cut = f"not {protocol} requests each as the workload has it, for that takes {expected:,.0f} s"
        return replace(plan, note=", ".join(filter(None, (cut, plan.note))))
    for rounds in range(ROUNDS, MIN_ROUNDS - 1, -1):
        levels = _levels(most, requests, rounds)
        expected = sum(map(line.level_s, levels))
        if expected <= budget_s:
            cut = "" if rounds == ROUNDS else f"{rounds} requests for each client instead of {ROUNDS}"
            return SweepPlan(levels, expected, cut)
    every = levels
    while len(levels) > 2 and sum(map(line.level_s, levels)) > budget_s:
        levels = levels[:-1]
    expected = sum(map(line.level_s, levels))
    if expected > budget_s:
        raise PlanError(
            f"a pass over {' and '.join(str(each.clients) for each in levels)} at once needs about {expected:,.0f} s, "
            f"and {max(0.0, budget_s):,.0f} s of the budget are left after the probes"
        )
    left_out = tuple(each.clients for each in every[len(levels) :])
    note = f"at most {levels[-1].clients} clients, each with {MIN_ROUNDS} requests"
    return SweepPlan(levels, expected, note, left_out)


def _levels(most: int, requests: int, rounds: int) -> tuple[SweepLevel, ...]:
    return tuple(SweepLevel(each, max(each, min(requests, rounds * each))) for each in doublings(most))


def is_settled(samples: Mapping[int, Sequence[float]], random: Random) -> bool:
    """Whether the repeats so far make the knee sure enough."""
    repeats = min(map(len, samples.values()))
    return repeats >= MIN_REPEATS and knee(samples, random).confidence >= ENOUGH


def is_flat(rates: Mapping[int, float]) -> bool:
    """Whether the last two doublings gained less than GAIN: what is beyond them need not be measured."""
    ordered = [rates[each] for each in sorted(rates)]
    gains = [after / before - 1 for before, after in pairwise(ordered)]
    return len(gains) >= 2 and max(gains[-2:]) < GAIN


def held_out_error(rates: Mapping[int, Sequence[float]]) -> float | None:
    """How far the curve of every second concurrency is from the others: the median of |predicted / measured - 1|.

    None: fewer than four were measured, or they have no such curve (planner/knee.py).
    """
    clients = sorted(rates)
    line = fitted({each: rates[each] for each in clients[::2]}) if len(clients) >= MIN_HELD_OUT else None
    if line is None:
        return None
    t_mem, t_comp = line
    return median(abs(each / (t_mem + t_comp * each) / fmean(rates[each]) - 1) for each in clients[1::2])


class MeasuredAnswer(Protocol):
    """One answer of a server, with its times in seconds."""

    @property
    def tokens(self) -> int: ...
    @property
    def ttft(self) -> float: ...
    @property
    def tpot(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class LevelReading:
    """What one concurrency or rate yielded."""

    clients: int
    requests: int
    failed: int
    tokens_s: float
    requests_s: float
    latency_s: float
    """Mean, to the last token."""
    seconds: float
    """Of the whole measurement."""
    answers: Sequence[MeasuredAnswer]
    """Those without fault."""
    fault: str = ""
    """Of the first request that failed."""
    joules: float | None = None
    """That the GPUs used meanwhile; None: unknown."""

    @property
    def joules_token(self) -> float | None:
        tokens = sum(answer.tokens for answer in self.answers)
        return None if self.joules is None or not tokens else self.joules / tokens


@dataclass(frozen=True, slots=True)
class MeasuredFrontier:
    """All points, those that no other beats, and the knee."""

    points: tuple[FrontierPoint, ...]
    kept: tuple[FrontierPoint, ...]
    knee: Knee
    repeats: int
    error: float | None = None
    """How far the curve of every second point is from the others, as a share; None: unknown."""
    left_out: tuple[int, ...] = ()
    """Concurrencies that were to be measured and were not."""
    cause: str = ""
    """Why they were not."""

    @property
    def is_open(self) -> bool:
        """Whether more concurrencies could put the knee elsewhere."""
        return self.knee.is_beyond or bool(self.left_out)

    @property
    def curve(self) -> tuple[tuple[float, float], ...]:
        """[jobs at once, tokens a second], as `curve` of a shape has it."""
        return tuple((float(point.batch), round(point.tokens_s, 1)) for point in self.points)


def frontier_of(readings: Mapping[int, Sequence[LevelReading]], random: Random) -> MeasuredFrontier:
    """The frontier of all readings, by concurrency and repeat."""
    points = tuple(_mean(clients, readings[clients]) for clients in sorted(readings))
    kept = pareto(points, lambda each: -each.tokens_s, lambda each: each.latency_s)
    rates = {clients: [each.tokens_s for each in ones] for clients, ones in readings.items()}
    repeats = min(map(len, rates.values()))
    return MeasuredFrontier(points, tuple(kept), knee(rates, random), repeats, held_out_error(rates))


def _mean(clients: int, ones: Sequence[LevelReading]) -> FrontierPoint:
    """The repeats of one concurrency; its joules are those of the repeats whose energy is known."""
    joules = [each.joules_token for each in ones if each.joules_token is not None]
    tokens_s, requests_s, latency_s = (
        fmean(each) for each in zip(*((one.tokens_s, one.requests_s, one.latency_s) for one in ones), strict=True)
    )
    return FrontierPoint(clients, tokens_s, requests_s, latency_s, fmean(joules) if joules else None)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Settings that a frontier speaks for."""

    max_batch_size: int
    kv_tokens: int
    """That so many requests hold at their ends, in whole blocks: GUARANTEED_NO_EVICT keeps as much free. At least one
    whole context of the model, else the server would refuse prompts that it takes today."""
    replicas: int | None = None
    """That fit on one device, each with that batch (SLM-Pareto). None: the model's shape or the device is unknown."""
    withheld: str = ""
    """Why none of it should be set; "": nothing speaks against it."""


def recommend(
    found: MeasuredFrontier,
    lengths: RequestLengths,
    model: ModelShape | None = None,
    device: Accelerator | None = None,
    context: int = 0,
) -> Recommendation:
    """The knee as batch, its cache, and with a model and a device how many copies of it fit.

    Args:
        context: tokens of the longest request that the server takes; 0: unknown.
    """
    batch, why, least = found.knee.batch, withheld(found), _whole_blocks(context)
    tokens = batch * _whole_blocks(lengths.whole)
    if model is None or device is None:
        return Recommendation(batch, max(least, tokens), withheld=why)
    given = PlanInput(model, device, lengths, Precision.stored(model))
    replicas = replicas_for(given, batch)
    tokens = min(kv_tokens_of(given, replicas), tokens) if replicas else tokens
    return Recommendation(batch, max(least, tokens), replicas, why)


def _whole_blocks(tokens: int) -> int:
    return math.ceil(tokens / BLOCK_TOKENS) * BLOCK_TOKENS


def withheld(found: MeasuredFrontier) -> str:
    """Why the measured knee is no batch to set; "": it is."""
    if found.left_out:
        verb = "was" if len(found.left_out) == 1 else "were"
        return f"{', '.join(map(str, found.left_out))} at once {verb} not measured: {found.cause}"
    return found.knee.reason if found.knee.is_beyond else ""


def tuning_advice(found: MeasuredFrontier, wanted: Recommendation) -> str:
    """The batch to set, and why; or why none is named."""
    if wanted.withheld:
        more = 2 * found.points[-1].batch
        how = "more --budget" if found.left_out else f"--max {more} with at least --requests {more}"
        return f"No batch is advised, for {wanted.withheld}. Leave the one that is set; {how} would tell more."
    said = [f"Set a batch of {wanted.max_batch_size}: {found.knee.reason}"]
    if wanted.replicas is not None and wanted.replicas > 1:
        said.append(f"{wanted.replicas} replicas with such a batch fit on one GPU: small models gain by them")
    elif wanted.replicas == 0:
        said.append("Not one replica with such a batch fits on the GPU: take a smaller batch")
    if found.repeats > 1 and found.knee.confidence < ENOUGH:
        said.append(f"The knee is unsure ({100 * found.knee.confidence:.0f} %): more --repeats would tell")
    return ". ".join(said) + "."
