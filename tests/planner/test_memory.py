"""Memory plan: SLM-Pareto's Table 1 exactly, what does not fit names what would, and what offloading takes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from planner import roofline as plans
from planner.facts.catalogue import PlanError, device, model
from planner.load import PlanInput, Precision, RequestLengths
from planner.roofline import decode

A100 = device("a100-40gb")
TABLE_1 = {"opt-125m": 512, "opt-1.3b": 256, "opt-2.7b": 128, "opt-6.7b": 64, "opt-13b": 16}
"""SLM-Pareto: the largest batch of 512 + 256 tokens on an A100 of 40 GB."""


@pytest.mark.parametrize("memory", [40e9, 40 * (1 << 30)], ids=["GB", "GiB"])
@pytest.mark.parametrize("name", TABLE_1)
def test_table_1_of_the_paper(name: str, memory: float) -> None:
    """Whichever GB the paper means."""
    gpu = msgspec.structs.replace(A100, memory_bytes=memory)
    assert plans.memory_plan(PlanInput(model(name), gpu, RequestLengths(512, 256))).power_of_two == TABLE_1[name]


def test_a_request_takes_whole_blocks() -> None:
    """In the mean 513.5 tokens: 17 blocks of 32."""
    plan = plans.memory_plan(PlanInput(model("opt-1.3b"), A100, RequestLengths(512, 3)))
    assert plan.request_bytes == 17 * 32 * plan.kv_token_bytes
    assert (
        plans.memory_plan(PlanInput(model("opt-1.3b"), A100, RequestLengths(512, 3)), block=1).request_bytes
        == 514 * 196_608
    )


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_width_is_its_share_of_16_bits(bits: int) -> None:
    plan = plans.memory_plan(PlanInput(model("opt-13b"), A100, precision=Precision(bits, 16, bits)))
    assert plan.weight_bytes == model("opt-13b").weights * bits / 8
    assert plan.kv_token_bytes == 819_200 * bits / 16


def test_what_does_not_fit_names_what_would() -> None:
    """And what it names fits."""
    big = model("opt-66b")
    with pytest.raises(PlanError, match=r"132\.9 GB of 36\.0 usable; more devices"):
        plans.memory_plan(PlanInput(big, A100))
    assert plans.memory_plan(PlanInput(big, A100, tp=4)).max_batch >= 1
    assert plans.memory_plan(PlanInput(big, A100, precision=Precision(4))).max_batch >= 1
    assert plans.memory_plan(PlanInput(big, device("b200"))).max_batch >= 1
    with pytest.raises(PlanError):
        plans.memory_plan(PlanInput(big, A100, tp=3))


def of_gib(gib: int) -> PlanInput:
    """Weights of 3 GiB with a small cache, on a GPU of so many."""
    shape = msgspec.structs.replace(model("opt-125m"), vocab=(3 << 29) // 768 - 112_000)
    return PlanInput(shape, msgspec.structs.replace(A100, memory_bytes=gib << 30))


@drawn(st.integers(1, 256), st.integers(16, 160))
def test_replicas_fit_with_their_caches(knee: int, gib: int) -> None:
    """All caches and all weights together stay within the usable share, and each cache holds the knee's requests."""
    small = of_gib(gib)
    replicas = plans.replicas_for(small, knee)
    if not replicas:
        return
    tokens, (weights, token) = plans.kv_tokens_of(small, replicas), plans.copy_bytes(small)
    assert replicas * (tokens * token + weights) <= plans.USABLE * (gib << 30)
    assert tokens >= knee * small.lengths.mean


def test_as_many_replicas_as_run_the_knee() -> None:
    """On 80 GiB three of them, though ten would fit; on 16 GiB two; on 4 GiB none."""
    assert [plans.replicas_for(of_gib(gib), knee=128) for gib in (80, 16, 4)] == [3, 2, 0]


GIVEN = PlanInput(model("opt-13b"), device("h200"))


def test_with_a_free_link_the_step_is_the_sum_of_two_rooflines() -> None:
    found = plans.attention_offloaded(GIVEN, device("l4"), 4, 1e30)
    parts = decode(GIVEN, found.batch, 640).parts
    rest = sum(part.seconds for part in parts if part.name != "attention")
    reads = found.batch * 640 * 819_200 / (4 * 300e9)
    hops = 40 * device("h200").hop_s
    assert found.seconds == pytest.approx(rest + reads + hops)


def test_the_batch_is_what_the_memory_devices_hold() -> None:
    one, four = (plans.attention_offloaded(GIVEN, device("l4"), count, 25e9) for count in (1, 4))
    assert one.batch == int(0.9 * 24e9 / (640 * 819_200)) and four.batch >= 4 * one.batch
    assert four.link_s > one.link_s
    assert four.tokens_s == pytest.approx(four.batch / four.seconds)


def test_a_slow_disk_is_the_step() -> None:
    weights = 2 * model("opt-13b").weights
    assert plans.streamed_step_s(GIVEN, 1, 640, 3e9) == pytest.approx(weights / 3e9)
    assert plans.streamed_step_s(GIVEN, 1, 640, 1e15) == pytest.approx(decode(GIVEN, 1, 640).seconds)
