"""Experts: closed forms and their limits."""

from __future__ import annotations

import pytest

from planner.facts.catalogue import device, model
from planner.load import PlanInput
from planner.roofline import (
    decode,
    distinct_experts,
    layer_groups,
    reload_factor,
    saturating_tokens,
)


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
        parts = decode(PlanInput(mixtral, h200), round(share * tokens), 1).parts
        bounds.append(next(part.bound for part in parts if part.name == "experts"))
    assert bounds == ["memory", "compute"]


def test_chunks_read_the_experts_again() -> None:
    """Layered prefill reads them once, in groups of layers for 512 tokens each."""
    assert [reload_factor(8192, chunk) for chunk in (512, 2048, 8192, 10_000)] == [16, 4, 1, 1]
    assert [layer_groups(prompt) for prompt in (1, 512, 513, 8192)] == [1, 1, 2, 16]
