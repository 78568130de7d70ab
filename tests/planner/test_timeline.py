"""Timeline: a trace is served whole, its spans add up to it, and the worst one is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cost import simulated, texts_of, timeline, timeline_advice
from planner.facts.catalogue import PlanError, device, model
from planner.load import LatencySlo, PlanInput
from planner.search import ParallelPlan, ReplicaModel, attainment
from planner.simulator.trace import TraceRow

OPT = ReplicaModel(PlanInput(model("opt-13b"), device("a100-80gb")), ParallelPlan())
SLO = LatencySlo(1.0, 0.06)
BURST = [TraceRow(second, 400, 100) for second in range(60)] + [TraceRow(30.0, 400, 100)] * 80
"""One request a second for a minute, and eighty more after half of it."""


def test_a_burst_is_seen_where_it_comes() -> None:
    texts = texts_of(sorted(BURST, key=lambda row: row.at), OPT.given.model)
    found = simulated(OPT, texts)
    rows = timeline(texts, SLO, 12)
    assert sum(row.requests for row in rows) == 140 and sum(row.tokens for row in rows) == 14_000
    assert found.seconds > 60 and len(rows) == 12
    worst = min(rows, key=lambda row: row.kept)
    assert 25 <= worst.begin_s <= 31 and rows[0].kept == 1.0
    assert sum(row.kept * row.requests for row in rows) / 140 == pytest.approx(attainment(texts, SLO).both)
    said = timeline_advice(rows, attainment(texts, SLO).both, SLO)
    assert f"from second {worst.begin_s:,.0f} on" in said and "more replicas" in said


def test_more_replicas_keep_more() -> None:
    shares = []
    for dp in (1, 4):
        texts = texts_of(sorted(BURST, key=lambda row: row.at), OPT.given.model)
        simulated(replace(OPT, plan=ParallelPlan(dp=dp)), texts)
        shares.append(attainment(texts, SLO).both)
    assert shares[1] > shares[0]


def test_a_plan_that_serves_all_says_so() -> None:
    texts = texts_of([TraceRow(second, 100, 10) for second in range(10)], OPT.given.model)
    simulated(OPT, texts)
    assert timeline_advice(timeline(texts, SLO), 1.0, SLO).endswith("the plan serves this trace.")


def test_requests_are_cut_to_the_context() -> None:
    (text,) = texts_of([TraceRow(0.0, 5000, 100)], OPT.given.model)
    assert (text.prompt, text.output) == (1948, 100)
    (text,) = texts_of([TraceRow(0.0, 10, 9999)], OPT.given.model)
    assert (text.prompt, text.output) == (1, 2047)


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(PlanError, match="no request with an answer"):
        texts_of([], OPT.given.model)
    tight = ReplicaModel(PlanInput(model("llama-3.1-8b"), device("l4")), ParallelPlan())
    with pytest.raises(PlanError, match="the longest request has 100100 tokens"):
        simulated(tight, texts_of([TraceRow(0.0, 100_000, 100)], tight.given.model))
