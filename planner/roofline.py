"""Roofline of a model on a device: operations and bytes of each part of a layer, the time they take, and the limit.

After LLM-Viewer: a part takes max(operations / peak, bytes / bandwidth) seconds. Linear parts of ic inputs and oc
outputs have 2 ic oc operations a token, and move w ic oc bytes of weights and a (ic + oc) bytes a token. Attention of a
decode step has 4 B ctx heads hd operations and reads 2 B ctx kv_heads hd bytes of cache; softmax has 5 operations for
each score, a norm 7 for each element. Two corrections: attention stores B heads hd outputs, not one for each position,
and a fused kernel reads the cache once for each head of keys, not for each query head. Distinct experts and saturation
follow MoE-Lens.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from planner.facts.catalogue import Accelerator
from planner.facts.model import ModelShape
from planner.load import PlanInput

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


Bound: TypeAlias = Literal["memory", "compute"]
SOFTMAX_OPS = 5
NORM_OPS = 7
MAX_BATCH = 1 << 16
"""A batch beyond it is not looked for."""
ATTENTION_SHARE = 40
"""Percent of a step from which the advice is about the cache."""


@dataclass(frozen=True, slots=True)
class RooflinePart:
    """One part of all layers of a step (or the head), on one of the devices."""

    name: str
    flops: float
    bytes: float
    seconds: float
    bound: Bound

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True, slots=True)
class Roofline:
    """One step: all its parts."""

    parts: tuple[RooflinePart, ...]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def flops(self) -> float:
        return sum(part.flops for part in self.parts)

    @property
    def bytes(self) -> float:
        return sum(part.bytes for part in self.parts)

    @property
    def bound(self) -> Bound:
        """What takes most of the time."""
        memory = sum(part.seconds for part in self.parts if part.bound == "memory")
        return "memory" if 2 * memory >= self.seconds else "compute"


def _part(given: PlanInput, name: str, count: int, flops: float, size: float, peak: float) -> RooflinePart:
    """`count` times so many operations and bytes, at a rate of operations."""
    compute, memory = flops / peak, size / given.device.bytes_s
    bound: Bound = "compute" if compute > memory else "memory"
    return RooflinePart(name, count * flops, count * size, count * max(compute, memory), bound)


def _linear(given: PlanInput, name: str, count: int, inputs: int, outputs: int, tokens: float) -> RooflinePart:
    """A matrix whose columns or rows the devices share."""
    weights = inputs * outputs / given.tp
    moved = weights * given.precision.w / 8 + given.precision.a / 8 * (inputs + outputs / given.tp) * tokens
    return _part(given, name, count, 2 * weights * tokens, moved, peak_of(given))


def peak_of(given: PlanInput) -> float:
    """Operations a second of products of weights and activations."""
    return given.device.peak_for(given.precision.w, given.precision.a)


def decode(given: PlanInput, batch: int, context: float) -> Roofline:
    """A decode step of `batch` requests that hold `context` tokens each."""
    seen = batch * given.reads.tokens(given.model.seen(context))
    return _step(given, batch, batch, seen, seen * given.model.cached_numbers(given.tp))


def prefill(given: PlanInput, batch: int, prompt: int) -> Roofline:
    """The prefill of `batch` prompts of `prompt` tokens, in one step; each token sees those before it."""
    model, tokens = given.model, batch * prompt
    written = 2 * tokens * -(-model.kv_heads // given.tp) * model.head_dim
    return _step(given, tokens, batch, batch * prompt * (prompt + 1) / 2, written)


def _step(given: PlanInput, tokens: int, rows: int, scores: float, cached: float) -> Roofline:
    """A step over so many tokens, of which `rows` get a token: its attention computes `scores` scores for each head,
    and reads or writes `cached` numbers of the cache."""
    heads, hd = given.model.heads / given.tp, given.model.head_dim
    flops = scores * heads * (4 * hd + SOFTMAX_OPS)
    moved = cached * given.precision.kv / 8 + 2 * given.precision.a / 8 * tokens * heads * hd
    attention = _part(given, "attention", given.model.layers, flops, moved, given.device.peak[16])
    head = _linear(given, "head", 1, given.model.hidden, given.model.vocab, rows)
    return Roofline((*_linears(given, tokens), attention, _norms(given, tokens), head))


def _linears(given: PlanInput, tokens: float) -> Iterator[RooflinePart]:
    """The matrices of all layers: attention's, then the feed-forward network or its experts."""
    model, layers = given.model, given.model.layers
    hidden, width = model.hidden, model.heads * model.head_dim
    yield _linear(given, "qkv", layers, hidden, model.attention_weights // hidden - width, tokens)
    yield _linear(given, "output", layers, width, hidden, tokens)
    if model.experts > 1:
        yield _experts(given, tokens)
        return
    rising = model.ffn_matrices - 1
    yield _linear(given, "ffn up", layers, hidden, rising * model.ffn, tokens)
    yield _linear(given, "ffn down", layers, model.ffn, hidden, tokens)


def _experts(given: PlanInput, tokens: float) -> RooflinePart:
    """All distinct experts that the tokens reach; each token is multiplied with its own."""
    model, bits = given.model, given.precision
    distinct = distinct_experts(model.experts, model.experts_per_token, tokens)
    read = (distinct * model.expert_weights + model.router_weights) / given.tp
    used = (model.experts_per_token * model.expert_weights + model.router_weights) / given.tp
    width = model.experts_per_token * (2 * model.hidden + model.ffn_matrices * model.ffn / given.tp)
    moved = read * bits.w / 8 + tokens * width * bits.a / 8
    return _part(given, "experts", model.layers, 2 * used * tokens, moved, peak_of(given))


def _norms(given: PlanInput, tokens: float) -> RooflinePart:
    """Two norms a layer: each reads and writes the hidden state."""
    elements = 2 * tokens * given.model.hidden
    moved = 2 * elements * given.precision.a / 8
    return _part(given, "norms", given.model.layers, NORM_OPS * elements, moved, given.device.peak[16])


def ridge_batch(given: PlanInput, context: float) -> int | None:
    """The smallest batch whose decode step is bound by arithmetic in its matrices.

    None: there is none up to MAX_BATCH, for reading the activations keeps them bound by memory. Attention, whose cache
    grows with the batch, never leaves the memory bound, and is not asked.
    """

    def bound(batch: int) -> bool:
        parts = [
            part for part in decode(given, batch, context).parts if part.name not in ("attention", "norms", "head")
        ]
        return sum(part.seconds for part in parts if part.bound == "compute") * 2 > sum(part.seconds for part in parts)

    batch = bisect_left(range(1, MAX_BATCH + 1), True, key=bound) + 1
    return batch if batch <= MAX_BATCH else None


def roofline_advice(given: PlanInput, context: float, step: Roofline, ridge: int | None, most: int) -> str:
    """What limits the step, and what that means for the batch."""
    attention = next(part for part in step.parts if part.name == "attention")
    share = 100 * attention.seconds / step.seconds
    means = "more memory means more tokens" if most < (ridge or 0) else "beyond it a larger batch only adds latency"
    reach = (
        ", at every batch" if ridge is None else f": its matrices reach the ridge at a batch of {ridge}, and {means}"
    )
    cache = f". Reading the cache takes {share:.0f} % of the step: fewer --kv-bits or a --kv-budget help most"
    bound = "memory" if step.bound == "memory" else "arithmetic"
    return f"The decode step is bound by {bound}{reach}{cache if share >= ATTENTION_SHARE else ''}."


# Communication. Sizes are bytes, `bytes_s` is one direction of a link, `hop_s` the latency of one step. TPI-LLM's
# observation, that latency and not bandwidth decides at the edge, is the cross-over of the two all-reduces: a star is
# faster from a latency of bytes (n / BW_hub - (n-1) / (n BW)) / (n-2) on.


def ring_all_reduce_s(size: float, devices: int, bytes_s: float, hop_s: float) -> float:
    """2 (n-1)/n * bytes / BW + 2 (n-1) * latency."""
    if devices < 2:
        return 0.0
    return 2 * (devices - 1) / devices * size / bytes_s + 2 * (devices - 1) * hop_s


def star_all_reduce_s(size: float, devices: int, hub_bytes_s: float, hop_s: float) -> float:
    """Through one device that has the others' parts: 2 (latency + n * bytes / BW of the hub)."""
    if devices < 2:
        return 0.0
    return 2 * (hop_s + devices * size / hub_bytes_s)


def all_reduce_s(size: float, devices: int, bytes_s: float, hop_s: float) -> float:
    """The faster of a ring and a star over the same links."""
    return min(ring_all_reduce_s(size, devices, bytes_s, hop_s), star_all_reduce_s(size, devices, bytes_s, hop_s))


def all_to_all_s(size: float, devices: int, bytes_s: float, hop_s: float) -> float:
    """(n-1)/n * bytes / BW, and one step."""
    return (devices - 1) / devices * size / bytes_s + hop_s if devices > 1 else 0.0


def send_s(size: float, bytes_s: float, hop_s: float) -> float:
    """From one device to the next."""
    return size / bytes_s + hop_s


def streamed_layer_s(compute_s: float, layer_bytes: float, disk_bytes_s: float) -> float:
    """A layer whose weights come from a disk while the one before it is computed (TPI-LLM's sliding window)."""
    return max(compute_s, layer_bytes / disk_bytes_s)
