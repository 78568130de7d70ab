"""`penstock plan memory`: how many requests fit on a GPU at once."""

from __future__ import annotations

from dataclasses import asdict

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
    tp_option,
)
from planner.facts.catalogue import PlanError
from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.load import Precision, RequestLengths
from planner.memory import BLOCK_TOKENS, MemoryPlan, memory_advice, memory_plan


@plan_command("memory")
@model_options
@gpu_option
@length_options
@bits_options
@tp_option
@click.option("--activation-gb", type=float, default=0.0, help="GB for activations and workspace [0].")
@click.option("--block", type=int, default=BLOCK_TOKENS, show_default=True, help="Tokens of a block of the KV cache.")
def memory(
    model: ModelShape,
    device: Accelerator,
    lengths: RequestLengths,
    precision: Precision,
    tp: int,
    activation_gb: float,
    block: int,
) -> PlanAnswer:
    """Say how many requests fit on a GPU at once, and what takes its memory."""
    if activation_gb < 0 or block < 1:
        raise PlanError(f"--activation-gb {activation_gb:g} --block {block}: GB from 0, and a block of 1 token or more")
    plan = memory_plan(model, device, lengths, precision, tp=tp, activation_bytes=1e9 * activation_gb, block=block)
    value = {
        **given(model, device, lengths, precision),
        "tp": tp,
        **asdict(plan),
        "kv_tokens": plan.kv_tokens,
        "max_batch_power_of_two": plan.power_of_two,
    }
    return PlanAnswer(value, [_table(plan, lengths)], memory_advice(model, device, lengths, precision, plan, tp))


def _table(plan: MemoryPlan, lengths: RequestLengths) -> PlanTable:
    rows = [
        ("usable (0.9 of the memory)", gb(plan.usable_bytes), "GB"),
        ("weights", gb(plan.weight_bytes), "GB"),
        ("activations", gb(plan.activation_bytes), "GB"),
        ("left for the KV cache", gb(plan.kv_bytes), "GB"),
        ("KV cache of a token", f"{plan.kv_token_bytes:,.0f}", "bytes"),
        ("tokens that the cache holds", f"{plan.kv_tokens:,}", "tokens"),
        ("a request in the mean (L + G/2)", f"{plan.request_bytes / 1e6:,.1f}", "MB"),
        ("requests at once, in the mean", f"{plan.max_batch:,}", "requests"),
        (f"requests at once, each with all of its {lengths.whole}", f"{plan.max_batch_worst:,}", "requests"),
        ("as a power of two, at most 512", f"{plan.power_of_two:,}", "requests"),
    ]
    return PlanTable(("what", "value", "unit"), rows)
