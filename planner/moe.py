"""Mixture of experts: how many experts a step reads, how often a prefill does, and when arithmetic becomes the limit.

After MoE-Lens (distinct experts, saturation) and layered prefill (reload factor).
"""

from __future__ import annotations

import math

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
