"""Tuning: which concurrencies to measure within a budget, the knee of the measured frontier, and what it recommends.

A measured server has concurrent requests for a batch: it runs as many at once as clients ask it at once. The latency of
a request grows in a straight line with them, a + b c, for a step takes t_mem + t_comp B. Two short probes give that
line, and so the time that a sweep will take.

The knee is the batch from which doubling it gains less than a tenth of throughput. After SLM-Pareto: throughput stops
growing with the batch, for arithmetic becomes the limit. The curve of such an engine is thr(B) = B / (t_mem + t_comp
B), so B / thr is a straight line. The finder fits that line to all measurements, which averages their noise out, and
asks the doubling rule of it. Where measurements are not such a curve, it asks the rule of their medians.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from statistics import fmean, median
from typing import Any

from planner.answers import PlanTable, known, plot, seconds, three
from planner.cost import GAIN, FrontierPoint, pareto
from planner.facts.catalogue import Accelerator, ModelShape, PlanError
from planner.fit import least_squares
from planner.load import LatencySlo, PlanInput, Precision, RequestLengths
from planner.roofline import doublings, kv_tokens_of, replicas_for, whole_blocks
from planner.search import Attainment

MAX_MISFIT = 0.10
"""Mean relative distance of the medians from the fitted curve from which the measurements are no such curve."""
RESAMPLED = 200
"""Draws of the measurements for the confidence."""

Samples = Mapping[int, Sequence[float]]
"""Measured throughput by batch size, of one or several repeats; batch sizes double."""


@dataclass(frozen=True, slots=True)
class Knee:
    """The knee, and how sure it is."""

    batch: int
    gain: float
    """What twice the batch would gain, as a share."""
    confidence: float
    """Share of the measurements, drawn again with the noise that they showed, that have the same knee. With one repeat
    no noise is known, and it is 1."""
    is_fitted: bool
    """Whether the curve was fitted; else the rule saw the medians themselves."""
    is_beyond: bool
    """Whether it is the largest batch that was measured: the knee is there or beyond."""
    reason: str


def knee(samples: Samples, random: Random) -> Knee:
    """Find the knee. Raises ValueError for fewer than two batch sizes."""
    if len(samples) < 2:
        raise ValueError(f"{len(samples)} batch sizes: a knee needs two or more")
    batch, more, is_fitted = _found(samples)
    noise, is_beyond = _noise(samples), batch == max(samples)
    share = sum(_found(_drawn(samples, noise, random))[0] == batch for _ in range(RESAMPLED)) / RESAMPLED
    return Knee(batch, more, share, is_fitted, is_beyond, _reason(batch, more, is_beyond=is_beyond))


def _reason(batch: int, more: float, *, is_beyond: bool) -> str:
    if more >= GAIN:
        return f"throughput still rises at {batch}, the largest that was measured"
    # Never rounded up: 9.96 % is less than 10 %.
    shown = f"{100 * more:.0f}" if round(100 * more) < 100 * GAIN else f"{math.floor(1000 * more) / 10:.1f}"
    said = f"twice {batch} would gain {shown} %, less than {100 * GAIN:.0f} %"
    return f"{said}, but nothing beyond {batch} was measured" if is_beyond else said


def _found(samples: Samples) -> tuple[int, float, bool]:
    """The first measured batch that doubling gains less than GAIN on the curve, else the largest; that gain; whether
    the curve was fitted."""
    curve = medians = {batch: median(samples[batch]) for batch in sorted(samples)}
    if line := fitted(samples):
        modelled = {batch: batch / (line[0] + line[1] * batch) for batch in (*medians, 2 * max(medians))}
        if fmean(abs(modelled[batch] / rate - 1) for batch, rate in medians.items()) <= MAX_MISFIT:
            curve = modelled
    for batch in medians:
        if 2 * batch in curve and (more := curve[2 * batch] / curve[batch] - 1) < GAIN:
            return batch, more, curve is not medians
    return max(medians), GAIN, curve is not medians


def fitted(samples: Samples) -> tuple[float, float] | None:
    """t_mem and t_comp by least squares of B / thr = t_mem + t_comp B, where noise is a share of the value. None: the
    measurements have no such curve, for one of the two would be negative."""
    points = [(batch, rate) for batch, rates in samples.items() for rate in rates if rate > 0]
    t_mem, t_comp = least_squares([(1.0, batch) for batch, _ in points], [batch / rate for batch, rate in points])
    return (t_mem, t_comp) if t_mem > 0 and t_comp > 0 else None


def _noise(samples: Samples) -> float:
    """Relative standard deviation of one measurement, pooled over all batch sizes: a few repeats of one say little."""
    means = {batch: fmean(rates) for batch, rates in samples.items()}
    squares = sum((rate / means[batch] - 1) ** 2 for batch, rates in samples.items() for rate in rates)
    return math.sqrt(squares / max(1, sum(len(rates) - 1 for rates in samples.values())))


def _drawn(samples: Samples, noise: float, random: Random) -> Samples:
    """The mean of each batch size as it might have been, with the noise of a mean of so many."""
    return {
        batch: [fmean(rates) * max(0.01, random.gauss(1, noise / math.sqrt(len(rates))))]
        for batch, rates in samples.items()
    }


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

    None: fewer than four were measured, or they have no such curve (`fitted`).
    """
    clients = sorted(rates)
    line = fitted({each: rates[each] for each in clients[::2]}) if len(clients) >= MIN_HELD_OUT else None
    if line is None:
        return None
    t_mem, t_comp = line
    return median(abs(each / (t_mem + t_comp * each) / fmean(rates[each]) - 1) for each in clients[1::2])


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
    times: Sequence[tuple[float, float]]
    """Seconds to the first token and between tokens of each answer without fault."""
    fault: str = ""
    """Of the first request that failed."""
    joules: float | None = None
    """That the GPUs used meanwhile; None: unknown."""

    def kept(self, slo: LatencySlo) -> Attainment:
        """Shares of all requests that kept the objectives; one that failed kept none."""
        return Attainment.of(self.times, self.requests, slo)

    @property
    def joules_token(self) -> float | None:
        return None if self.joules is None or not self.tokens_s else self.joules / (self.tokens_s * self.seconds)


Readings = Mapping[int, Sequence[LevelReading]]
"""By concurrency, of each pass."""


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


def frontier_of(
    readings: Readings, random: Random, left_out: tuple[int, ...] = (), cause: str = ""
) -> MeasuredFrontier:
    """The frontier of all readings, by concurrency and repeat, and what was not measured and why."""
    points = tuple(_mean(clients, readings[clients]) for clients in sorted(readings))
    kept = pareto(points, lambda each: -each.tokens_s, lambda each: each.latency_s)
    rates = {clients: [each.tokens_s for each in ones] for clients, ones in readings.items()}
    repeats, error = min(map(len, rates.values())), held_out_error(rates)
    return MeasuredFrontier(points, tuple(kept), knee(rates, random), repeats, error, left_out, cause)


def _mean(clients: int, ones: Sequence[LevelReading]) -> FrontierPoint:
    """The repeats of one concurrency; its joules are those of the repeats whose energy is known."""
    joules = [each.joules_token for each in ones if each.joules_token is not None]
    names = ("tokens_s", "requests_s", "latency_s")
    tokens_s, requests_s, latency_s = (fmean(getattr(one, name) for one in ones) for name in names)
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
    batch, why, least = found.knee.batch, withheld(found), whole_blocks(context)
    tokens = batch * whole_blocks(lengths.whole)
    if model is None or device is None:
        return Recommendation(batch, max(least, tokens), withheld=why)
    given = PlanInput(model, device, lengths, Precision.stored(model))
    replicas = replicas_for(given, batch)
    tokens = min(kv_tokens_of(given, replicas), tokens) if replicas else tokens
    return Recommendation(batch, max(least, tokens), replicas, why)


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


def frontier_json(found: MeasuredFrontier, wanted: Recommendation, readings: Readings) -> dict[str, Any]:
    """The frontier with its knee and what it speaks for."""
    return {
        "points": [
            {
                "concurrency": point.batch,
                "tokens_s": point.tokens_s,
                "requests_s": point.requests_s,
                "latency_s": point.latency_s,
                "joules_per_token": point.joules_token,
                "is_dominated": point not in found.kept,
                "repeats": len(readings[point.batch]),
                "requests": sum(each.requests for each in readings[point.batch]),
                "failed": sum(each.failed for each in readings[point.batch]),
            }
            for point in found.points
        ],
        "knee": {
            "concurrency": found.knee.batch,
            "gain_of_twice": found.knee.gain,
            "confidence": found.knee.confidence if found.repeats > 1 and not found.is_open else None,
            "is_beyond": found.knee.is_beyond,
            "is_fitted": found.knee.is_fitted,
            "reason": found.knee.reason,
        },
        "recommended": {
            "max_batch_size": None if wanted.withheld else wanted.max_batch_size,
            "kv_tokens": None if wanted.withheld else wanted.kv_tokens,
            "replicas": wanted.replicas,
            "withheld": wanted.withheld or None,
        },
        "left_out": found.left_out,
        "curve": found.curve,
        "held_out_error": found.error,
    }


def frontier_table(found: MeasuredFrontier) -> PlanTable:
    """Joules have a column if they are known."""
    header, has_joules = ["at once", "tokens/s", "requests/s", "request"], any(p.joules_token for p in found.points)
    rows = []
    for point in found.points:
        row = [f"{point.batch}", three(point.tokens_s), three(point.requests_s), seconds(point.latency_s)]
        row += [known(three, point.joules_token)] * has_joules
        rows.append([*row, "knee" if point.batch == found.knee.batch else "" if point in found.kept else "dominated"])
    return PlanTable((*header, *["J/token"] * has_joules, "note"), rows)


def power_note(readings: Readings, device: Accelerator | None, gpus: int) -> list[str]:
    """How near to its limit the GPU was at the highest concurrency whose energy is known: a line of advice."""
    metered = [(clients, one) for clients, ones in readings.items() for one in ones if one.joules is not None]
    if device is None or not device.watts or not metered:
        return []
    clients, reading = max(metered, key=lambda each: each[0])
    watts = (reading.joules or 0.0) / reading.seconds
    share = watts / (device.watts * max(1, gpus))
    return [f"At {clients} at once the GPUs draw {watts:.0f} W, {100 * share:.0f} % of their limit ({device.name})."]


def frontier_plot(found: MeasuredFrontier) -> str:
    points = [(float(point.batch), point.tokens_s) for point in found.points]
    marked = next(point for point in points if point[0] == found.knee.batch)
    return plot(points, "requests at once", "tokens/s", marked, "the knee")


def frontier_notes(found: MeasuredFrontier, wanted: Recommendation) -> list[str]:
    notes = []
    if found.knee.is_beyond:
        notes.append(f"The knee is at least {found.knee.batch}; how far beyond was not measured.")
    elif not found.left_out:
        sure = f"{100 * found.knee.confidence:.0f} % sure"
        sure = sure if found.repeats > 1 else "measured once: its confidence is unknown"
        notes.append(f"The knee is {sure}. KV cache of that batch: {wanted.kv_tokens:,} tokens.")
    if found.error is not None:
        notes.append(
            f"The curve of every second concurrency predicts the throughput of the others to {100 * found.error:.0f} %."
        )
    return notes


BATCH_KEY = {"trtllm": "max_batch_size", "sim": "slots", "llamacpp": "slots"}
"""By engine, the option of the requests at once."""
KV_KEY = {"trtllm": "kv_cache.max_tokens", "sim": "kv_tokens"}
"""By engine, the option of the cache's tokens; llama.cpp's follows from slots and context."""


def settings_lines(model: str, wanted: Recommendation) -> list[str]:
    """The settings of a Penstock that serves the model, by engine."""
    found = ["Put this into penstock.toml, and restart the instance: penstock down, penstock up", f'[models."{model}"]']
    for engine, key in BATCH_KEY.items():
        cache = f", options.{KV_KEY[engine]} = {wanted.kv_tokens}" if engine in KV_KEY else ""
        found.append(f"# engine {engine}: options.{key} = {wanted.max_batch_size}{cache}")
    return found + ([f"max_workers = {wanted.replicas}"] if wanted.replicas else [])


def goodput_words(found: float, tried: dict[float, Attainment], slo: LatencySlo, ended: str) -> str:
    """The rate, what gives way first, and why the search ended before its end, if it did."""
    end, share = f" {ended}" if ended else "", f"{100 * slo.share:.0f} %"
    if not tried:
        return f"No rate was measured.{end}"
    worst = min((each for rate, each in tried.items() if rate > found), key=lambda each: each.both, default=None)
    gives = "first token" if worst and worst.ttft < worst.tpot else "time between tokens"
    if not found:
        return f"At no rate do {share} of the requests keep {slo.words}: the {gives} gives way.{end}"
    beyond = f"; beyond it the {gives} gives way" if worst else ""
    return f"{three(found)} requests a second keep {slo.words} for {share} of them{beyond}.{end}"
