"""Parallelism plans: which are valid, what a GPU holds, and the closed forms of a step."""

from __future__ import annotations

import pytest

from planner.facts.catalogue import PlanError, device, model
from planner.facts.model import ModelShape
from planner.load import PlanInput, Precision
from planner.roofline import all_reduce_s, decode
from planner.search import WORKSPACE_BYTES, ParallelPlan, ReplicaModel, is_valid, plans

LLAMA, MIXTRAL, H200 = model("llama-3.1-70b"), model("mixtral-8x7b"), device("h200")


def replica(plan: ParallelPlan, shape: ModelShape = LLAMA, overhead_s: float = 0.0, **more: float) -> ReplicaModel:
    return ReplicaModel(PlanInput(shape, H200, **more), plan, overhead_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "valid"),
    [
        (ParallelPlan(tp=8), True),
        (ParallelPlan(tp=16), True),  # two GPUs share each of the 8 heads of keys
        (ParallelPlan(tp=3), False),
        (ParallelPlan(pp=16), True),
        (ParallelPlan(pp=3), False),
        (ParallelPlan(tp=8, ep=2), False),  # one expert cannot be in two places
        (ParallelPlan(attention_dp=True), False),  # of one GPU
        (ParallelPlan(tp=8, attention_dp=True), True),
    ],
)
def test_each_gpu_gets_as_much(plan: ParallelPlan, valid: bool) -> None:
    assert is_valid(plan, LLAMA) is valid


def test_experts_divide_over_their_groups() -> None:
    assert is_valid(ParallelPlan(tp=8, ep=8), MIXTRAL) and not is_valid(ParallelPlan(tp=8, ep=3), MIXTRAL)


def test_all_plans_use_all_gpus_once_each() -> None:
    found = list(plans(MIXTRAL, 8))
    assert len(found) == len(set(found)) and {plan.gpus for plan in found} == {8}
    assert {plan.ep for plan in found} == {1, 2, 4, 8}
    assert {plan.ep for plan in plans(LLAMA, 8)} == {1}
    assert len({plan.name for plan in found}) == len(found)


@pytest.mark.parametrize(
    "plan", [plan for plan in plans(LLAMA, 8) if not plan.attention_dp], ids=lambda plan: plan.name
)
def test_the_gpus_of_a_replica_hold_the_weights_once(plan: ParallelPlan) -> None:
    """Of a pipeline, the first stage has one table, the last the other; all are counted like those."""
    table = LLAMA.vocab * LLAMA.hidden
    whole = replica(plan).weight_bytes * plan.tp * plan.pp
    assert whole == pytest.approx(2 * (LLAMA.weights - 2 * table + max(2, plan.pp) * table))


def test_attention_dp_holds_its_matrices_whole_and_each_cache_once() -> None:
    shared, apart = replica(ParallelPlan(tp=4)), replica(ParallelPlan(tp=4, attention_dp=True))
    more = 2 * LLAMA.layers * LLAMA.attention_weights * 3 / 4
    assert apart.weight_bytes - shared.weight_bytes == pytest.approx(more)
    # Four GPUs with all heads of their own requests hold as many tokens as four with a quarter of the heads of all.
    room = H200.memory_bytes - WORKSPACE_BYTES - apart.weight_bytes
    assert apart.kv_tokens == pytest.approx(4 * room / LLAMA.kv_token_bytes(), rel=1e-5)
    room = H200.memory_bytes - WORKSPACE_BYTES - shared.weight_bytes
    assert shared.kv_tokens == pytest.approx(4 * room / LLAMA.kv_token_bytes(), rel=1e-5)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(PlanError, match=r"each h200 would hold 141\.1 GB"):
        _ = replica(ParallelPlan()).kv_tokens
    eight = ReplicaModel(PlanInput(LLAMA, H200, precision=Precision(8)), ParallelPlan())
    assert eight.kv_tokens > 0


@pytest.mark.parametrize(("texts", "context"), [(1, 100), (32, 640), (200, 1000)])
def test_a_step_of_one_gpu_is_the_roofline(texts: int, context: int) -> None:
    """Norms and scores, which the faster form leaves out, take a few percent."""
    one = ReplicaModel(PlanInput(model("llama-3.1-8b"), H200), ParallelPlan())
    wanted = decode(PlanInput(model("llama-3.1-8b"), H200), texts, context).seconds
    assert one.step_s(texts, texts * context, 0) == pytest.approx(wanted, rel=0.05)


def test_a_step_over_two_gpus_is_half_of_it_and_two_all_reduces_a_layer() -> None:
    one, two = (
        ReplicaModel(PlanInput(model("opt-13b"), H200), ParallelPlan(tp=tp)).step_s(16, 16 * 640, 0) for tp in (1, 2)
    )
    talk = 40 * 2 * all_reduce_s(16 * 5120 * 2, 2, H200.link_bytes_s, H200.hop_s)
    assert two == pytest.approx(one / 2 + talk, rel=0.02)


def test_a_pipeline_is_no_faster_for_one_request() -> None:
    """Its stages work one after the other; with a full batch they work at once."""
    one, two = (replica(ParallelPlan(tp=2, pp=pp)) for pp in (1, 2))
    assert two.step_s(1, 640, 0) == pytest.approx(one.step_s(1, 640, 0), rel=0.02)
    # Compute-bound work is shared: a prefill takes half as long over twice the GPUs.
    assert two.step_s(1, 8192, 8192) == pytest.approx(one.step_s(1, 8192, 8192) / 2, rel=0.1)


def test_half_the_efficiency_takes_twice_as_long() -> None:
    whole, half = (replica(ParallelPlan(tp=2), efficiency=share) for share in (1.0, 0.5))
    talk = 80 * 2 * all_reduce_s(8 * 8192 * 2, 2, H200.link_bytes_s, H200.hop_s)
    one, two = whole.step_s(8, 5000, 0) - talk, half.step_s(8, 5000, 0) - talk
    assert two == pytest.approx(2 * one, rel=1e-6)


def test_power_lies_between_idle_and_the_limit() -> None:
    """A step that only reads memory draws all of it, one that waits for its overhead nearly none."""
    busy = replica(ParallelPlan(tp=2))
    waiting = replica(ParallelPlan(tp=2), overhead_s=10.0)
    assert 2 * 500 < busy.watts(busy.step(1, 640, 0)) <= 2 * 700
    assert waiting.watts(waiting.step(1, 640, 0)) == pytest.approx(2 * 70, rel=0.02)
