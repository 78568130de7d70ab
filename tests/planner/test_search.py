"""Plan search and grid: the best by each aim, what does not fit, and the order of ScaleLLM's grid."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import pytest

from planner.facts.catalogue import PlanError, device, model
from planner.load import PlanInput, RequestLengths
from planner.search import (
    ParallelPlan,
    PlanOutcome,
    SearchWatch,
    best,
    best_by_concurrency,
    grid,
    grid_advice,
    layouts,
    search,
    search_advice,
)

pytestmark = pytest.mark.slow

EIGHT = PlanInput(model("llama-3.1-70b"), device("h200"), gpus=8, efficiency=0.7)
GRID = PlanInput(model("mixtral-8x7b"), device("h100"), RequestLengths(500, 256), gpus=8, efficiency=0.7, max_batch=64)


@cache
def eight() -> list[PlanOutcome]:
    return search(EIGHT)


def test_70b_on_eight_h200_and_8b_on_one_l4_take_less_than_a_minute_of_cpu() -> None:
    began = time.process_time()
    found = eight()
    small = search(PlanInput(model("llama-3.1-8b"), device("l4"), efficiency=0.7))
    assert time.process_time() - began < 60
    assert len(found) == 15 and [each.plan for each in small] == [ParallelPlan()]
    assert all(each.plan.gpus == 8 for each in found)


def test_more_gpus_in_a_replica_answer_one_request_faster_and_many_slower() -> None:
    top = best(eight())
    assert top["latency"].plan == ParallelPlan(tp=8)
    assert top["throughput"].plan == ParallelPlan(dp=4, tp=2)
    assert top["energy"].backlog.joules_token <= top["throughput"].backlog.joules_token
    assert top["latency"].backlog.tokens_s < top["throughput"].backlog.tokens_s


def test_at_a_rate_the_latencies_are_those_of_the_rate() -> None:
    given = replace(EIGHT, rate=8.0, gpus=4)
    found = search(given)
    assert all(each.kept is not None and each.at_rate is not None for each in found)
    said = search_advice(given, found)
    assert "At 8 requests a second" in said and "keep both objectives for 90 %" in said
    heavy = search(replace(given, rate=200.0))
    assert max(each.kept.both for each in heavy if each.kept) < max(each.kept.both for each in found if each.kept)


def test_what_does_not_fit_names_how_many_would() -> None:
    with pytest.raises(PlanError, match="more --gpus"):
        search(PlanInput(model("llama-3.1-70b"), device("l4"), gpus=4))
    assert search(PlanInput(model("llama-3.1-70b"), device("l4"), gpus=8))


def test_the_order_of_scalellms_grid() -> None:
    """TP8 is best for few concurrent requests, TP2 x 4 beyond 128, with batches of at most 64 in a replica."""
    dense = [ParallelPlan(tp=8), ParallelPlan(dp=2, tp=4), ParallelPlan(dp=4, tp=2)]
    found = {plan: rates for plan, rates in grid(GRID).items() if plan in dense}
    top = best_by_concurrency(found)
    assert [top[each] for each in (1, 2, 4, 8, 16, 32, 64)] == [dense[0]] * 7
    assert top[256] == dense[2]
    for rates in found.values():
        assert list(rates.values()) == sorted(rates.values())


def test_experts_apart_beat_experts_shared_at_many_requests() -> None:
    """EP4-TP2 reads as much and talks less than TP8."""
    rows = grid(GRID, (64,))
    assert rows[ParallelPlan(tp=8, ep=4)][64] > rows[ParallelPlan(tp=8)][64]


def test_layouts_of_the_paper() -> None:
    names = [plan.name for plan in layouts(8, 8)]
    assert names == ["dp1 pp1 tp8", "dp2 pp1 tp4", "dp4 pp1 tp2", "dp1 pp1 tp8 ep4", "dp1 pp1 tp8 ep2"]
    assert layouts(1, 1) == [ParallelPlan()]
    assert "dp1 pp1 tp8 yields most from 1 concurrent request on" in grid_advice(
        best_by_concurrency(grid(GRID, (1, 2)))
    )


def test_an_interrupted_search_keeps_what_it_has_tried() -> None:
    """Of which it was told how much that is; nothing, if it is none."""
    given = PlanInput(model("opt-1.3b"), device("h200"), RequestLengths(64, 8), gpus=4, efficiency=0.7)
    steps: list[tuple[int, int]] = []

    def told(done: int, total: int) -> None:
        steps.append((done, total))
        if done == 2:
            raise KeyboardInterrupt

    whole, watch = {each.plan for each in search(given)}, SearchWatch(told)
    assert not watch.interrupted and steps == []
    found = {each.plan for each in search(given, watch)}
    assert watch.interrupted and len(found) == 2 and found < whole
    assert [done for done, _ in steps] == [0, 1, 2] and steps[-1][1] == len(whole)

    def at_once(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(given, SearchWatch(at_once))
