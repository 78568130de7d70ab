"""Knee of a throughput frontier: the batch size from which doubling it gains less than a tenth of throughput.

After SLM-Pareto: throughput stops growing with the batch, for arithmetic becomes the limit. The curve of such an engine
is thr(B) = B / (t_mem + t_comp B), so B / thr is a straight line. The finder fits that line to all measurements, which
averages their noise out, and asks the doubling rule of it. Where measurements are not such a curve, it asks the rule of
their medians.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, median
from typing import TypeVar

from planner.fit import least_squares
from planner.load import PlanInput
from planner.memory import memory_plan
from planner.roofline import decode, prefill

GAIN = 0.10
"""Least gain of doubling the batch that is worth it."""
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
    """Batch, gain of doubling it, and whether the curve was fitted."""
    medians = {batch: median(samples[batch]) for batch in sorted(samples)}
    line = fitted(samples)
    is_fitted = line is not None and _misfit(medians, *line) <= MAX_MISFIT
    if is_fitted and line is not None:
        t_mem, t_comp = line
        curve = {batch: batch / (t_mem + t_comp * batch) for batch in (*medians, 2 * max(medians))}
    else:
        curve = medians
    return *_ruled(curve, medians), is_fitted


def _ruled(curve: Mapping[int, float], measured: Iterable[int]) -> tuple[int, float]:
    """The first of the measured batches that doubling gains less than GAIN on the curve, and that gain; else the
    largest."""
    batches = sorted(measured)
    for batch in batches:
        if 2 * batch in curve and (more := curve[2 * batch] / curve[batch] - 1) < GAIN:
            return batch, more
    return batches[-1], GAIN


def fitted(samples: Samples) -> tuple[float, float] | None:
    """t_mem and t_comp by least squares of B / thr = t_mem + t_comp B, where noise is a share of the value. None: the
    measurements have no such curve, for one of the two would be negative."""
    points = [(batch, rate) for batch, rates in samples.items() for rate in rates if rate > 0]
    t_mem, t_comp = least_squares([(1.0, batch) for batch, _ in points], [batch / rate for batch, rate in points])
    return (t_mem, t_comp) if t_mem > 0 and t_comp > 0 else None


def _misfit(medians: Mapping[int, float], t_mem: float, t_comp: float) -> float:
    return fmean(abs(batch / (t_mem + t_comp * batch) / rate - 1) for batch, rate in medians.items())


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


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One batch size; a measured one has the number of concurrent requests, which stands for it."""

    batch: int
    tokens_s: float
    """Of the answers, of all requests together."""
    requests_s: float
    latency_s: float
    """Mean, of a whole request."""
    joules_token: float | None = None
    """None: power is unknown."""


T = TypeVar("T")


def pareto(points: Iterable[T], cost: Callable[[T], float], latency: Callable[[T], float]) -> list[T]:
    """By rising latency, those that no other beats: none costs as little at less latency."""
    kept: list[T] = []
    for point in sorted(points, key=lambda each: (latency(each), cost(each))):
        if not kept or cost(point) < cost(kept[-1]):
            kept.append(point)
    return kept


def doublings(most: int) -> Iterator[int]:
    """1, 2, 4, ... up to `most`."""
    batch = 1
    while batch <= most:
        yield batch
        batch *= 2


def batches(most: int) -> Iterator[int]:
    """1, 2, 4, ... and `most` itself, which lies between two of them."""
    last = 0
    for last in doublings(most):
        yield last
    if last < most:
        yield most


def modelled(given: PlanInput) -> list[FrontierPoint]:
    """The frontier that the roofline predicts, on `tp` devices, up to the batch that memory holds.

    A batch of B steady requests has a decode step for every B tokens, and a prefill of one prompt for every answer.

    Raises PlanError if not one request fits.
    """
    return [_point(given, batch) for batch in batches(memory_plan(given).max_batch)]


def _point(given: PlanInput, batch: int) -> FrontierPoint:
    lengths = given.lengths
    step, first = decode(given, batch, lengths.mean), prefill(given, 1, lengths.prompt)
    # While a request runs, each of the others of its batch begins once: their prefills hold it up.
    latency = (batch * first.seconds + lengths.answer * step.seconds) / given.efficiency
    requests = batch / latency
    power = given.tp * given.device.watts
    joules = power / (requests * lengths.answer) if power else None
    return FrontierPoint(batch, requests * lengths.answer, requests, latency, joules)
