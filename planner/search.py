"""Plan search: tries every parallelism of a model on n GPUs, and names the best for latency, throughput and energy.

After APEX. Each plan serves one request alone (its latency), and a backlog of requests at once (its throughput, its
energy); with a rate, also requests at that rate (its latencies and the share that keeps the objectives).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.facts.catalogue import PlanError
from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.load import Precision, RequestLengths
from planner.parallel import ParallelPlan, ReplicaModel, plans
from planner.serving import (
    DEFAULT_LIMITS,
    DEFAULT_SLO,
    Attainment,
    BatchLimits,
    LatencySlo,
    ServedLoad,
    attainment,
    requests,
    serve,
)

BACKLOG = 2
"""Full batches of all replicas that wait at once when the throughput is looked for."""
MAX_BACKLOG = 1024
AT_RATE = 300
"""Requests at a rate (DistServe's N)."""


@dataclass(frozen=True, slots=True)
class SearchInput:
    """What is searched for: a model on `gpus` equal devices under a load."""

    model: ModelShape
    device: Accelerator
    gpus: int
    lengths: RequestLengths
    precision: Precision
    efficiency: float = 1.0
    rate: float | None = None
    """Requests a second, of all GPUs; None: only alone and with a backlog."""
    slo: LatencySlo = DEFAULT_SLO
    limits: BatchLimits = DEFAULT_LIMITS

    def replica(self, plan: ParallelPlan) -> ReplicaModel:
        return ReplicaModel(self.model, self.device, plan, self.precision, self.lengths.prompt, self.efficiency)


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """What one plan does."""

    plan: ParallelPlan
    kv_tokens: int
    """Of one replica."""
    alone_s: float
    """A request alone, whole."""
    alone_ttft_s: float
    alone_tpot_s: float
    backlog: ServedLoad
    at_rate: ServedLoad | None
    kept: Attainment | None
    """At the rate."""


def search(given: SearchInput) -> list[PlanOutcome]:
    """Every plan that fits, by throughput. Raises PlanError if none does."""
    if given.gpus < 1:
        raise PlanError(f"{given.gpus} GPUs: give --gpus from 1")
    given.lengths.check(given.model)
    found = [outcome for plan in plans(given.model, given.gpus) if (outcome := tried(given, plan)) is not None]
    if not found:
        raise PlanError(
            f"{given.model.name} does not fit on {given.gpus} x {given.device.name} with any parallelism; "
            f"{enough(given)} would fit"
        )
    return sorted(found, key=lambda each: -each.backlog.tokens_s)


def tried(given: SearchInput, plan: ParallelPlan) -> PlanOutcome | None:
    """What a plan does; None if weights, workspace and one request do not fit."""
    replica = given.replica(plan)
    try:
        room = replica.kv_tokens
    except PlanError:
        return None
    if room < given.lengths.longest + 1:
        return None
    alone = serve(replica, requests(given.lengths, 1, math.inf), given.limits).texts[0]
    first, ended = alone.first_s or 0.0, alone.ended_s or 0.0
    batch = min(given.limits.batch, room // given.lengths.whole)
    count = min(MAX_BACKLOG, max(1, BACKLOG * plan.dp * batch))
    backlog = serve(replica, requests(given.lengths, count, math.inf), given.limits)
    at_rate = None
    if given.rate is not None:
        at_rate = serve(replica, requests(given.lengths, AT_RATE, given.rate), given.limits)
    return PlanOutcome(
        plan,
        room,
        ended,
        first,
        (ended - first) / max(1, given.lengths.answer - 1),
        backlog,
        at_rate,
        None if at_rate is None else attainment(at_rate.texts, given.slo),
    )


@dataclass(frozen=True, slots=True)
class BestPlans:
    """The best of a search by each aim."""

    latency: PlanOutcome
    throughput: PlanOutcome
    energy: PlanOutcome


def best(found: Sequence[PlanOutcome]) -> BestPlans:
    """Latency: alone, or the mean at the rate if there is one. Ties go to the plan with fewer GPUs in a replica."""

    def small(outcome: PlanOutcome) -> int:
        return outcome.plan.pp * outcome.plan.tp

    def latency_s(outcome: PlanOutcome) -> float:
        if outcome.at_rate is None:
            return outcome.alone_s
        return sum(outcome.at_rate.latencies_s) / len(outcome.at_rate.texts)

    return BestPlans(
        min(found, key=lambda each: (latency_s(each), small(each))),
        min(found, key=lambda each: (-each.backlog.tokens_s, small(each))),
        min(found, key=lambda each: (each.backlog.joules_token, small(each))),
    )


def search_advice(given: SearchInput, found: Sequence[PlanOutcome]) -> str:
    """Which plan to take, and why."""
    top = best(found)
    quick, wide = top.latency, top.throughput
    if quick.plan == wide.plan:
        said = f"Take {quick.plan.name}: it has the least latency and the most throughput of {len(found)}"
    else:
        times, slower = wide.backlog.tokens_s / quick.backlog.tokens_s, wide.alone_s / quick.alone_s
        said = (
            f"Take {wide.plan.name} for throughput: {times:.2f} x the tokens of {quick.plan.name}, which answers a "
            f"lone request {slower:.2f} x as fast"
        )
    if given.rate is None:
        return said + "."
    keeping = [each for each in found if each.kept is not None and each.kept.both >= given.slo.share]
    said += (
        f". At {given.rate:g} requests a second, {len(keeping)} of {len(found)} plans keep both objectives for "
        f"{100 * given.slo.share:.0f} % of the requests"
    )
    return said + (f"; {min(keeping, key=_at_rate_joules).plan.name} with the least energy." if keeping else ".")


def _at_rate_joules(outcome: PlanOutcome) -> float:
    return math.inf if outcome.at_rate is None else outcome.at_rate.joules_token


def enough(given: SearchInput) -> str:
    """The smallest number of the same GPUs, doubling, on which some plan fits, or fewer bits."""
    for power in range(1, 7):
        gpus = given.gpus << power
        for plan in plans(given.model, gpus):
            try:
                if given.replica(plan).kv_tokens > given.lengths.longest:
                    return f"--gpus {gpus}"
            except PlanError:
                continue
    return "fewer --w-bits, or another GPU,"
