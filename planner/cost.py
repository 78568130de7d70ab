"""Token cost and comparisons: cost at the knee by device, layout by concurrency, what-if changes, a trace's timeline.

SLM-Pareto compares small and large devices by price / (3600 * tokens a second at the knee).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Literal, TypeAlias

from planner.facts.catalogue import Accelerator, PlanError
from planner.facts.model import ModelShape
from planner.knee import GAIN, FrontierPoint, modelled
from planner.load import LatencySlo, PlanInput, Precision, RequestLengths
from planner.search import (
    ParallelPlan,
    ReplicaModel,
    ServedLoad,
    attainment,
    fits,
    is_valid,
    quantile,
    requests,
    serve,
    tpots_s,
    unfitting,
)
from planner.simulator.engine import ModelText
from planner.simulator.trace import TraceRow, cut

Limit: TypeAlias = Literal["knee", "memory"]
"""What ends a batch's growth: twice it gains less than a tenth, or it does not fit."""


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """One device (or `tp` of them) at its knee."""

    device: Accelerator
    point: FrontierPoint
    limit: Limit
    price_per_hour: float | None
    """Of all `tp` devices."""
    points: tuple[FrontierPoint, ...] = ()
    """Batches that fit, doubling, and the largest."""

    @property
    def per_million(self) -> float | None:
        """The price of a million tokens of answers."""
        return None if self.price_per_hour is None else per_million(self.price_per_hour, self.point.tokens_s)


def per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """The price of a million tokens, in the currency of the price."""
    return 1e6 * price_per_hour / (3600 * tokens_per_s)


def knee_of(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, Limit]:
    """The first of rising batches where doubling gains less than GAIN; else the last, which memory limits. A step
    that is less than a doubling has to gain its part, on a logarithmic scale."""
    for point, more in pairwise(points):
        if more.tokens_s / point.tokens_s < (1 + GAIN) ** math.log2(more.batch / point.batch):
            return point, "knee"
    return points[-1], "memory"


def cost_of(given: PlanInput, price: float | None) -> DeviceCost:
    """The cost on one kind of device, `price` per hour and device. Raises PlanError if the model does not fit."""
    points = modelled(given)
    return DeviceCost(given.device, *knee_of(points), None if price is None else price * given.tp, tuple(points))


@dataclass(frozen=True, slots=True)
class CostPoint:
    """One batch on one device: how long a request takes, and what a million tokens cost."""

    gpu: str
    batch: int
    latency_s: float
    price_per_million_tokens: float


def cost_points(found: Sequence[DeviceCost]) -> list[CostPoint]:
    """Every batch on every device whose price is known."""
    return [
        CostPoint(each.device.name, point.batch, point.latency_s, per_million(each.price_per_hour, point.tokens_s))
        for each in found
        if each.price_per_hour is not None
        for point in each.points
    ]


def cost_advice(found: Sequence[DeviceCost], currency: str = "") -> str:
    """Which device to take, and why. `currency`: of the prices, if it is known."""
    priced = sorted((each.per_million, each.device.name, each.point.batch) for each in found if each.per_million)
    if len(priced) == len(found):
        (least, name, batch), *others = priced
        said = (
            f"{name} is the cheapest: {f'{least:.3g} {currency}'.rstrip()} for a million tokens at a batch of {batch}"
        )
        beside = ", ".join(f"{price / least:.2f} x on {other}" for price, other, _ in others)
        return f"{said}, beside {beside}." if beside else f"{said}."
    slow, *faster = sorted(found, key=lambda each: each.point.tokens_s)
    if not faster:
        return (
            f"{slow.device.name} yields {3600 * slow.point.tokens_s / 1e6:.3g} million tokens an hour; give --price "
            f"{slow.device.name}=PRICE for the price of a million."
        )
    ratios = ", ".join(
        f"{each.device.name} may cost up to {each.point.tokens_s / slow.point.tokens_s:.1f} x" for each in faster
    )
    return f"Beside the price of an hour of {slow.device.name}, {ratios}: so many times more tokens it yields."


CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROUNDS = 4
"""Requests for each that runs at once."""


@dataclass(frozen=True, slots=True)
class GridRow:
    """One layout: tokens a second by concurrency."""

    plan: ParallelPlan
    tokens_s: dict[int, float]


def layouts(gpus: int, experts: int) -> list[ParallelPlan]:
    """Those of ScaleLLM (for its 8 GPUs TP8 x 1, TP4 x 2 and TP2 x 4); with experts also EP4-TP2 and EP2-TP4 of one
    replica."""
    dense = [ParallelPlan(dp=gpus // tp, tp=tp) for tp in (gpus, gpus // 2, gpus // 4) if tp > 0 and gpus % tp == 0]
    mixed = [ParallelPlan(tp=gpus, ep=ep) for ep in (gpus // 2, gpus // 4) if ep > 1 and experts > 1]
    return list(dict.fromkeys([*dense, *mixed]))


def grid(given: PlanInput, concurrencies: Sequence[int] = CONCURRENCIES) -> list[GridRow]:
    """All layouts that fit. Raises PlanError if none does.

    Few GPUs in a replica read all weights in each replica; many GPUs read them once, and talk more. Which is better
    depends on how many requests run at once.
    """
    found = [
        GridRow(plan, {each: closed_loop(given, plan, each) for each in concurrencies})
        for plan in layouts(given.gpus, given.model.experts)
        if is_valid(plan, given.model) and fits(given, plan)
    ]
    if not found:
        raise unfitting(given)
    return found


def closed_loop(given: PlanInput, plan: ParallelPlan, clients: int) -> float:
    """Tokens a second with so many clients, which ask again as soon as they are answered.

    Each replica has its share of the clients, at most its largest batch; the others wait.
    """
    each = min(given.max_batch, math.ceil(clients / plan.dp))
    one = ReplicaModel(replace(given, max_batch=each), replace(plan, dp=1))
    return min(plan.dp, clients) * serve(one, requests(given.lengths, ROUNDS * each, math.inf)).tokens_s


def best_by_concurrency(rows: Sequence[GridRow]) -> dict[int, ParallelPlan]:
    """The layout with the most tokens a second at each concurrency."""
    return {each: max(rows, key=lambda row: row.tokens_s[each]).plan for each in rows[0].tokens_s}


def grid_advice(rows: Sequence[GridRow]) -> str:
    """Which layout is best where."""
    top = list(best_by_concurrency(rows).items())
    first, plan = top[0]
    said = [f"{plan.name} yields most from {first} concurrent request on"]
    said += [f"{plan.name} from {at} on" for (_, before), (at, plan) in pairwise(top) if plan != before]
    return ", ".join(said) + "."


@dataclass(frozen=True, slots=True)
class WhatIfCase:
    """One change and what it does. `point` is None where the model does not fit, and `why` says so."""

    name: str
    given: PlanInput
    point: FrontierPoint | None
    limit: Limit | None
    why: str = ""

    @property
    def gpus(self) -> int | None:
        """GPUs for the rate, each at its knee."""
        if self.point is None:
            return None
        return self.given.tp * math.ceil(self.given.checked_rate / self.point.requests_s)


def changes(given: PlanInput, others: Sequence[Accelerator]) -> Iterator[tuple[str, PlanInput]]:
    """Every change, by name; the first is none."""
    bits = given.precision
    yield "as it is", given
    yield "twice the load", replace(given, rate=2 * given.checked_rate)
    longer = RequestLengths(given.lengths.prompt, 2 * given.lengths.answer)
    if longer.whole <= given.model.context:
        yield "answers twice as long", replace(given, lengths=longer)
    narrower: list[tuple[str, dict[str, float]]] = [
        ("weights of 8 bits", {"w": 8.0}),
        ("weights and activations of 8 bits", {"w": 8.0, "a": 8.0}),
        ("weights of 4 bits", {"w": 4.0}),
        ("KV cache of 8 bits", {"kv": 8.0}),
    ]
    for name, changed in narrower:
        if all(getattr(bits, field) > wanted for field, wanted in changed.items()):
            yield name, replace(given, precision=replace(bits, **changed))
    yield from ((f"on {other.name}", replace(given, device=other)) for other in others)


def what_if(given: PlanInput, others: Sequence[Accelerator]) -> list[WhatIfCase]:
    """All cases, the first as it is. Raises PlanError if that one does not fit, or if the rate is not above 0."""
    asked = list(changes(given, others))  # refuses the rate before anything else is computed
    given.lengths.check(given.model)
    return [_case(name, changed, must=number == 0) for number, (name, changed) in enumerate(asked)]


def _case(name: str, given: PlanInput, *, must: bool) -> WhatIfCase:
    try:
        return WhatIfCase(name, given, *knee_of(modelled(given)))
    except PlanError as error:
        if must:
            raise
        return WhatIfCase(name, given, None, None, str(error))


def what_if_advice(cases: Sequence[WhatIfCase]) -> str:
    """What helps most, and what the doubled load takes."""
    now, doubled = cases[0], cases[1]
    said = f"The load takes {now.gpus} {now.given.device.name}, twice the load {doubled.gpus}"
    rates = {each.name: each.point.tokens_s for each in cases if each.point and each.name.startswith(("weights", "KV"))}
    if rates and now.point and (most := max(rates.values())) > 1.05 * now.point.tokens_s:
        name = max(rates, key=rates.__getitem__)
        said += f". {name.capitalize()} would help most: {most / now.point.tokens_s:.2f} x the tokens of a GPU"
    elif now.limit == "knee":
        said += ". Fewer bits help little, for throughput ends at its knee and not at the memory"
    return said + "."


def bits_apart(bits: Precision) -> str:
    """The bits as a table shows them: weights/activations/cache."""
    return f"{bits.w:g}/{bits.a:g}/{bits.kv:g}"


BUCKETS = 24
"""Rows of a timeline, at most."""
MAX_REQUESTS = 200_000


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """The requests that arrived in one span of time."""

    begin_s: float
    requests: int
    tokens: int
    kept: float
    """Share that kept both objectives."""
    ttft_p90_s: float
    tpot_p90_s: float


def texts_of(rows: Iterable[TraceRow], model: ModelShape) -> list[ModelText]:
    """The requests of a trace, cut to the model's context, the prompt first. Raises PlanError if there are none, or too
    many."""
    first_ones = islice(cut(rows, longest=model.context), MAX_REQUESTS + 1)
    texts = [ModelText(row.prompt, row.answer, row.answer, row.at, row.lane) for row in first_ones]
    if len(texts) > MAX_REQUESTS:
        raise PlanError(f"more than {MAX_REQUESTS:,} requests: cut the trace")
    if not texts:
        raise PlanError("the trace has no request with an answer")
    return texts


def simulated(replica: ReplicaModel, texts: Sequence[ModelText]) -> ServedLoad:
    """Serve the trace. Raises PlanError if the weights, or one of its requests, do not fit."""
    longest = max(text.prompt + text.output for text in texts)
    if longest + 1 > 0.95 * replica.kv_tokens:
        raise PlanError(
            f"the longest request has {longest} tokens, and the cache of a replica holds {replica.kv_tokens}; "
            "more GPUs in a replica (--tp) or fewer bits would do"
        )
    return serve(replica, texts)


def timeline(texts: Sequence[ModelText], slo: LatencySlo, buckets: int = BUCKETS) -> list[TimelineRow]:
    """The requests by their arrival, in equal spans from the first to the last."""
    begin, end = min(text.arrived_s for text in texts), max(text.arrived_s for text in texts)
    width = max((end - begin) / buckets, 1e-9)
    spans: dict[int, list[ModelText]] = {}
    for text in texts:
        spans.setdefault(min(buckets - 1, int((text.arrived_s - begin) / width)), []).append(text)
    return [_row(begin + number * width, each, slo) for number, each in sorted(spans.items())]


def _row(begin_s: float, texts: Sequence[ModelText], slo: LatencySlo) -> TimelineRow:
    ttft, tpot = sorted(text.ttft_s for text in texts), tpots_s(texts)
    kept = attainment(texts, slo).both
    tokens = sum(text.generated for text in texts)
    return TimelineRow(begin_s, len(texts), tokens, kept, quantile(ttft, 0.9), quantile(tpot, 0.9) if tpot else 0.0)


def timeline_advice(rows: Sequence[TimelineRow], kept: float, slo: LatencySlo) -> str:
    """Whether the plan serves the trace, and when it does worst."""
    worst = min(rows, key=lambda row: row.kept)
    said = f"{100 * kept:.1f} % of the requests keep {slo.words}"
    if kept >= slo.share and worst.kept >= slo.share:
        return f"{said}, at no time fewer than {100 * worst.kept:.0f} %: the plan serves this trace."
    said += f"; fewest, {100 * worst.kept:.0f} %, of those that come from second {worst.begin_s:,.0f} on"
    return said + (": more replicas (--dp) would serve them." if kept < slo.share else ".")
