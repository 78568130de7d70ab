"""Memory plan: SLM-Pareto's Table 1 exactly, and what does not fit names what would."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from planner.facts.catalogue import PlanError, device, model
from planner.load import PlanInput, Precision, RequestLengths
from planner.memory import USABLE, copy_bytes, kv_tokens_of, memory_advice, memory_plan, replicas_for

A100 = device("a100-40gb")
TABLE_1 = {"opt-125m": 512, "opt-1.3b": 256, "opt-2.7b": 128, "opt-6.7b": 64, "opt-13b": 16}
"""SLM-Pareto: the largest batch of 512 + 256 tokens on an A100 of 40 GB."""


@pytest.mark.parametrize("memory", [40e9, 40 * (1 << 30)], ids=["GB", "GiB"])
@pytest.mark.parametrize("name", TABLE_1)
def test_table_1_of_the_paper(name: str, memory: float) -> None:
    """Whichever GB the paper means."""
    gpu = msgspec.structs.replace(A100, memory_bytes=memory)
    assert memory_plan(PlanInput(model(name), gpu, RequestLengths(512, 256))).power_of_two == TABLE_1[name]


def test_the_worst_case_would_miss_three_rows_of_it() -> None:
    """512 + 256 tokens for each request is not what the paper counts with. (With 26 GB of weights for OPT-13B, instead
    of the 25.7 of its shape, it would miss a fourth.)"""
    worst = {}
    for name in TABLE_1:
        plan = memory_plan(PlanInput(model(name), A100, RequestLengths(512, 256)))
        worst[name] = min(512, 1 << plan.max_batch_worst.bit_length() - 1)
    assert worst == {"opt-125m": 512, "opt-1.3b": 128, "opt-2.7b": 64, "opt-6.7b": 32, "opt-13b": 16}


def test_a_request_of_opt_1_3b_takes_151_mb_and_not_50() -> None:
    """The paper's text contradicts its formula."""
    assert model("opt-1.3b").kv_token_bytes() * 768 == pytest.approx(151e6, rel=1e-3)


def test_a_request_takes_whole_blocks() -> None:
    """In the mean 513.5 tokens: 17 blocks of 32."""
    plan = memory_plan(PlanInput(model("opt-1.3b"), A100, RequestLengths(512, 3)))
    assert plan.request_bytes == 17 * 32 * plan.kv_token_bytes
    assert (
        memory_plan(PlanInput(model("opt-1.3b"), A100, RequestLengths(512, 3)), block=1).request_bytes == 514 * 196_608
    )


def test_devices_share_weights_and_cache() -> None:
    one = memory_plan(PlanInput(model("opt-13b"), device("h200")))
    two = memory_plan(PlanInput(model("opt-13b"), device("h200"), tp=2))
    assert two.weight_bytes * 2 == one.weight_bytes and two.kv_token_bytes * 2 == one.kv_token_bytes
    assert two.max_batch > 2 * one.max_batch


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_width_is_its_share_of_16_bits(bits: int) -> None:
    plan = memory_plan(PlanInput(model("opt-13b"), A100, precision=Precision(bits, 16, bits)))
    assert plan.weight_bytes == model("opt-13b").weights * bits / 8
    assert plan.kv_token_bytes == 819_200 * bits / 16


def test_what_does_not_fit_names_what_would() -> None:
    """And what it names fits."""
    big = model("opt-66b")
    with pytest.raises(PlanError, match=r"132\.9 GB of 36\.0 usable; --tp 4 or --w-bits 4 or --gpu b200 would fit"):
        memory_plan(PlanInput(big, A100))
    assert memory_plan(PlanInput(big, A100, tp=4)).max_batch >= 1
    assert memory_plan(PlanInput(big, A100, precision=Precision(4))).max_batch >= 1
    assert memory_plan(PlanInput(big, device("b200"))).max_batch >= 1
    with pytest.raises(PlanError):
        memory_plan(PlanInput(big, A100, tp=3))


def test_a_request_beyond_the_context_is_refused() -> None:
    with pytest.raises(PlanError, match="context of 2048"):
        memory_plan(PlanInput(model("opt-13b"), A100, RequestLengths(3000, 256)))


def test_the_advice_says_what_limits() -> None:
    given = PlanInput(model("opt-13b"), A100)
    said = memory_advice(given, memory_plan(given))
    assert "runs 19 requests" in said and "8 bits would hold 39" in said and "Weights take 71 %" in said


def test_a_file_counts_with_its_own_mean_bits() -> None:
    """Blocks of 34 bytes for 32 weights are 8.5 bits, a few norms of 32 bits among weights of 16 a little over 16."""
    for bits in (8.5, 16.01):
        shape = msgspec.structs.replace(model("smollm2-135m"), stored_bits=bits)
        plan = memory_plan(PlanInput(shape, A100, precision=Precision.stored(shape)))
        assert plan.weight_bytes == pytest.approx(shape.weights * bits / 8)
        assert A100.peak_for(bits, 16) == A100.peak[16]


def of_gib(gib: int) -> PlanInput:
    """Weights of 3 GiB with a small cache, on a GPU of so many."""
    shape = msgspec.structs.replace(model("opt-125m"), vocab=(3 << 29) // 768 - 112_000)
    return PlanInput(shape, msgspec.structs.replace(A100, memory_bytes=gib << 30))


@drawn(st.integers(1, 256), st.integers(16, 160))
def test_replicas_fit_with_their_caches(knee: int, gib: int) -> None:
    """All caches and all weights together stay within the usable share, and each cache holds the knee's requests."""
    small = of_gib(gib)
    replicas = replicas_for(small, knee)
    if not replicas:
        return
    tokens, (weights, token) = kv_tokens_of(small, replicas), copy_bytes(small)
    assert replicas * (tokens * token + weights) <= USABLE * (gib << 30)
    assert tokens >= knee * small.lengths.mean


def test_as_many_replicas_as_run_the_knee() -> None:
    """On 80 GiB three of them, though ten would fit; on 16 GiB two; on 4 GiB none."""
    assert [replicas_for(of_gib(gib), knee=128) for gib in (80, 16, 4)] == [3, 2, 0]
