"""Throughput, latency and energy by batch size, and the decode step beside its bound."""

from __future__ import annotations

from typing import Any

import torch

from bench.gpu.decoder import Decoder
from bench.gpu.device import Device, seconds_of
from bench.gpu.judged import HALF_RUN
from bench.gpu.waves import ANSWER, PROMPT, Waves
from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.roofline import RooflineInput, decode

USABLE = 0.9
"""Of the memory; the rest is for activations and the library."""


def fits(shape: ModelShape, batch: int, length: int, memory: int) -> bool:
    """Whether weights, keys and values do."""
    return shape.weight_bytes(16) + batch * length * shape.kv_token_bytes(16) < USABLE * memory


def frontier(
    device: Device, shape: ModelShape, batches: list[int], seconds: float, idle_w: float | None
) -> list[dict[str, Any]]:
    """A row for each batch size that fits."""
    rows = []
    for batch in batches:
        if not fits(shape, batch, PROMPT + ANSWER, device.memory):
            continue
        waves = Waves(shape, batch)
        waves.serve(0.3)
        before = device.joules()
        served = waves.serve(seconds)
        after = device.joules()
        joules = None if before is None or after is None else after - before
        rows.append({
            "shape": shape.name,
            "batch": batch,
            "requests": served.batch * served.waves,
            "tokens_per_s": served.tokens_per_s,
            "requests_per_s": served.tokens_per_s / ANSWER,
            "latency_s": served.latency_s,
            "prefill_share": served.first_s / served.latency_s,
            "watts": None if joules is None else joules / served.seconds,
            "joules_per_token": None if joules is None else joules / served.tokens,
            "above_idle": None
            if joules is None or idle_w is None
            else (joules - idle_w * served.seconds) / served.tokens,
        })  # fmt: skip
        del waves
        torch.cuda.empty_cache()
    return rows


def decode_bounds(
    device: Device, shape: ModelShape, at: list[tuple[int, int]], accelerator: Accelerator
) -> list[dict[str, Any]]:
    """A row for each batch and context: ms of a step and of the planner's roofline bound, and the bound's share."""
    rows = []
    for batch, context in at:
        if not fits(shape, batch, context + 128, device.memory):
            continue
        decoder = Decoder(shape, batch, context + 128)
        step = decoder.graph()
        decoder.place.fill_(context)
        for layer in decoder.layers:
            layer.keys.normal_()
            layer.values.normal_()
        measured = seconds_of(step, 60)
        least = decode(RooflineInput(shape, accelerator), batch, context + HALF_RUN).seconds
        rows.append({
            "shape": shape.name,
            "batch": batch,
            "context": context,
            "step_ms": measured * 1e3,
            "bound_ms": least * 1e3,
            "share": least / measured,
        })  # fmt: skip
        del decoder, step
        torch.cuda.empty_cache()
    return rows
