"""What-if: GPUs for a load, and what each change does to them."""

from __future__ import annotations

import math
from dataclasses import replace

from planner.cost import bits_apart, what_if, what_if_advice
from planner.facts.catalogue import device, model
from planner.load import PlanInput, Precision, RequestLengths

LOAD = PlanInput(model("llama-3.1-8b"), device("l4"), rate=8.0, efficiency=0.7)


def test_twice_the_load_takes_twice_the_gpus() -> None:
    cases = {case.name: case for case in what_if(LOAD, [device("h200")])}
    now, doubled = cases["as it is"], cases["twice the load"]
    assert now.gpus and doubled.gpus and now.gpus <= doubled.gpus <= 2 * now.gpus
    assert now.point and now.gpus * now.point.requests_s >= 8.0 > (now.gpus - 1) * now.point.requests_s
    assert (cases["answers twice as long"].gpus or 0) > now.gpus
    assert (cases["weights of 4 bits"].gpus or 99) <= now.gpus and cases["on h200"].gpus == 1


def test_a_replica_of_two_gpus_counts_twice() -> None:
    """Each replica has two: as many replicas as the rate needs, and twice as many GPUs."""
    two = what_if(replace(LOAD, tp=2, rate=20.0), [])[0]
    assert two.point is not None
    assert two.gpus == 2 * math.ceil(20.0 / two.point.requests_s) > 2


def test_a_change_that_does_not_fit_says_why() -> None:
    case = what_if(replace(LOAD, model=model("opt-13b"), device=device("h200")), [device("l4")])[-1]
    assert case.name == "on l4" and case.point is None and case.gpus is None and "does not fit" in case.why


def test_no_change_that_changes_nothing() -> None:
    narrow = replace(LOAD, precision=Precision(4, 8, 8))
    assert bits_apart(narrow.precision) == "4/8/8"
    assert [case.name for case in what_if(narrow, [])] == ["as it is", "twice the load", "answers twice as long"]
    edge = replace(narrow, model=model("opt-125m"), lengths=RequestLengths(1800, 248))
    assert "answers twice as long" not in [case.name for case in what_if(edge, [])]


def test_the_advice_names_what_helps() -> None:
    said = what_if_advice(what_if(LOAD, []))
    assert "twice the load" in said and "would help most" in said
