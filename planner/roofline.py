"""One model on one kind of device: how many requests its memory holds, and how long a step takes (memory, roofline).

Memory, after SLM-Pareto, whose Table 1 follows from it exactly (as powers of two up to 512):

    B = (0.9 M - W - activations) / (kv_token (L + G/2))

The paper's text gives 50 MB for a request of 512 + 256 tokens of OPT-1.3B; by its own formula it is 151 MB.

Roofline, after LLM-Viewer: a part takes max(operations / peak, bytes / bandwidth) seconds. Linear parts of ic inputs
and oc outputs have 2 ic oc operations a token, and move w ic oc bytes of weights and a (ic + oc) bytes a token.
Attention of a decode step has 4 B ctx heads hd operations and reads 2 B ctx kv_heads hd bytes of cache; softmax has 5
operations for each score, a norm 7 for each element. Two corrections: attention stores B heads hd outputs, not one for
each position, and a fused kernel reads the cache once for each head of keys, not for each query head. Distinct experts
and saturation follow MoE-Lens.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import click

from planner.answers import PlanAnswer, PlanTable, gb, inputs_of, plot, seconds, three
from planner.facts.catalogue import Accelerator, ModelShape, PlanError
from planner.load import PlanInput
from planner.options import BITS, GPU, LENGTHS, MODEL, READS, TP, plan_command

USABLE = 0.9
"""Share of a GPU's memory that replicas may use; the rest is for the driver and for fragmentation."""
SLACK_BYTES = 1 << 30
"""Memory of each GPU that a replica needs besides weights and KV cache (SLM-Pareto, APEX)."""
MAX_REPLICAS = 3
"""More replicas gained nothing in the paper."""
PAPER_CAP = 512
"""The largest batch of SLM-Pareto's Table 1."""
BLOCK_TOKENS = 32
"""TensorRT-LLM's tokens_per_block: a request takes whole blocks of the cache."""
NARROW_BITS = 8.0
"""What the cache is proposed to be narrowed to."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What of one device's memory goes where, in bytes; with `tp` devices, each holds a share of every layer."""

    usable_bytes: float
    weight_bytes: float
    activation_bytes: float
    kv_bytes: float
    """What is left for the cache."""
    kv_token_bytes: float
    request_bytes: float
    """Of a request in the mean of its run, in whole blocks."""
    max_batch: int
    """Requests at once in the mean: what a gate that predicts lengths, or an engine that evicts, admits."""
    max_batch_worst: int
    """Requests at once if each keeps room for its whole length: what GUARANTEED_NO_EVICT admits."""

    @property
    def kv_tokens(self) -> int:
        return int(self.kv_bytes / self.kv_token_bytes)

    @property
    def power_of_two(self) -> int:
        """The batch as SLM-Pareto's Table 1 has it."""
        return min(PAPER_CAP, 1 << self.max_batch.bit_length() - 1) if self.max_batch else 0


def memory_plan(given: PlanInput, activation_bytes: float = 0.0, block: int = BLOCK_TOKENS) -> MemoryPlan:
    """The plan of one device of `tp`. Raises PlanError if not one request fits."""
    model, lengths, tp = given.model, given.lengths, given.tp
    lengths.check(model)
    usable = USABLE * given.device.memory_bytes
    weights = model.weight_bytes(given.precision.w) / tp
    room = usable - weights - activation_bytes
    token = model.kv_token_bytes(given.precision.kv, tp, lengths.mean)
    request = token * whole_blocks(lengths.mean, block)
    plan = MemoryPlan(
        usable_bytes=usable,
        weight_bytes=weights,
        activation_bytes=activation_bytes,
        kv_bytes=max(0.0, room),
        kv_token_bytes=token,
        request_bytes=request,
        max_batch=max(0, int(room / request)),
        max_batch_worst=max(0, int(room / (token * whole_blocks(lengths.whole, block)))),
    )
    if plan.max_batch < 1:
        raise PlanError(
            f"{model.name} does not fit on {_devices(given)}: weights and one request take "
            f"{(weights + activation_bytes + request) / 1e9:.1f} GB of {usable / 1e9:.1f} usable"
            f"{'' if tp == 1 else ' on each'}; more devices (--tp), fewer --w-bits or another --gpu would do"
        )
    return plan


def memory_advice(given: PlanInput, plan: MemoryPlan) -> str:
    """How many requests fit, what limits them, and what would make room."""
    lengths, bits = given.lengths, given.precision
    said = (
        f"{given.model.name} on {_devices(given)} runs {plan.max_batch:,} requests of {lengths.prompt} + "
        f"{lengths.answer} tokens at once. With GUARANTEED_NO_EVICT it runs {plan.max_batch_worst:,}, because each "
        "then keeps room for its longest answer"
    )
    if bits.kv > NARROW_BITS:
        said += f". A KV cache of 8 bits would hold {int(plan.kv_bytes / plan.request_bytes * bits.kv / NARROW_BITS):,}"
    if plan.weight_bytes > plan.kv_bytes:
        said += f". Weights take {100 * plan.weight_bytes / plan.usable_bytes:.0f} % of the memory"
    return said + "."


def whole_blocks(tokens: float, block: int = BLOCK_TOKENS) -> int:
    """The tokens of the blocks that so many take."""
    return math.ceil(tokens / block) * block


def _devices(given: PlanInput) -> str:
    return given.device.name if given.tp == 1 else f"{given.tp} x {given.device.name}"


def copy_bytes(given: PlanInput) -> tuple[int, int]:
    """The weights of a replica on one device, and a token of its cache."""
    return round(given.model.weight_bytes(given.precision.w)), round(given.model.kv_token_bytes(given.precision.kv))


def replicas_for(given: PlanInput, knee: int) -> int:
    """How many replicas fit, each with `knee` concurrent requests, beyond which throughput hardly grows; 0: none fits.

    min(3, floor(0.9 M / (W + knee * kv_token * (L + G/2) + 1 GiB)))
    """
    weights, token = copy_bytes(given)
    each = weights + knee * token * given.lengths.mean + SLACK_BYTES
    return min(MAX_REPLICAS, int(USABLE * int(given.device.memory_bytes) / each))


def kv_tokens_of(given: PlanInput, replicas: int) -> int:
    """Tokens in the KV cache of each of so many replicas that fit (`replicas_for`): (0.9 M / R - W) / kv_token. An
    absolute number, because a share of the free memory would give most to the replica that starts first. TensorRT-LLM
    takes it as `KvCacheConfig.max_tokens` or `max_gpu_total_bytes`."""
    weights, token = copy_bytes(given)
    return (int(USABLE * int(given.device.memory_bytes) / replicas) - weights) // token


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


def roofline_advice(step: Roofline, ridge: int | None, most: int) -> str:
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


def all_reduce_s(size: float, devices: int, bytes_s: float, hop_s: float) -> float:
    """The faster of two ways over the same links. A ring: 2 (n-1)/n * bytes / BW + 2 (n-1) * latency. A star, through
    one device that has the others' parts: 2 (latency + n * bytes / BW)."""
    if devices < 2:
        return 0.0
    ring = 2 * (devices - 1) / devices * size / bytes_s + 2 * (devices - 1) * hop_s
    return min(ring, 2 * (hop_s + devices * size / bytes_s))


def all_to_all_s(size: float, devices: int, bytes_s: float, hop_s: float) -> float:
    """(n-1)/n * bytes / BW, and one step."""
    return (devices - 1) / devices * size / bytes_s + hop_s if devices > 1 else 0.0


def send_s(size: float, bytes_s: float, hop_s: float) -> float:
    """From one device to the next."""
    return size / bytes_s + hop_s


@dataclass(frozen=True, slots=True)
class OffloadedDecode:
    """A decode step with its attention on other devices, with cheap memory (Lamina). No engine that Penstock knows does
    this, or streams weights from a disk (TPI-LLM); a plan says whether it would be worth it."""

    batch: int
    """The most requests that the caches of the memory devices hold."""
    compute_s: float
    attention_s: float
    link_s: float

    @property
    def seconds(self) -> float:
        """One after the other: a layer's attention needs its projections, and gives them their input."""
        return self.compute_s + self.attention_s + self.link_s

    @property
    def tokens_s(self) -> float:
        return self.batch / self.seconds


def attention_offloaded(given: PlanInput, memory: Accelerator, count: int, link_bytes_s: float) -> OffloadedDecode:
    """A step with all caches on `count` memory devices: B ctx kv_token bytes at their bandwidth, the rest on the
    compute device, and 2 B h bytes a layer over the link."""
    model, bits, context = given.model, given.precision, given.lengths.mean
    token = model.kv_token_bytes(bits.kv)
    batch = int(USABLE * memory.memory_bytes * count / (token * context))
    parts = decode(given, max(1, batch), context).parts
    compute = sum(part.seconds for part in parts if part.name != "attention")
    attention = batch * given.reads.tokens(context) * token / (memory.bytes_s * count)
    size = 2 * batch * model.hidden * bits.a / 8
    return OffloadedDecode(batch, compute, attention, model.layers * send_s(size, link_bytes_s, given.device.hop_s))


def streamed_step_s(given: PlanInput, batch: int, context: float, disk_bytes_s: float) -> float:
    """A decode step of a model whose layers come from a disk, each while the one before it is computed (TPI-LLM's
    sliding window)."""
    return max(decode(given, batch, context).seconds, given.model.weight_bytes(given.precision.w) / disk_bytes_s)


def doublings(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << power for power in range(most.bit_length())]


def batches(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself, which may lie between two of them."""
    return sorted({*doublings(most), most} - {0})


# --- commands --------------------------------------------------------------------------------------------------------


@plan_command("memory", MODEL, GPU, LENGTHS, BITS, TP)
@click.option("--activation-gb", type=float, default=0.0, help="GB for activations and workspace [0].")
@click.option("--block", type=int, default=BLOCK_TOKENS, show_default=True, help="Tokens of a block of the KV cache.")
def memory_command(given: PlanInput, activation_gb: float, block: int) -> PlanAnswer:
    """Say how many requests fit on a GPU at once, and what takes its memory.

    \b
    Examples:
      penstock plan memory --model opt-13b --gpu a100-80gb --in 512 --out 256
      penstock plan memory --model llama-3.1-70b --gpu h200 --tp 2 --kv-bits 8
      penstock plan memory --config my-model/config.json --gpu l40s
    """
    if activation_gb < 0 or block < 1:
        raise PlanError(f"--activation-gb {activation_gb:g} --block {block}: GB from 0, and a block of 1 token or more")
    plan = memory_plan(given, 1e9 * activation_gb, block)
    more = {"kv_tokens": plan.kv_tokens, "max_batch_power_of_two": plan.power_of_two}
    value = inputs_of(given, "tp", **asdict(plan), **more)
    rows = [
        ("usable (0.9 of the memory)", gb(plan.usable_bytes), "GB"),
        ("weights", gb(plan.weight_bytes), "GB"),
        ("activations", gb(plan.activation_bytes), "GB"),
        ("left for the KV cache", gb(plan.kv_bytes), "GB"),
        ("KV cache of a token", f"{plan.kv_token_bytes:,.0f}", "bytes"),
        ("tokens that the cache holds", f"{plan.kv_tokens:,}", "tokens"),
        ("a request in the mean (L + G/2)", f"{plan.request_bytes / 1e6:,.1f}", "MB"),
        ("requests at once, in the mean", f"{plan.max_batch:,}", "requests"),
        (f"requests at once, each with all of its {given.lengths.whole}", f"{plan.max_batch_worst:,}", "requests"),
        ("as a power of two, at most 512", f"{plan.power_of_two:,}", "requests"),
    ]
    return PlanAnswer(value, [PlanTable(("what", "value", "unit"), rows)], memory_advice(given, plan))


@plan_command("roofline", MODEL, GPU, LENGTHS, BITS, READS, TP)
@click.option("--batch", type=int, help="Requests of the decode step that is shown [the most that fit, at most 64].")
@click.option("--chunk", type=int, default=2048, show_default=True, help="Tokens of a chunk of a chunked prefill.")
def roofline_command(given: PlanInput, batch: int | None, chunk: int) -> PlanAnswer:
    """Say what limits each part of a step: the memory's bandwidth or the arithmetic. Times are lower bounds.

    \b
    Examples:
      penstock plan roofline --model mixtral-8x7b --gpu h200 --batch 32
      penstock plan roofline --model llama-3.1-8b --gpu l4 --w-bits 4
    """
    if chunk < 1 or (batch is not None and batch < 1):
        said = f"--chunk {chunk}" if chunk < 1 else f"--batch {batch}"
        raise PlanError(f"{said}: it is a whole number from 1, such as --batch 32 --chunk 2048")
    lengths, bits = given.lengths, given.precision
    most = memory_plan(given).max_batch
    shown = batch or min(64, most)
    step, first = decode(given, shown, lengths.mean), prefill(given, 1, lengths.prompt)
    ridge = ridge_batch(given, lengths.mean)
    curve = [(each, decode(given, each, lengths.mean)) for each in batches(most)]
    points = [(each, each / found.seconds) for each, found in curve]
    experts = _expert_figures(given, shown, chunk)
    value = inputs_of(
        given,
        "tp",
        ridge_flop_per_byte=given.device.ridge(bits.w, bits.a),
        peak_flops=peak_of(given),
        bandwidth_bytes_s=given.device.bytes_s,
        batch=shown,
        max_batch=most,
        batch_at_ridge=ridge,
        decode=_step_json(step),
        prefill=_step_json(first),
        curve=[
            {"batch": batch, "step_s": found.seconds, "tokens_s": rate, "bound": found.bound}
            for (batch, found), (_, rate) in zip(curve, points, strict=True)
        ],
        moe=experts,
    )
    marked = next((point for point in points if ridge is not None and point[0] >= ridge), None)
    tables = [
        _step_table(step, f"Decode step of {shown} requests that hold {lengths.mean:g} tokens each, lower bounds"),
        _step_table(first, f"Prefill of a prompt of {lengths.prompt} tokens, lower bounds"),
    ]
    drawn = plot(points, "batch", "tokens/s", marked, "the ridge") if len(points) > 1 else ""
    notes = [EXPERTS.format(**experts, chunk=chunk)] if experts else []
    return PlanAnswer(value, tables, roofline_advice(step, ridge, most), drawn, notes)


EXPERTS = (
    "From {saturating_tokens:,.0f} tokens in a step experts are bound by arithmetic. A prefill in chunks of {chunk} "
    "reads all experts {reload_factor} times: raise the chunk to the largest whose step keeps your time between tokens."
)


def _step_json(found: Roofline) -> dict[str, Any]:
    """A step with its parts."""
    parts = [{**asdict(part), "flop_per_byte": part.intensity} for part in found.parts]
    return {"seconds": found.seconds, "flops": found.flops, "bytes": found.bytes, "bound": found.bound, "parts": parts}


def _step_table(found: Roofline, title: str) -> PlanTable:
    whole = RooflinePart("all", found.flops, found.bytes, found.seconds, found.bound)
    rows = [
        (part.name, three(part.flops / 1e9), gb(part.bytes), three(part.intensity), seconds(part.seconds), part.bound)
        for part in (*found.parts, whole)
    ]
    return PlanTable(("part", "gflop", "gb", "flop/byte", "time", "bound by"), rows, title)


def _expert_figures(given: PlanInput, batch: int, chunk: int) -> dict[str, Any] | None:
    """How many experts a batch reaches, and how often a prefill in chunks reads all of them: ceil(L / chunk). Layered
    prefill reads them once, in groups of layers, a step for each: ceil(L / 512)."""
    model, bits, prompt = given.model, given.precision, given.lengths.prompt
    if model.experts == 1:
        return None
    return {
        "distinct_experts": distinct_experts(model.experts, model.experts_per_token, batch),
        "saturating_tokens": saturating_tokens(model, given.device, bits.w, bits.a),
        "reload_factor": math.ceil(prompt / chunk),
        "layer_groups": math.ceil(prompt / GROUP_TOKENS),
    }
