"""One model on one kind of device: SLM-Pareto's Table 1 exactly, golden numbers and closed forms of a step, what does
not fit names what would, and what offloading takes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from planner import roofline
from planner.facts.catalogue import PlanError, device, model, models
from planner.load import KvReads, PlanInput, Precision, RequestLengths

A100 = device("a100-40gb")
TABLE_1 = {"opt-125m": 512, "opt-1.3b": 256, "opt-2.7b": 128, "opt-6.7b": 64, "opt-13b": 16}
"""SLM-Pareto: the largest batch of 512 + 256 tokens on an A100 of 40 GB."""


@pytest.mark.parametrize("memory", [40e9, 40 * (1 << 30)], ids=["GB", "GiB"])
@pytest.mark.parametrize("name", TABLE_1)
def test_table_1_of_the_paper(name: str, memory: float) -> None:
    """Whichever GB the paper means."""
    gpu = msgspec.structs.replace(A100, memory_bytes=memory)
    assert roofline.memory_plan(PlanInput(model(name), gpu, RequestLengths(512, 256))).power_of_two == TABLE_1[name]


def test_a_request_takes_whole_blocks() -> None:
    """In the mean 513.5 tokens: 17 blocks of 32."""
    plan = roofline.memory_plan(PlanInput(model("opt-1.3b"), A100, RequestLengths(512, 3)))
    assert plan.request_bytes == 17 * 32 * plan.kv_token_bytes
    assert (
        roofline.memory_plan(PlanInput(model("opt-1.3b"), A100, RequestLengths(512, 3)), block=1).request_bytes
        == 514 * 196_608
    )


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_width_is_its_share_of_16_bits(bits: int) -> None:
    plan = roofline.memory_plan(PlanInput(model("opt-13b"), A100, precision=Precision(bits, 16, bits)))
    assert plan.weight_bytes == model("opt-13b").weights * bits / 8
    assert plan.kv_token_bytes == 819_200 * bits / 16


def test_what_does_not_fit_names_what_would() -> None:
    """And what it names fits."""
    big = model("opt-66b")
    with pytest.raises(PlanError, match=r"132\.9 GB of 36\.0 usable; more devices"):
        roofline.memory_plan(PlanInput(big, A100))
    assert roofline.memory_plan(PlanInput(big, A100, tp=4)).max_batch >= 1
    assert roofline.memory_plan(PlanInput(big, A100, precision=Precision(4))).max_batch >= 1
    assert roofline.memory_plan(PlanInput(big, device("b200"))).max_batch >= 1
    with pytest.raises(PlanError):
        roofline.memory_plan(PlanInput(big, A100, tp=3))


def of_gib(gib: int) -> PlanInput:
    """Weights of 3 GiB with a small cache, on a GPU of so many."""
    shape = msgspec.structs.replace(model("opt-125m"), vocab=(3 << 29) // 768 - 112_000)
    return PlanInput(shape, msgspec.structs.replace(A100, memory_bytes=gib << 30))


@drawn(st.integers(1, 256), st.integers(16, 160))
def test_replicas_fit_with_their_caches(knee: int, gib: int) -> None:
    """All caches and all weights together stay within the usable share, and each cache holds the knee's requests."""
    small = of_gib(gib)
    replicas = roofline.replicas_for(small, knee)
    if not replicas:
        return
    tokens, (weights, token) = roofline.kv_tokens_of(small, replicas), roofline.copy_bytes(small)
    assert replicas * (tokens * token + weights) <= roofline.USABLE * (gib << 30)
    assert tokens >= knee * small.lengths.mean


def test_as_many_replicas_as_run_the_knee() -> None:
    """On 80 GiB three of them, though ten would fit; on 16 GiB two; on 4 GiB none."""
    assert [roofline.replicas_for(of_gib(gib), knee=128) for gib in (80, 16, 4)] == [3, 2, 0]


GIVEN = PlanInput(model("opt-13b"), device("h200"))


def test_with_a_free_link_the_step_is_the_sum_of_two_rooflines() -> None:
    found = roofline.attention_offloaded(GIVEN, device("l4"), 4, 1e30)
    parts = roofline.decode(GIVEN, found.batch, 640).parts
    rest = sum(part.seconds for part in parts if part.name != "attention")
    reads = found.batch * 640 * 819_200 / (4 * 300e9)
    hops = 40 * device("h200").hop_s
    assert found.seconds == pytest.approx(rest + reads + hops)


def test_the_batch_is_what_the_memory_devices_hold() -> None:
    one, four = (roofline.attention_offloaded(GIVEN, device("l4"), count, 25e9) for count in (1, 4))
    assert one.batch == int(0.9 * 24e9 / (640 * 819_200)) and four.batch >= 4 * one.batch
    assert four.link_s > one.link_s
    assert four.tokens_s == pytest.approx(four.batch / four.seconds)


def test_a_slow_disk_is_the_step() -> None:
    weights = 2 * model("opt-13b").weights
    assert roofline.streamed_step_s(GIVEN, 1, 640, 3e9) == pytest.approx(weights / 3e9)
    assert roofline.streamed_step_s(GIVEN, 1, 640, 1e15) == pytest.approx(roofline.decode(GIVEN, 1, 640).seconds)


H100X2 = PlanInput(model("mixtral-8x7b"), device("h100"), tp=2)
SCALELLM = {4: (9.7, 10.4), 8: (12.7, 12.2), 16: (14.0, 13.4), 32: (14.4, 14.6), 64: (14.9, 16.5)}
"""By concurrency: what the closed form predicts, and the time between tokens in ms of ScaleLLM's Table 1."""


@pytest.mark.parametrize("batch", SCALELLM)
def test_mixtral_on_two_h100(batch: int) -> None:
    """Weights of the distinct experts and the cache over the bandwidth of both; the parts add the activations."""
    golden, observed = SCALELLM[batch]
    mixtral, context = model("mixtral-8x7b"), 500 + 256
    experts = mixtral.layers * mixtral.experts * mixtral.expert_weights
    read = mixtral.weights - experts + experts * roofline.distinct_experts(8, 2, batch) / 8
    closed_ms = 1e3 * (2 * read + batch * context * mixtral.kv_token_bytes()) / (2 * 3.35e12)
    assert closed_ms == pytest.approx(golden, abs=0.05)
    found_ms = 1e3 * roofline.decode(H100X2, batch, context).seconds
    assert found_ms == pytest.approx(closed_ms, rel=0.01)
    assert found_ms == pytest.approx(observed, rel=0.12)


def test_a_matrix_by_hand() -> None:
    """Llama-2-7B's matrix o at batch 8 on an A100: 4096 x 4096 weights of two bytes, and 8 rows in and out."""
    given = PlanInput(model("llama-2-7b"), device("a100-40gb"))
    part = next(part for part in roofline.decode(given, 8, 100).parts if part.name == "output")
    assert part.flops == 32 * 2 * 4096 * 4096 * 8
    assert part.bytes == 32 * (2 * 4096 * 4096 + 2 * (4096 + 4096) * 8)
    assert part.seconds == pytest.approx(part.bytes / 1.555e12) and part.bound == "memory"


def test_attention_reads_each_key_once_and_stores_one_row() -> None:
    """Grouped queries share the keys that are read; the output has a row for each request, not for each position."""
    given = PlanInput(model("llama-3.1-8b"), device("h200"))
    part = next(part for part in roofline.decode(given, 4, 1000).parts if part.name == "attention")
    assert part.bytes == 32 * (2 * 4 * 1000 * 8 * 128 * 2 + 2 * 2 * 4 * 32 * 128)
    assert part.flops == 32 * 4 * 1000 * 32 * (4 * 128 + 5)


@pytest.mark.parametrize("name", models())
def test_a_larger_batch_or_context_never_takes_less_and_a_batch_never_yields_less(name: str) -> None:
    given = PlanInput(model(name), device("h200"))
    steps = [roofline.decode(given, batch, 640).seconds for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert steps == sorted(steps)
    yields = [2**power / step for power, step in enumerate(steps)]
    # Few tokens reach few experts: only then a second token may read more than the first did.
    assert yields == sorted(yields)
    contexts = [roofline.decode(given, 8, context).seconds for context in (1, 10, 100, 1000)]
    assert contexts == sorted(contexts)


def test_a_prefill_is_bound_by_arithmetic_and_a_lone_decode_by_memory() -> None:
    given = PlanInput(model("llama-3.1-8b"), device("h200"))
    assert (roofline.prefill(given, 1, 2048).bound, roofline.decode(given, 1, 2048).bound) == ("compute", "memory")
    # A token of decode has the operations of a token of prefill, but for what attention sees.
    assert roofline.prefill(given, 1, 1).flops == pytest.approx(roofline.decode(given, 1, 1).flops)


def test_the_ridge_of_matrices_is_a_little_above_that_of_the_device() -> None:
    """2 ic oc B / (2 ic oc + 2 (ic + oc) B) = ridge; with 206 FLOP/B the activations add a few percent."""
    given = PlanInput(model("llama-3.1-70b"), device("h200"))
    assert roofline.ridge_batch(given, 640) == pytest.approx(206, rel=0.1)
    assert roofline.decode(given, 1, 640).bound == "memory"
    halved = PlanInput(model("llama-3.1-70b"), device("h200"), precision=Precision(8, 16, 16))
    assert roofline.ridge_batch(halved, 640) == pytest.approx(103, rel=0.1)
    assert (roofline.ridge_batch(PlanInput(model("mixtral-8x7b"), device("h200")), 640) or 0) > 3 * 206


def test_the_advice_names_the_ridge_and_the_cache() -> None:
    small, big = (PlanInput(model(name), device("h200")) for name in ("opt-125m", "llama-3.1-70b"))
    said = roofline.roofline_advice(roofline.decode(small, 256, 640), roofline.ridge_batch(small, 640), 1000)
    assert "beyond it a larger batch only adds latency" in said and "--kv-bits" in said
    said = roofline.roofline_advice(roofline.decode(big, 1, 640), 213, 20)
    assert "more memory means more tokens" in said


def test_sparse_reads_cap_what_attention_costs() -> None:
    """LServe: pages up to a budget for dense heads, sink and window for streaming ones."""
    assert KvReads(budget=4096, streaming=0.5, window=256).tokens(100_000) == 0.5 * 4096 + 0.5 * 256
    assert KvReads(budget=4096, streaming=0.5, window=256).tokens(100) == 100
    assert KvReads().tokens(100_000) == 100_000
    shape, h200 = model("llama-3.1-8b"), device("h200")
    capped, whole = (PlanInput(shape, h200, reads=reads) for reads in (KvReads(budget=4096), KvReads()))
    assert roofline.decode(capped, 8, 4096).seconds == roofline.decode(whole, 8, 4096).seconds
    assert (
        roofline.decode(capped, 8, 100_000).seconds
        == roofline.decode(capped, 8, 50_000).seconds
        < roofline.decode(whole, 8, 50_000).seconds
    )


def test_one_token_reaches_its_own_experts_and_many_reach_all() -> None:
    assert roofline.distinct_experts(8, 2, 1) == pytest.approx(2)
    assert roofline.distinct_experts(8, 2, 1000) == pytest.approx(8)
    assert roofline.distinct_experts(1, 1, 5) == 1


def test_experts_saturate_later_by_their_share_of_tokens() -> None:
    """FLOPS * bytes / (2 BW) * E / k: from there the part is bound by arithmetic, before it by memory."""
    mixtral, h200 = model("mixtral-8x7b"), device("h200")
    tokens = roofline.saturating_tokens(mixtral, h200)
    assert tokens == pytest.approx(206.04 * 8 / 2, rel=1e-3)
    assert roofline.saturating_tokens(mixtral, h200, 8) == tokens / 2
    bounds = []
    for share in (0.8, 1.25):
        parts = roofline.decode(PlanInput(mixtral, h200), round(share * tokens), 1).parts
        bounds.append(next(part.bound for part in parts if part.name == "experts"))
    assert bounds == ["memory", "compute"]


def test_closed_forms() -> None:
    """An all-reduce goes the faster way: around a ring if bandwidth decides, over a star if latency does."""
    assert roofline.all_reduce_s(8e6, 4, 1e9, 1e-3) == pytest.approx(2 * 3 / 4 * 8e6 / 1e9 + 6e-3)
    assert roofline.all_reduce_s(8e3, 4, 1e9, 1e-3) == pytest.approx(2 * (1e-3 + 4 * 8e3 / 1e9))
    assert roofline.all_to_all_s(8e6, 4, 1e9, 1e-3) == pytest.approx(3 / 4 * 8e6 / 1e9 + 1e-3)
    assert roofline.send_s(8e6, 1e9, 1e-3) == pytest.approx(9e-3)
    assert roofline.all_reduce_s(8e6, 1, 1e9, 1) == roofline.all_to_all_s(8e6, 1, 1e9, 1) == 0
