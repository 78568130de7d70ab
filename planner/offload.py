"""Offloading: attention on devices with cheap memory (Lamina), or weights streamed from a disk (TPI-LLM).

No serving engine that Penstock knows runs these; a plan says whether it would be worth it.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.facts.device import Accelerator
from planner.load import RequestLengths
from planner.network import send_s, streamed_layer_s
from planner.roofline import RooflineInput, decode
from scheduler.policy.packing import USABLE


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
