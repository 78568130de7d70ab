"""Mixture of experts: how many experts a step reads, when their arithmetic becomes the limit, and bits by hotness.

After MoE-Lens (distinct experts, saturation, effective capacity), layered prefill (reload factor) and D2MoE (bits).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.facts.device import Accelerator
from planner.facts.model import ModelShape

GROUP_TOKENS = 512
"""Layered prefill: a prompt of up to so many tokens passes all layers in one group."""


def distinct_experts(experts: int, per_token: int, tokens: float) -> float:
    """Experts that `tokens` tokens reach, if each chooses evenly: E (1 - (1 - k/E)^T). Real routing is less even."""
    return experts * (1 - math.pow(1 - per_token / experts, tokens))


def saturating_tokens(model: ModelShape, device: Accelerator, w_bits: float = 16, a_bits: float = 16) -> float:
    """Tokens in a step from which the arithmetic of the experts takes as long as reading them.

    Of one matrix: FLOPS * bytes / (2 BW) tokens. With experts, each sees k / E of the tokens, so it takes E / k times
    as many.
    """
    dense = device.peak_for(w_bits, a_bits) * (w_bits / 8) / (2 * device.bytes_s)
    return dense * model.experts / model.experts_per_token


def reload_factor(prompt: int, chunk: int) -> int:
    """How often a prefill in chunks reads all experts: ceil(L / chunk). Layer by layer it reads them once."""
    return math.ceil(prompt / chunk)


def layer_groups(prompt: int) -> int:
    """Groups of layers in which layered prefill passes a prompt, a step for each: max(1, ceil(L / 512))."""
    return max(1, math.ceil(prompt / GROUP_TOKENS))


def effective_kv_tokens(kv_tokens: float, prompt: int, answer: int) -> float:
    """Tokens of requests that a cache serves at once, with prefill and decode overlapped: C (p + g) / (p + g/2)."""
    return kv_tokens * (prompt + answer) / (prompt + answer / 2)


def offloaded_step_s(
    gemm_s: float, weight_bytes: float, host_bytes_s: float, kv_bytes: float, cpu_bytes_s: float
) -> float:
    """A step with experts and KV cache in the memory of the host: the slowest of the arithmetic on the GPU, the weights
    over PCIe, and the attention on the CPU."""
    return max(gemm_s, weight_bytes / host_bytes_s, kv_bytes / cpu_bytes_s)


def bits_by_hotness(
    hotness: Sequence[float], weights: int, budget_bytes: float, widths: Sequence[int] = (2, 4, 8)
) -> list[int]:
    """Bits of each expert under a budget of memory: the hottest first get the widest width that still fits.

    Args:
        hotness: share of the tokens that go to each expert.
        weights: of one expert.
        widths: that the format has; every expert gets the narrowest at least.

    Raises ValueError if not even the narrowest width fits.
    """
    widths = sorted(widths)
    left = budget_bytes - len(hotness) * weights * widths[0] / 8
    if left < 0:
        raise ValueError(f"{len(hotness)} experts at {widths[0]} bits take {-left:.0f} bytes more than the budget")
    bits = [widths[0]] * len(hotness)
    for number in sorted(range(len(hotness)), key=lambda each: -hotness[each]):
        bits[number] = max(width for width in widths if (width - widths[0]) * weights / 8 <= left)
        left -= (bits[number] - widths[0]) * weights / 8
    return bits
