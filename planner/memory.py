"""Memory plan: how many requests fit on a device at once, by weights, KV cache and the lengths of the requests.

    B = (0.9 M - W - activations) / (kv_token (L + G/2))

It is the formula of SLM-Pareto, whose Table 1 follows from it exactly (as powers of two up to 512). The paper's text
gives 50 MB for a request of 512 + 256 tokens of OPT-1.3B; by its own formula it is 151 MB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.facts.catalogue import Accelerator, PlanError, devices
from planner.facts.model import ModelShape
from planner.load import Precision, RequestLengths
from planner.roofline import RooflineInput, decode, send_s, streamed_layer_s
from scheduler.policy.snapshot import USABLE

PAPER_CAP = 512
"""The largest batch of SLM-Pareto's Table 1."""
BLOCK_TOKENS = 32
"""TensorRT-LLM's tokens_per_block: a request takes whole blocks of the cache."""
MAX_TP = 64
NARROW_BITS = 8.0
"""What weights or cache are proposed to be narrowed to."""


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


def memory_plan(
    model: ModelShape,
    device: Accelerator,
    lengths: RequestLengths,
    precision: Precision,
    *,
    tp: int = 1,
    activation_bytes: float = 0.0,
    block: int = BLOCK_TOKENS,
) -> MemoryPlan:
    """The plan of one device of `tp`. Raises PlanError if not one request fits."""
    lengths.check(model)
    usable = USABLE * device.memory_bytes
    weights = model.weight_bytes(precision.w) / tp
    room = usable - weights - activation_bytes
    token = model.kv_token_bytes(precision.kv, tp, lengths.mean)
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
        hint = what_fits(model, device, lengths, precision, tp, activation_bytes=activation_bytes, block=block)
        raise PlanError(
            f"{model.name} does not fit on {_count(tp, device)}: weights and one request take "
            f"{(weights + activation_bytes + request) / 1e9:.1f} GB of {usable / 1e9:.1f} usable"
            f"{'' if tp == 1 else ' on each'}; {hint} would fit"
        )
    return plan


def what_fits(
    model: ModelShape,
    device: Accelerator,
    lengths: RequestLengths,
    precision: Precision,
    tp: int,
    *,
    activation_bytes: float = 0.0,
    block: int = BLOCK_TOKENS,
) -> str:
    """The smallest changes that make it fit, as flags: more of these devices, fewer bits, another device."""

    def fits(device: Accelerator, precision: Precision, tp: int) -> bool:
        request = model.kv_token_bytes(precision.kv, tp, lengths.mean) * _blocks(lengths.mean, block)
        return model.weight_bytes(precision.w) / tp + activation_bytes + request <= USABLE * device.memory_bytes

    found = []
    degrees = [each for each in divisors(model.heads) if tp < each <= MAX_TP]
    if (more := next((n for n in degrees if fits(device, precision, n)), 0)) > 0:
        found.append(f"--tp {more}")
    for bits in (NARROW_BITS, 4.0):
        if bits < precision.w and fits(device, Precision(bits, precision.a, precision.kv), tp):
            found.append(f"--w-bits {bits:g}")
            break
    larger = [each for each in devices().values() if fits(each, precision, tp)]
    if larger:
        found.append(f"--gpu {min(larger, key=lambda each: each.memory_bytes).name}")
    rest = (
        "fewer --activation-gb or a smaller --block" if activation_bytes or block > BLOCK_TOKENS else "a smaller model"
    )
    return " or ".join(found) or rest


def memory_advice(
    model: ModelShape, device: Accelerator, lengths: RequestLengths, precision: Precision, plan: MemoryPlan, tp: int
) -> str:
    """How many requests fit, what limits them, and what would make room."""
    said = (
        f"{model.name} on {_count(tp, device)} runs {plan.max_batch:,} requests of {lengths.prompt} + {lengths.answer} "
        f"tokens at once. With GUARANTEED_NO_EVICT it runs {plan.max_batch_worst:,}, because each then keeps room for "
        "its longest answer"
    )
    if precision.kv > NARROW_BITS:
        more = int(plan.kv_bytes / plan.request_bytes * precision.kv / NARROW_BITS)
        said += f". A KV cache of 8 bits would hold {more:,}"
    if plan.weight_bytes > plan.kv_bytes:
        said += f". Weights take {100 * plan.weight_bytes / plan.usable_bytes:.0f} % of the memory"
    return said + "."


def divisors(number: int) -> list[int]:
    """All divisors, rising."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _blocks(tokens: float, block: int) -> int:
    return math.ceil(tokens / block) * block


def _count(tp: int, device: Accelerator) -> str:
    return device.name if tp == 1 else f"{tp} x {device.name}"


# No serving engine that Penstock knows runs attention on devices with cheap memory (Lamina), or streams weights from a
# disk (TPI-LLM); a plan says whether it would be worth it.


@dataclass(frozen=True, slots=True)
class OffloadedDecode:
    """A decode step with its attention on `memory_devices` others."""

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


def attention_offloaded(
    given: RooflineInput, memory: Accelerator, count: int, lengths: RequestLengths, link_bytes_s: float
) -> OffloadedDecode:
    """A step with all caches on `count` memory devices: B ctx kv_token bytes at their bandwidth, the rest on the
    compute device, and 2 B h bytes a layer over the link."""
    model, bits = given.model, given.precision
    token = model.kv_token_bytes(bits.kv)
    batch = int(USABLE * memory.memory_bytes * count / (token * lengths.mean))
    parts = decode(given, max(1, batch), lengths.mean).parts
    compute = sum(part.seconds for part in parts if part.name != "attention")
    attention = batch * given.reads.tokens(lengths.mean) * token / (memory.bytes_s * count)
    size = 2 * batch * model.hidden * bits.a / 8
    return OffloadedDecode(batch, compute, attention, model.layers * send_s(size, link_bytes_s, given.device.hop_s))


def streamed_step_s(given: RooflineInput, batch: int, context: float, disk_bytes_s: float) -> float:
    """A decode step of a model whose layers come from a disk, each while the one before it is computed."""
    layers = given.model.layers
    compute = decode(given, batch, context).seconds / layers
    return layers * streamed_layer_s(compute, given.model.weight_bytes(given.precision.w) / layers, disk_bytes_s)
