"""Experts: closed forms and their limits, and the greedy choice of bits beside all choices."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from planner.facts.catalogue import device, model
from planner.moe import (
    bits_by_hotness,
    distinct_experts,
    effective_kv_tokens,
    layer_groups,
    offloaded_step_s,
    reload_factor,
    saturating_tokens,
)
from planner.roofline import RooflineInput, decode


def test_one_token_reaches_its_own_experts_and_many_reach_all() -> None:
    assert distinct_experts(8, 2, 1) == pytest.approx(2)
    assert distinct_experts(8, 2, 1000) == pytest.approx(8)
    assert distinct_experts(1, 1, 5) == 1


def test_experts_saturate_later_by_their_share_of_tokens() -> None:
    """FLOPS * bytes / (2 BW) * E / k: from there the part is bound by arithmetic, before it by memory."""
    mixtral, h200 = model("mixtral-8x7b"), device("h200")
    tokens = saturating_tokens(mixtral, h200)
    assert tokens == pytest.approx(206.04 * 8 / 2, rel=1e-3)
    assert saturating_tokens(mixtral, h200, 8) == tokens / 2
    bounds = []
    for share in (0.8, 1.25):
        parts = decode(RooflineInput(mixtral, h200), round(share * tokens), 1).parts
        bounds.append(next(part.bound for part in parts if part.name == "experts"))
    assert bounds == ["memory", "compute"]


def test_chunks_read_the_experts_again() -> None:
    """Layered prefill reads them once, in groups of layers for 512 tokens each."""
    assert [reload_factor(8192, chunk) for chunk in (512, 2048, 8192, 10_000)] == [16, 4, 1, 1]
    assert [layer_groups(prompt) for prompt in (1, 512, 513, 8192)] == [1, 1, 2, 16]


def test_requests_at_every_age_share_a_cache() -> None:
    assert effective_kv_tokens(1000, 512, 256) == pytest.approx(1000 * 768 / 640)
    assert effective_kv_tokens(1000, 512, 1) == pytest.approx(1000, rel=1e-3)


def test_an_offloaded_step_is_the_slowest_of_its_parts() -> None:
    assert offloaded_step_s(0.001, 64e9, 32e9, 1e9, 100e9) == 2.0
    assert offloaded_step_s(0.001, 1e6, 32e9, 50e9, 100e9) == 0.5
    assert offloaded_step_s(5.0, 64e9, 32e9, 1e9, 100e9) == 5.0


@pytest.mark.parametrize("seed", range(20))
def test_the_hottest_experts_get_the_bits(seed: int) -> None:
    """As much heat times bits as the best of all choices, where the budget is a number of whole steps to 8 bits."""
    random = Random(seed)
    hot = [random.random() for _ in range(5)]
    budget = (5 * 2 + 6 * random.randint(0, 5)) * 1000 / 8
    bits = bits_by_hotness(hot, 1000, budget)
    best = max(
        sum(heat * width for heat, width in zip(hot, widths, strict=True))
        for widths in product((2, 4, 8), repeat=5)
        if sum(widths) * 1000 / 8 <= budget
    )
    assert sum(bits) * 1000 / 8 <= budget
    assert sum(heat * width for heat, width in zip(hot, bits, strict=True)) == pytest.approx(best)


def test_a_budget_below_the_narrowest_width_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the budget"):
        bits_by_hotness([0.5, 0.5], 1000, 100)
