"""`penstock plan what-if`: GPUs for a load, and with twice the load, longer answers, other GPUs or fewer bits."""

from __future__ import annotations

from typing import Any

import click

from cli.plan.command import (
    MAX_GPUS,
    PlanAnswer,
    PlanTable,
    bits_options,
    device_named,
    efficiency_option,
    gpu_option,
    length_options,
    model_options,
    plan_command,
    seconds,
    three,
    tp_option,
)
from cli.plan.command import given as inputs
from planner.cost import WhatIfCase, WhatIfInput, bits_apart, what_if_advice
from planner.cost import what_if as asked
from planner.facts.catalogue import PlanError
from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.load import Precision, RequestLengths
from planner.memory import attention_offloaded, streamed_step_s
from planner.roofline import RooflineInput


@plan_command("what-if")
@model_options
@gpu_option
@click.option("--rate", type=float, default=1.0, show_default=True, help="Requests a second.")
@click.option("--other-gpu", "others", metavar="NAME", multiple=True, help="Another GPU to ask of; may be repeated.")
@length_options
@bits_options
@tp_option
@efficiency_option
@click.option("--attention-gpu", metavar="NAME[:COUNT]", help="Compute attention on such GPUs (Lamina).")
@click.option("--link-gb-s", type=float, default=25.0, show_default=True, help="To them, in GB/s.")
@click.option("--disk-gb-s", type=float, help="Stream the weights from a disk of so many GB/s (TPI-LLM).")
def what_if(
    model: ModelShape,
    device: Accelerator,
    rate: float,
    others: tuple[str, ...],
    lengths: RequestLengths,
    precision: Precision,
    tp: int,
    efficiency: float,
    attention_gpu: str | None,
    link_gb_s: float,
    disk_gb_s: float | None,
) -> PlanAnswer:
    """Say how many GPUs a load needs, also with twice the load, longer answers, other GPUs or fewer bits."""
    for name, gb_s in (("--link-gb-s", link_gb_s), ("--disk-gb-s", disk_gb_s)):
        if gb_s is not None and gb_s <= 0:
            raise PlanError(f"{name} {gb_s:g}: a bandwidth is above 0, such as {name} 32")
    base = RooflineInput(model, device, precision, tp=tp)
    cases = asked(WhatIfInput(base, lengths, rate, efficiency), [device_named(name) for name in others])
    offloaded = _offloaded(base, lengths, attention_gpu, link_gb_s, disk_gb_s)
    value = {
        **inputs(model, device, lengths, precision),
        "rate": rate,
        "tp": tp,
        "efficiency": efficiency,
        "cases": [_as_json(each) for each in cases],
        "offloaded": [{"case": name, "tokens_s_bound": tokens, "step_s": step} for name, tokens, step in offloaded],
    }
    tables = [_table(cases)]
    if offloaded:
        rows = [(name, three(tokens), seconds(step)) for name, tokens, step in offloaded]
        tables.append(
            PlanTable(("offloaded", "tokens/s", "step"), rows, "Upper bounds; no engine that Penstock runs does it")
        )
    return PlanAnswer(value, tables, what_if_advice(cases), notes=[each.why for each in cases if each.why])


def _offloaded(
    base: RooflineInput, lengths: RequestLengths, attention_gpu: str | None, link_gb_s: float, disk_gb_s: float | None
) -> list[tuple[str, float, float]]:
    """Name, tokens a second and step of what is offloaded."""
    found = []
    if attention_gpu is not None:
        name, _, count = attention_gpu.partition(":")
        if count and not (count.isdecimal() and 1 <= int(count) <= MAX_GPUS):
            raise PlanError(f"--attention-gpu {attention_gpu}: write NAME or NAME:COUNT, 1 to {MAX_GPUS:,}, as l4:4")
        devices = int(count or 1)
        step = attention_offloaded(base, device_named(name), devices, lengths, 1e9 * link_gb_s)
        found.append((f"attention on {devices} x {name}, batch {step.batch}", step.tokens_s, step.seconds))
    if disk_gb_s is not None:
        step_s = streamed_step_s(base, 1, lengths.mean, 1e9 * disk_gb_s)
        found.append(("weights from the disk, batch 1", 1 / step_s, step_s))
    return found


def _as_json(each: WhatIfCase) -> dict[str, Any]:
    found: dict[str, Any] = {"case": each.name, "gpu": each.given.base.device.name, "gpus": each.gpus, "why": each.why}
    if each.point is not None:
        found |= {
            "batch": each.point.batch, "limit": each.limit,
            "tokens_s_per_gpu": each.point.tokens_s / each.given.base.tp,
            "request_s": each.point.latency_s, "joules_per_token": each.point.joules_token,
        }  # fmt: skip
    return found


def _table(cases: list[WhatIfCase]) -> PlanTable:
    rows = []
    for each in cases:
        bits = bits_apart(each.given.base.precision)
        if each.point is None:
            rows.append((each.name, bits, "does not fit", "-", "-", "-", "-"))
            continue
        rows.append(
            (
                each.name,
                bits,
                f"{each.gpus}",
                f"{each.point.batch}",
                each.limit or "-",
                three(each.point.tokens_s),
                seconds(each.point.latency_s),
            )
        )
    return PlanTable(("case", "bits w/a/kv", "gpus", "batch", "ends at", "tok/s each", "request"), rows)
