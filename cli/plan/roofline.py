"""`penstock plan roofline`: where a model is bound by memory, where by arithmetic, and the batch at the ridge."""

from __future__ import annotations

from typing import Any

import click

from cli.plan.command import (
    PlanAnswer,
    PlanTable,
    bits_options,
    gb,
    given,
    gpu_option,
    length_options,
    model_options,
    plan_command,
    plot,
    reads_options,
    seconds,
    three,
    tp_option,
)
from planner.facts.catalogue import PlanError
from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.knee import batches
from planner.load import KvReads, Precision, RequestLengths
from planner.memory import memory_plan
from planner.roofline import (
    Roofline,
    RooflineInput,
    decode,
    distinct_experts,
    layer_groups,
    prefill,
    reload_factor,
    ridge_batch,
    roofline_advice,
    saturating_tokens,
)


@plan_command("roofline")
@model_options
@gpu_option
@length_options
@bits_options
@reads_options
@tp_option
@click.option("--batch", type=int, help="Requests of the decode step that is shown [the most that fit, at most 64].")
@click.option("--chunk", type=int, default=2048, show_default=True, help="Tokens of a chunk of a chunked prefill.")
def roofline(
    model: ModelShape,
    device: Accelerator,
    lengths: RequestLengths,
    precision: Precision,
    reads: KvReads,
    tp: int,
    batch: int | None,
    chunk: int,
) -> PlanAnswer:
    """Say what limits each part of a step: the memory's bandwidth or the arithmetic. Times are lower bounds."""
    if (batch is not None and batch < 1) or chunk < 1:
        said = f"--chunk {chunk}" if chunk < 1 else f"--batch {batch}"
        raise PlanError(f"{said}: it is a whole number from 1, such as --batch 32 --chunk 2048")
    most = memory_plan(model, device, lengths, precision, tp=tp).max_batch
    shown = batch or min(64, most)
    source = RooflineInput(model, device, precision, reads, tp)
    step, first = decode(source, shown, lengths.mean), prefill(source, 1, lengths.prompt)
    ridge = ridge_batch(source, lengths.mean)
    curve = [(each, decode(source, each, lengths.mean)) for each in batches(most)]
    value = {
        **given(model, device, lengths, precision),
        "tp": tp,
        "ridge_flop_per_byte": device.ridge(precision.w, precision.a),
        "peak_flops": source.peak,
        "bandwidth_bytes_s": device.bytes_s,
        "batch": shown,
        "max_batch": most,
        "batch_at_ridge": ridge,
        "decode": as_json(step),
        "prefill": as_json(first),
        "curve": [
            {"batch": each, "step_s": found.seconds, "tokens_s": each / found.seconds, "bound": found.bound}
            for each, found in curve
        ],
        "moe": _experts(source, shown, lengths, chunk),
    }
    points = [(each, each / found.seconds) for each, found in curve]
    marked = next((point for point in points if ridge is not None and point[0] >= ridge), None)
    return PlanAnswer(
        value,
        [
            _table(step, f"Decode step of {shown} requests that hold {lengths.mean:g} tokens each, lower bounds"),
            _table(first, f"Prefill of a prompt of {lengths.prompt} tokens, lower bounds"),
        ],
        roofline_advice(source, lengths.mean, step, ridge, most),
        plot(points, "batch", "tokens/s", marked, "the ridge") if len(points) > 1 else "",
        _notes(source, lengths, chunk),
    )


def as_json(found: Roofline) -> dict[str, Any]:
    """A step with its parts."""
    return {
        "seconds": found.seconds,
        "flops": found.flops,
        "bytes": found.bytes,
        "bound": found.bound,
        "parts": [
            {"name": part.name, "flops": part.flops, "bytes": part.bytes, "seconds": part.seconds,
             "flop_per_byte": part.intensity, "bound": part.bound}
            for part in found.parts
        ],
    }  # fmt: skip


def _table(found: Roofline, title: str) -> PlanTable:
    rows = [
        (part.name, three(part.flops / 1e9), gb(part.bytes), three(part.intensity), seconds(part.seconds), part.bound)
        for part in found.parts
    ]
    whole = ("all", three(found.flops / 1e9), gb(found.bytes), three(found.flops / found.bytes))
    rows.append((*whole, seconds(found.seconds), found.bound))
    return PlanTable(("part", "gflop", "gb", "flop/byte", "time", "bound by"), rows, title)


def _experts(source: RooflineInput, batch: int, lengths: RequestLengths, chunk: int) -> dict[str, Any] | None:
    model, bits = source.model, source.precision
    if model.experts == 1:
        return None
    return {
        "distinct_experts": distinct_experts(model.experts, model.experts_per_token, batch),
        "saturating_tokens": saturating_tokens(model, source.device, bits.w, bits.a),
        "reload_factor": reload_factor(lengths.prompt, chunk),
        "layer_groups": layer_groups(lengths.prompt),
    }


def _notes(source: RooflineInput, lengths: RequestLengths, chunk: int) -> list[str]:
    if source.model.experts == 1:
        return []
    tokens = saturating_tokens(source.model, source.device, source.precision.w, source.precision.a)
    times = reload_factor(lengths.prompt, chunk)
    return [
        f"From {tokens:,.0f} tokens in a step its experts are bound by arithmetic. A prefill in chunks of {chunk} "
        f"reads all experts {'once' if times == 1 else f'{times} times'}; raise the chunk to the largest whose step "
        "keeps your time between tokens."
    ]
