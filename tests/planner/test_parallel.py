"""Parallelism plans: which are valid, what a GPU holds, closed forms of a step; and how replicas serve requests."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner import search
from planner.facts.catalogue import ModelShape, PlanError, device, model
from planner.load import LatencySlo, PlanInput, Precision, RequestLengths
from planner.roofline import SLACK_BYTES, all_reduce_s, decode
from planner.simulator.engine import EngineShape, Greedy, ModelEngine, ModelStep, ModelText
from planner.simulator.queues import ModelWorker, Simulation, TextQueue, by_arrival

LLAMA, MIXTRAL, H200 = model("llama-3.1-70b"), model("mixtral-8x7b"), device("h200")


def replica(plan: search.ParallelPlan, shape: ModelShape = LLAMA) -> search.ReplicaModel:
    return search.ReplicaModel(PlanInput(shape, H200), plan)


@pytest.mark.parametrize(("plan", "valid"), [
    (search.ParallelPlan(tp=8), True),
    (search.ParallelPlan(tp=16), True),  # two GPUs share each of the 8 heads of keys
    (search.ParallelPlan(tp=3), False),
    (search.ParallelPlan(pp=16), True),
    (search.ParallelPlan(pp=3), False),
    (search.ParallelPlan(tp=8, ep=2), False),  # one expert cannot be in two places
    (search.ParallelPlan(attention_dp=True), False),  # of one GPU
    (search.ParallelPlan(tp=8, attention_dp=True), True),
])  # fmt: skip
def test_each_gpu_gets_as_much(plan: search.ParallelPlan, valid: bool) -> None:
    assert search.is_valid(plan, LLAMA) is valid


def test_all_plans_use_all_gpus_once_each() -> None:
    found = list(search.plans(MIXTRAL, 8))
    assert len(found) == len(set(found)) and {plan.gpus for plan in found} == {8}
    assert {plan.ep for plan in found} == {1, 2, 4, 8}
    assert {plan.ep for plan in search.plans(LLAMA, 8)} == {1}
    assert len({plan.name for plan in found}) == len(found)


@pytest.mark.parametrize(
    "plan", [plan for plan in search.plans(LLAMA, 8) if not plan.attention_dp], ids=lambda plan: plan.name
)
def test_the_gpus_of_a_replica_hold_the_weights_once(plan: search.ParallelPlan) -> None:
    """Of a pipeline, the first stage has one table, the last the other; all are counted like those."""
    table = LLAMA.vocab * LLAMA.hidden
    whole = replica(plan).weight_bytes * plan.tp * plan.pp
    assert whole == pytest.approx(2 * (LLAMA.weights - 2 * table + max(2, plan.pp) * table))


def test_attention_dp_holds_its_matrices_whole_and_each_cache_once() -> None:
    shared, apart = replica(search.ParallelPlan(tp=4)), replica(search.ParallelPlan(tp=4, attention_dp=True))
    more = 2 * LLAMA.layers * LLAMA.attention_weights * 3 / 4
    assert apart.weight_bytes - shared.weight_bytes == pytest.approx(more)
    # Four GPUs with all heads of their own requests hold as many tokens as four with a quarter of the heads of all.
    room = H200.memory_bytes - SLACK_BYTES - apart.weight_bytes
    assert apart.kv_tokens == pytest.approx(4 * room / LLAMA.kv_token_bytes(), rel=1e-5)
    room = H200.memory_bytes - SLACK_BYTES - shared.weight_bytes
    assert shared.kv_tokens == pytest.approx(4 * room / LLAMA.kv_token_bytes(), rel=1e-5)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(PlanError, match=r"each h200 would hold 141\.1 GB"):
        _ = replica(search.ParallelPlan()).kv_tokens
    eight = search.ReplicaModel(PlanInput(LLAMA, H200, precision=Precision(8)), search.ParallelPlan())
    assert eight.kv_tokens > 0


@pytest.mark.parametrize(("texts", "context"), [(1, 100), (32, 640), (200, 1000)])
def test_a_step_of_one_gpu_is_the_roofline(texts: int, context: int) -> None:
    """Norms and scores, which the faster form leaves out, take a few percent."""
    one = search.ReplicaModel(PlanInput(model("llama-3.1-8b"), H200), search.ParallelPlan())
    wanted = decode(PlanInput(model("llama-3.1-8b"), H200), texts, context).seconds
    assert one.step(texts, texts * context, 0).seconds == pytest.approx(wanted, rel=0.05)


def test_a_step_over_two_gpus_is_half_of_it_and_two_all_reduces_a_layer() -> None:
    one, two = (
        search.ReplicaModel(PlanInput(model("opt-13b"), H200), search.ParallelPlan(tp=tp)).step(16, 16 * 640, 0).seconds
        for tp in (1, 2)
    )
    talk = 40 * 2 * all_reduce_s(16 * 5120 * 2, 2, H200.link_bytes_s, H200.hop_s)
    assert two == pytest.approx(one / 2 + talk, rel=0.02)


def test_a_pipeline_is_no_faster_for_one_request() -> None:
    """Its stages work one after the other; with a full batch they work at once."""
    one, two = (replica(search.ParallelPlan(tp=2, pp=pp)) for pp in (1, 2))
    assert two.step(1, 640, 0).seconds == pytest.approx(one.step(1, 640, 0).seconds, rel=0.02)
    # Compute-bound work is shared: a prefill takes half as long over twice the GPUs.
    assert two.step(1, 8192, 8192).seconds == pytest.approx(one.step(1, 8192, 8192).seconds / 2, rel=0.1)


def test_power_lies_between_idle_and_the_limit() -> None:
    """A step that only reads memory draws all of it."""
    busy = replica(search.ParallelPlan(tp=2))
    assert 2 * 500 < busy.watts(busy.step(1, 640, 0)) <= 2 * 700


OPT = search.ReplicaModel(PlanInput(model("opt-13b"), device("a100-40gb")), search.ParallelPlan())
"""Its cache holds about 15,000 tokens: 24 requests of 512 + 128."""
LENGTHS = RequestLengths(512, 128)


def test_every_text_gets_all_its_tokens_and_the_cache_holds_them() -> None:
    """Also where texts are evicted, because all of them grow beyond the cache."""
    texts = search.requests(RequestLengths(100, 400), 120, math.inf)
    shape = EngineShape(OPT.kv_tokens, 256, 8192, costs=search.StepMeter(OPT))
    held = []

    class Watched(ModelWorker):
        def note(self, step: ModelStep, now_s: float) -> None:
            super().note(step, now_s)
            held.append(self.engine.held)

    Simulation(TextQueue(by_arrival), [Watched(ModelEngine(shape), Greedy())]).run(texts)
    assert all(text.generated == text.output == 400 for text in texts)
    assert max(held) <= OPT.kv_tokens and sum(text.evictions for text in texts) > 0


def test_one_request_takes_its_prefill_and_a_step_for_each_token() -> None:
    text = search.serve(OPT, search.requests(LENGTHS, 1, math.inf)).texts[0]
    first = OPT.step(1, 512, 512).seconds
    rest = sum(OPT.step(1, 512 + done, 0).seconds for done in range(1, 128))
    assert text.first_s == pytest.approx(first) and text.ended_s == pytest.approx(first + rest)
    assert text.tpot_s == pytest.approx(rest / 127)


def test_a_full_batch_yields_a_token_for_each_step_of_each() -> None:
    """Of short prompts, whose prefill is nearly nothing."""
    sixteen = replace(OPT, given=replace(OPT.given, max_batch=16))
    served = search.serve(sixteen, search.requests(RequestLengths(1, 256), 16, math.inf))
    mean = OPT.step(16, 16 * (1 + 128), 0).seconds
    assert served.tokens_s == pytest.approx(16 / mean, rel=0.02)
    assert served.mbu == pytest.approx(1.0, abs=0.05) and 0 < served.mfu < 0.2


def test_a_meter_interpolates_steps_exactly() -> None:
    meter = search.StepMeter(OPT)
    for texts, held, prefilled in ((3, 2000, 0), (3, 9000, 0), (4, 2000, 512)):
        assert meter.step_s(texts, held, prefilled) == pytest.approx(OPT.step(texts, held, prefilled).seconds)
    steps = [OPT.step(3, 2000, 0), OPT.step(3, 9000, 0), OPT.step(4, 2000, 512)]
    assert meter.done[:3] == pytest.approx([sum(each) for each in zip(*(step[:3] for step in steps), strict=True)])
    assert meter.done.joules == pytest.approx(sum(OPT.watts(step) * step.seconds for step in steps))


def test_an_idle_fleet_draws_its_idle_power() -> None:
    """At a hundredth of the load, most energy is that of waiting."""
    alone = search.serve(OPT, search.requests(LENGTHS, 1, math.inf))
    slow = search.serve(OPT, search.requests(LENGTHS, 20, 0.01))
    waited = slow.seconds - 20 * alone.seconds
    assert slow.joules == pytest.approx(20 * alone.joules + waited * OPT.given.device.idle_watts, rel=0.01)


def answered(first_s: float, ended_s: float, output: int = 11) -> ModelText:
    return ModelText(10, output, output, first_s=first_s, ended_s=ended_s)


def test_both_objectives_count_and_not_each_by_itself() -> None:
    """Nine of ten keep each, eight of ten keep both: judged one by one, that would pass."""
    texts = [answered(0.1, 0.6)] * 8 + [answered(0.3, 0.8), answered(0.1, 9.0)]
    kept = search.attainment(texts, LatencySlo(0.2, 0.1))
    assert (kept.both, kept.ttft, kept.tpot) == (0.8, 0.9, 0.9)
