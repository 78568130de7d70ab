"""Memory plan: how many requests fit on a device at once, by weights, KV cache and the lengths of the requests.

    B = (0.9 M - W - activations) / (kv_token (L + G/2))

It is the formula of SLM-Pareto, whose Table 1 follows from it exactly (as powers of two up to 512). The paper's text
gives 50 MB for a request of 512 + 256 tokens of OPT-1.3B; by its own formula it is 151 MB. Replicas on one device, and
attention or weights kept elsewhere, are here too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.facts.catalogue import Accelerator, PlanError
from planner.load import PlanInput
from planner.roofline import decode, send_s, streamed_layer_s

USABLE = 0.9
"""Share of a GPU's memory that replicas may use; the rest is for the driver and for fragmentation."""
SLACK_BYTES = 1 << 30
"""Memory that each replica needs besides weights and KV cache."""
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
    request = token * _blocks(lengths.mean, block)
    plan = MemoryPlan(
        usable_bytes=usable,
        weight_bytes=weights,
        activation_bytes=activation_bytes,
        kv_bytes=max(0.0, room),
        kv_token_bytes=token,
        request_bytes=request,
        max_batch=max(0, int(room / request)),
        max_batch_worst=max(0, int(room / (token * _blocks(lengths.whole, block)))),
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


def divisors(number: int) -> list[int]:
    """All divisors, rising."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _blocks(tokens: float, block: int) -> int:
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
    """A decode step of a model whose layers come from a disk, each while the one before it is computed."""
    layers = given.model.layers
    compute = decode(given, batch, context).seconds / layers
    return layers * streamed_layer_s(compute, given.model.weight_bytes(given.precision.w) / layers, disk_bytes_s)
