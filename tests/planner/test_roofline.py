"""Roofline: golden numbers, limits and monotony; closed forms of experts and of collectives."""

from __future__ import annotations

import pytest

from planner import roofline
from planner.facts.catalogue import device, model, models
from planner.load import KvReads, PlanInput, Precision

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
