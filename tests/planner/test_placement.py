"""Placement: what fits, what is gained, and how copies share a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from planner.facts.catalogue import PlanError, device, model
from planner.load import LatencySlo, PlanInput, Precision, RequestLengths
from planner.placement import Placement, kept_share, place, place_advice
from planner.placement import _texts as texts_of

pytestmark = pytest.mark.slow

L4, SLO = device("l4"), LatencySlo(1.0, 0.1)


def load(name: str, rate: float | None, gpus: int = 1) -> PlanInput:
    return PlanInput(
        model(name), L4, RequestLengths(256, 64), Precision(8), rate=rate, efficiency=0.7, gpus=gpus, slo=SLO
    )


def test_every_model_gets_a_copy_and_the_busy_one_more() -> None:
    found = place([load("opt-6.7b", 12.0, gpus=3), load("opt-1.3b", 1.0, gpus=3)])
    totals = [sum(gpu[number] for gpu in found.copies) for number in range(2)]
    assert totals[0] >= 2 and totals[1] >= 1 and found.kept > 0.9
    assert list(found.steps) == sorted(found.steps)


def test_it_is_as_good_as_all_placements_of_two_copies() -> None:
    """Small enough to try all of them."""
    loads = [load("opt-6.7b", 1.0, gpus=2), load("opt-1.3b", 1.0, gpus=2)]
    found = place(loads)
    one_each = [((1, 1), (0, 0)), ((1, 0), (0, 1)), ((0, 1), (1, 0))]
    best = max(kept_share(copies, loads, texts_of(loads)) for copies in one_each)
    assert found.kept >= best - 0.01


def test_copies_on_one_gpu_take_turns() -> None:
    """Apart they keep the objectives better than together, also where each has as much cache as apart."""
    loads = [load("opt-6.7b", 8.0), load("opt-1.3b", 20.0)]
    roomy = [replace(each, device=changed(L4, memory_bytes=2 * L4.memory_bytes)) for each in loads]
    together, apart = (
        kept_share(copies, each, texts_of(each))
        for copies, each in ((((1, 1), (0, 0)), roomy), (((1, 0), (0, 1)), loads))
    )
    assert together < apart - 0.1


def test_memory_bounds_the_copies() -> None:
    """Two copies of OPT-6.7B take 27 GB of the 21.6 that are usable; the one is there, although it keeps nothing."""
    found = place([PlanInput(model("opt-6.7b"), L4, rate=50.0, efficiency=0.7, slo=SLO)])
    assert found.copies == ((1,),)
    assert sum(place([load("opt-125m", 5000.0)]).copies[0]) <= 3


def test_what_fits_on_no_gpu_is_refused() -> None:
    with pytest.raises(PlanError, match="opt-30b does not fit on one l4: it takes 31"):
        place([load("opt-30b", 1.0, gpus=4)])
    with pytest.raises(PlanError, match="--gpus 0: 1 to"):
        load("opt-1.3b", 1.0, gpus=0)


def test_loads_without_a_rate_or_on_other_gpus_are_refused() -> None:
    with pytest.raises(PlanError, match="no --rate: requests a second are above 0"):
        place([load("opt-1.3b", None)])
    with pytest.raises(PlanError, match=r"opt-125m and opt-1\.3b are not for the same GPUs"):
        place([load("opt-1.3b", 1.0, gpus=2), load("opt-125m", 1.0)])


def test_the_advice_says_where_and_what_is_missing() -> None:
    said = place_advice([load("opt-1.3b", 1.0)], Placement(((2,), (0,)), 0.5, (0.4, 0.5)))
    assert "GPU 1: 2 x opt-1.3b; GPU 2: not needed" in said and "give more --gpus" in said
