"""Placement: what fits, what is gained, and how copies share a GPU."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from planner.facts.catalogue import PlanError, device, model
from planner.load import HALF, Precision, RequestLengths
from planner.placement import ModelLoad, Placement, copies_per_gpu, kept_share, place, place_advice
from planner.placement import _texts as texts_of
from planner.search import LatencySlo

pytestmark = pytest.mark.slow

L4, SLO = device("l4"), LatencySlo(1.0, 0.1)


def load(name: str, rate: float) -> ModelLoad:
    return ModelLoad(model(name), rate, RequestLengths(256, 64), Precision(8))


def test_every_model_gets_a_copy_and_the_busy_one_more() -> None:
    loads = [load("opt-6.7b", 12.0), load("opt-1.3b", 1.0)]
    found = place(loads, L4, 3, SLO, 0.7)
    totals = [sum(gpu[number] for gpu in found.copies) for number in range(2)]
    assert totals[0] >= 2 and totals[1] >= 1 and found.kept > 0.9
    assert list(found.steps) == sorted(found.steps)


def test_it_is_as_good_as_all_placements_of_two_copies() -> None:
    """Small enough to try all of them."""
    loads = [load("opt-6.7b", 1.0), load("opt-1.3b", 1.0)]
    found = place(loads, L4, 2, SLO, 0.7)
    one_each = [((1, 1), (0, 0)), ((1, 0), (0, 1)), ((0, 1), (1, 0))]
    best = max(kept_share(copies, loads, L4, SLO, 0.7, texts_of(loads)) for copies in one_each)
    assert found.kept >= best - 0.01


def test_copies_on_one_gpu_take_turns() -> None:
    """Apart they keep the objectives better than together, also where each has as much cache as apart."""
    loads = [load("opt-6.7b", 8.0), load("opt-1.3b", 20.0)]
    roomy = replace(L4, memory_bytes=2 * L4.memory_bytes)
    together, apart = (
        kept_share(copies, loads, gpu, SLO, 0.7, texts_of(loads))
        for copies, gpu in ((((1, 1), (0, 0)), roomy), (((1, 0), (0, 1)), L4))
    )
    assert together < apart - 0.1


def test_a_model_without_a_copy_keeps_nothing() -> None:
    loads = [load("opt-1.3b", 1.0), load("opt-125m", 1.0)]
    kept = kept_share(((1, 0),), loads, L4, SLO, 0.7, texts_of(loads))
    assert 0.3 < kept < 0.7


def test_memory_bounds_the_copies() -> None:
    """Two copies of OPT-6.7B take 27 GB of the 21.6 that are usable; the one is there, although it keeps nothing."""
    found = place([ModelLoad(model("opt-6.7b"), 50.0, RequestLengths(), HALF)], L4, 1, SLO, 0.7)
    assert found.copies == ((1,),)
    assert sum(place([load("opt-125m", 5000.0)], L4, 1, SLO, 0.7).copies[0]) <= 3


def test_what_fits_on_no_gpu_is_refused() -> None:
    with pytest.raises(PlanError, match="opt-30b does not fit on one l4: it takes 31"):
        place([load("opt-30b", 1.0)], L4, 4, SLO, 0.7)
    with pytest.raises(PlanError, match="from 1"):
        place([load("opt-1.3b", 1.0)], L4, 0, SLO, 0.7)


def test_three_copies_at_most_share_a_gpu() -> None:
    """SLM-Pareto: W + knee * kv_token * (L + G/2) + 1 GiB for each."""
    small = ModelLoad(model("opt-125m"), 1.0, RequestLengths(), HALF)
    assert copies_per_gpu(small, device("a100-40gb"), 128) == 3
    assert copies_per_gpu(small, L4, 512) == 1


def test_the_advice_says_where_and_what_is_missing() -> None:
    loads = [load("opt-1.3b", 1.0)]
    said = place_advice(loads, Placement(((2,), (0,)), 0.5, (0.4, 0.5)), SLO)
    assert "GPU 1: 2 x opt-1.3b" in said and "give more --gpus" in said and "gained 10.0 points" in said
    assert "GPUs that are not needed: 1" in said
