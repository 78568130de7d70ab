"""Serving: tokens are conserved, the cache is never overrun, and closed forms of one request and of a full batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner.facts.catalogue import device, model
from planner.load import LatencySlo, PlanInput, RequestLengths
from planner.search import (
    ParallelPlan,
    ReplicaModel,
    StepMeter,
    attainment,
    quantile,
    requests,
    serve,
)
from planner.simulator.engine import EngineShape, Greedy, ModelEngine, ModelText
from planner.simulator.queues import ModelWorker, Simulation, SortedQueue, by_arrival

OPT = ReplicaModel(PlanInput(model("opt-13b"), device("a100-40gb")), ParallelPlan())
"""Its cache holds about 15,000 tokens: 24 requests of 512 + 128."""
LENGTHS = RequestLengths(512, 128)


def test_every_text_gets_all_its_tokens_and_the_cache_holds_them() -> None:
    """Also where texts are evicted, because all of them grow beyond the cache."""
    texts = requests(RequestLengths(100, 400), 120, math.inf)
    shape = EngineShape(OPT.kv_tokens, 256, 8192, costs=StepMeter(OPT))
    worker, held = ModelWorker(ModelEngine(shape), Greedy()), []
    Simulation(SortedQueue(by_arrival), [worker], lambda *_: held.append(worker.engine.held)).run(texts)
    assert all(text.generated == text.output == 400 for text in texts)
    assert max(held) <= OPT.kv_tokens and sum(text.evictions for text in texts) > 0


def test_one_request_takes_its_prefill_and_a_step_for_each_token() -> None:
    text = serve(OPT, requests(LENGTHS, 1, math.inf)).texts[0]
    first = OPT.step_s(1, 512, 512)
    rest = sum(OPT.step_s(1, 512 + done, 0) for done in range(1, 128))
    assert text.first_s == pytest.approx(first) and text.ended_s == pytest.approx(first + rest)
    assert text.tpot_s == pytest.approx(rest / 127)


def test_a_full_batch_yields_a_token_for_each_step_of_each() -> None:
    """Of short prompts, whose prefill is nearly nothing."""
    sixteen = replace(OPT, given=replace(OPT.given, max_batch=16))
    served = serve(sixteen, requests(RequestLengths(1, 256), 16, math.inf))
    mean = OPT.step_s(16, 16 * (1 + 128), 0)
    assert served.tokens_s == pytest.approx(16 / mean, rel=0.02)
    assert served.mbu == pytest.approx(1.0, abs=0.05) and 0 < served.mfu < 0.2


def test_replicas_share_the_requests() -> None:
    """Twice as many serve twice as many, at the same energy a token."""
    two = replace(OPT, plan=ParallelPlan(dp=2))
    one, both = serve(OPT, requests(LENGTHS, 16, math.inf)), serve(two, requests(LENGTHS, 32, math.inf))
    assert both.tokens_s == pytest.approx(2 * one.tokens_s) and both.joules_token == pytest.approx(one.joules_token)


def test_a_meter_interpolates_steps_exactly() -> None:
    meter = StepMeter(OPT)
    for texts, held, prefilled in ((3, 2000, 0), (3, 9000, 0), (4, 2000, 512)):
        assert meter.step_s(texts, held, prefilled) == pytest.approx(OPT.step_s(texts, held, prefilled))
    steps = [OPT.step(3, 2000, 0), OPT.step(3, 9000, 0), OPT.step(4, 2000, 512)]
    assert meter.busy_s == pytest.approx(sum(step.seconds for step in steps))
    assert meter.flops == pytest.approx(sum(step.flops for step in steps))
    assert meter.bytes == pytest.approx(sum(step.bytes for step in steps))
    assert meter.joules == pytest.approx(sum(OPT.watts(step) * step.seconds for step in steps))


def test_an_idle_fleet_draws_its_idle_power() -> None:
    """At a hundredth of the load, most energy is that of waiting."""
    alone = serve(OPT, requests(LENGTHS, 1, math.inf))
    slow = serve(OPT, requests(LENGTHS, 20, 0.01))
    waited = slow.seconds - 20 * alone.seconds
    assert slow.joules == pytest.approx(20 * alone.joules + waited * OPT.given.device.idle_watts, rel=0.01)


def test_no_requests_take_nothing() -> None:
    found = serve(OPT, [])
    assert (found.seconds, found.joules, found.mfu, found.mbu) == (0, 0, 0, 0)


def test_requests_come_at_their_rate() -> None:
    texts = requests(LENGTHS, 4000, 5.0)
    assert texts[-1].arrived_s == pytest.approx(4000 / 5, rel=0.05)
    assert {text.arrived_s for text in requests(LENGTHS, 9, math.inf)} == {0.0}


def answered(first_s: float, ended_s: float, output: int = 11) -> ModelText:
    return ModelText(10, output, output, first_s=first_s, ended_s=ended_s)


def test_both_objectives_count_and_not_each_by_itself() -> None:
    """Nine of ten keep each, eight of ten keep both: judged one by one, that would pass."""
    texts = [answered(0.1, 0.6)] * 8 + [answered(0.3, 0.8), answered(0.1, 9.0)]
    kept = attainment(texts, LatencySlo(0.2, 0.1))
    assert (kept.both, kept.ttft, kept.tpot) == (0.8, 0.9, 0.9)


def test_what_was_not_answered_keeps_nothing() -> None:
    assert attainment([ModelText(10, 5, 5)], LatencySlo()).both == 0
    assert attainment([answered(0.1, 0.1, output=1)], LatencySlo()).both == 1


def test_quantiles_lie_between_values() -> None:
    assert [quantile([1.0, 2.0, 4.0], share) for share in (0, 0.5, 0.75, 1)] == [1, 2, 3, 4]
    assert quantile([7.0], 0.95) == 7
