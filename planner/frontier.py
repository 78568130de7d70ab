"""Throughput frontier: what each batch size yields and costs in latency, without the points that another one beats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.load import RequestLengths
from planner.memory import memory_plan
from planner.roofline import RooflineInput, decode, prefill


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


def undominated(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """By rising latency, those that no other point beats: none has as many tokens a second at less latency."""
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda each: (each.latency_s, -each.tokens_s)):
        if not kept or point.tokens_s > kept[-1].tokens_s:
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


def modelled(
    given: RooflineInput, lengths: RequestLengths, efficiency: float, most: int | None = None
) -> list[FrontierPoint]:
    """The frontier that the roofline predicts, on `tp` devices, up to the batch that memory holds.

    A batch of B steady requests has a decode step for every B tokens, and a prefill of one prompt for every answer.

    Args:
        efficiency: share of the roofline that the engine reaches.

    Raises PlanError if not one request fits.
    """
    most = most or memory_plan(given.model, given.device, lengths, given.precision, tp=given.tp).max_batch
    return [_point(given, lengths, efficiency, batch) for batch in batches(most)]


def _point(given: RooflineInput, lengths: RequestLengths, efficiency: float, batch: int) -> FrontierPoint:
    step, first = decode(given, batch, lengths.mean), prefill(given, 1, lengths.prompt)
    # While a request runs, each of the others of its batch begins once: their prefills hold it up.
    latency = (batch * first.seconds + lengths.answer * step.seconds) / efficiency
    requests = batch / latency
    power = given.tp * given.device.watts
    joules = power / (requests * lengths.answer) if power else None
    return FrontierPoint(batch, requests * lengths.answer, requests, latency, joules)
