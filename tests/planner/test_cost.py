"""Cost: SLM-Pareto's arithmetic, what each change does to the GPUs of a load, and a trace over time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner import cost, simulation
from planner.cost import FrontierPoint
from planner.facts.catalogue import PlanError, device, model
from planner.load import LatencySlo, PlanInput, Precision, RequestLengths
from planner.search import ParallelPlan, ReplicaModel, attainment
from planner.trace import TraceRow


def found(gpu: str, price: float | None, tp: int = 1) -> cost.DeviceCost:
    return cost.cost_of(PlanInput(model("llama-3.1-8b"), device(gpu), tp=tp, efficiency=0.7), price)


def test_the_knee_or_the_memory_ends_the_batch() -> None:
    points = [FrontierPoint(batch, rate, 0, 0) for batch, rate in ((1, 10), (2, 19), (4, 20), (8, 20.1))]
    assert cost.knee_of(points) == (points[1], "knee")
    assert cost.knee_of(points[:2]) == (points[1], "memory")
    part = FrontierPoint(3, 20.2, 0, 0)  # 6.3 % more for 1.5 x the batch are 11 % for a doubling
    assert cost.knee_of([*points[:2], part]) == (part, "memory")
    assert cost.knee_of([*points[:2], FrontierPoint(3, 20.0, 0, 0)]) == (points[1], "knee")


def test_without_prices_it_says_what_one_may_cost() -> None:
    l4, h200 = found("l4", None), found("h200", None)
    ratio = h200.point.tokens_s / l4.point.tokens_s
    assert f"h200 may cost up to {ratio:.1f} x" in cost.cost_advice([l4, h200])
    assert "--price l4=PRICE" in cost.cost_advice([l4])


LOAD = PlanInput(model("llama-3.1-8b"), device("l4"), rate=8.0, efficiency=0.7)


def test_twice_the_load_takes_twice_the_gpus() -> None:
    cases = {case.name: case for case in cost.what_if(LOAD, [device("h200")])}
    now, doubled = cases["as it is"], cases["twice the load"]
    assert now.gpus and doubled.gpus and now.gpus <= doubled.gpus <= 2 * now.gpus
    assert now.point and now.gpus * now.point.requests_s >= 8.0 > (now.gpus - 1) * now.point.requests_s
    assert (cases["answers twice as long"].gpus or 0) > now.gpus
    assert (cases["weights of 4 bits"].gpus or 99) <= now.gpus and cases["on h200"].gpus == 1


def test_a_replica_of_two_gpus_counts_twice() -> None:
    """Each replica has two: as many replicas as the rate needs, and twice as many GPUs."""
    two = cost.what_if(replace(LOAD, tp=2, rate=20.0), [])[0]
    assert two.gpus == 2 * math.ceil(20.0 / two.point.requests_s) > 2


def test_a_change_that_does_not_fit_says_why() -> None:
    case = cost.what_if(replace(LOAD, model=model("opt-13b"), device=device("h200")), [device("l4")])[-1]
    assert case.name == "on l4" and case.point is None and case.gpus is None and "does not fit" in case.why


def test_no_change_that_changes_nothing() -> None:
    narrow = replace(LOAD, precision=Precision(4, 8, 8))
    assert cost.CASE_COLUMNS["bits w/a/kv"](cost.WhatIfCase("", narrow)) == "4/8/8"
    assert [case.name for case in cost.what_if(narrow, [])] == ["as it is", "twice the load", "answers twice as long"]
    edge = replace(narrow, model=model("opt-125m"), lengths=RequestLengths(1800, 248))
    assert "answers twice as long" not in [case.name for case in cost.what_if(edge, [])]


OPT = ReplicaModel(PlanInput(model("opt-13b"), device("a100-80gb")), ParallelPlan())
SLO = LatencySlo(1.0, 0.06)
BURST = [TraceRow(second, 400, 100) for second in range(60)] + [TraceRow(30.0, 400, 100)] * 80
"""One request a second for a minute, and eighty more after half of it."""


def test_a_burst_is_seen_where_it_comes() -> None:
    texts = simulation.texts_of(sorted(BURST, key=lambda row: row.at), OPT.given.model)
    found = simulation.simulated(OPT, texts)
    rows = simulation.timeline(texts, SLO, 12)
    assert sum(row.requests for row in rows) == 140 and sum(row.tokens for row in rows) == 14_000
    assert found.seconds > 60 and len(rows) == 12
    worst = min(rows, key=lambda row: row.kept)
    assert 25 <= worst.begin_s <= 31 and rows[0].kept == 1.0
    assert sum(row.kept * row.requests for row in rows) / 140 == pytest.approx(attainment(texts, SLO).both)
    said = simulation.timeline_advice(rows, attainment(texts, SLO).both, SLO)
    assert f"from second {worst.begin_s:,.0f} on" in said and "more replicas" in said


def test_requests_are_cut_to_the_context() -> None:
    (text,) = simulation.texts_of([TraceRow(0.0, 5000, 100)], OPT.given.model)
    assert (text.prompt, text.output) == (1948, 100)
    (text,) = simulation.texts_of([TraceRow(0.0, 10, 9999)], OPT.given.model)
    assert (text.prompt, text.output) == (1, 2047)


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(PlanError, match="no request with an answer"):
        simulation.texts_of([], OPT.given.model)
    tight = ReplicaModel(PlanInput(model("llama-3.1-8b"), device("l4")), ParallelPlan())
    with pytest.raises(PlanError, match="the longest request has 100100 tokens"):
        simulation.simulated(tight, simulation.texts_of([TraceRow(0.0, 100_000, 100)], tight.given.model))
