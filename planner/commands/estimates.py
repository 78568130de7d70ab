"""Plans by arithmetic alone: `penstock plan memory`, `roofline`, `cost` and `what-if`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from string import ascii_lowercase
from typing import Any

import click

from planner.commands.answers import PlanAnswer, PlanTable, gb, inputs_of, known, plot, seconds, three
from planner.commands.inputs import (
    BITS,
    EFFICIENCY,
    GPU,
    LEAST,
    LENGTHS,
    MODEL,
    MOST,
    READS,
    TP,
    device_named,
    plan_command,
)
from planner.cost import (
    CostPoint,
    DeviceCost,
    WhatIfCase,
    bits_apart,
    cost_advice,
    cost_of,
    cost_points,
    what_if_advice,
)
from planner.cost import what_if as asked
from planner.facts.catalogue import Accelerator, PlanError
from planner.facts.model import ModelShape
from planner.knee import batches, pareto
from planner.load import MAX_GPUS, PlanInput, Precision, RequestLengths
from planner.memory import BLOCK_TOKENS, attention_offloaded, memory_advice, memory_plan, streamed_step_s
from planner.roofline import (
    Roofline,
    decode,
    distinct_experts,
    layer_groups,
    peak_of,
    prefill,
    reload_factor,
    ridge_batch,
    roofline_advice,
    saturating_tokens,
)


@plan_command("memory", MODEL, GPU, LENGTHS, BITS, TP)
@click.option("--activation-gb", type=float, default=0.0, help="GB for activations and workspace [0].")
@click.option("--block", type=int, default=BLOCK_TOKENS, show_default=True, help="Tokens of a block of the KV cache.")
def memory(given: PlanInput, activation_gb: float, block: int) -> PlanAnswer:
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
    value = {
        **inputs_of(given, tp=given.tp),
        **asdict(plan),
        "kv_tokens": plan.kv_tokens,
        "max_batch_power_of_two": plan.power_of_two,
    }
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
def roofline(given: PlanInput, batch: int | None, chunk: int) -> PlanAnswer:
    """Say what limits each part of a step: the memory's bandwidth or the arithmetic. Times are lower bounds.

    \b
    Examples:
      penstock plan roofline --model mixtral-8x7b --gpu h200 --batch 32
      penstock plan roofline --model llama-3.1-8b --gpu l4 --w-bits 4
    """
    if (batch is not None and batch < 1) or chunk < 1:
        said = f"--chunk {chunk}" if chunk < 1 else f"--batch {batch}"
        raise PlanError(f"{said}: it is a whole number from 1, such as --batch 32 --chunk 2048")
    lengths, bits = given.lengths, given.precision
    most = memory_plan(given).max_batch
    shown = batch or min(64, most)
    step, first = decode(given, shown, lengths.mean), prefill(given, 1, lengths.prompt)
    ridge = ridge_batch(given, lengths.mean)
    curve = [(each, decode(given, each, lengths.mean)) for each in batches(most)]
    experts = _experts(given, shown, chunk)
    value = {
        **inputs_of(given, tp=given.tp),
        "ridge_flop_per_byte": given.device.ridge(bits.w, bits.a),
        "peak_flops": peak_of(given),
        "bandwidth_bytes_s": given.device.bytes_s,
        "batch": shown,
        "max_batch": most,
        "batch_at_ridge": ridge,
        "decode": _step_json(step),
        "prefill": _step_json(first),
        "curve": [
            {"batch": each, "step_s": found.seconds, "tokens_s": each / found.seconds, "bound": found.bound}
            for each, found in curve
        ],
        "moe": experts,
    }
    points = [(each, each / found.seconds) for each, found in curve]
    marked = next((point for point in points if ridge is not None and point[0] >= ridge), None)
    return PlanAnswer(
        value,
        [
            _step_table(step, f"Decode step of {shown} requests that hold {lengths.mean:g} tokens each, lower bounds"),
            _step_table(first, f"Prefill of a prompt of {lengths.prompt} tokens, lower bounds"),
        ],
        roofline_advice(given, lengths.mean, step, ridge, most),
        plot(points, "batch", "tokens/s", marked, "the ridge") if len(points) > 1 else "",
        [EXPERTS.format(**experts, chunk=chunk)] if experts else [],
    )


EXPERTS = (
    "From {saturating_tokens:,.0f} tokens in a step experts are bound by arithmetic. A prefill in chunks of {chunk} "
    "reads all experts {reload_factor} times: raise the chunk to the largest whose step keeps your time between tokens."
)


def _step_json(found: Roofline) -> dict[str, Any]:
    """A step with its parts."""
    parts = [{**asdict(part), "flop_per_byte": part.intensity} for part in found.parts]
    return {"seconds": found.seconds, "flops": found.flops, "bytes": found.bytes, "bound": found.bound, "parts": parts}


def _step_table(found: Roofline, title: str) -> PlanTable:
    rows = [
        (part.name, three(part.flops / 1e9), gb(part.bytes), three(part.intensity), seconds(part.seconds), part.bound)
        for part in found.parts
    ]
    whole = ("all", three(found.flops / 1e9), gb(found.bytes), three(found.flops / found.bytes))
    rows.append((*whole, seconds(found.seconds), found.bound))
    return PlanTable(("part", "gflop", "gb", "flop/byte", "time", "bound by"), rows, title)


def _experts(given: PlanInput, batch: int, chunk: int) -> dict[str, Any] | None:
    model, bits = given.model, given.precision
    if model.experts == 1:
        return None
    return {
        "distinct_experts": distinct_experts(model.experts, model.experts_per_token, batch),
        "saturating_tokens": saturating_tokens(model, given.device, bits.w, bits.a),
        "reload_factor": reload_factor(given.lengths.prompt, chunk),
        "layer_groups": layer_groups(given.lengths.prompt),
    }


CURRENCY = "USD"
"""Of the prices that are assumed, and so of those that are given beside them."""


def prices_of(texts: tuple[str, ...], names: tuple[str, ...]) -> dict[str, float]:
    """Prices by device of texts such as h200=3.80. Raises PlanError."""
    found: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not equals or not LEAST <= price <= MOST or name not in names:
            raise PlanError(
                f"--price {text}: write NAME=PRICE for a --gpu that is given ({', '.join(names)}), as {names[0]}=2.50"
            )
        found[name] = price
    return found


@plan_command("cost", MODEL, LENGTHS, BITS, TP, EFFICIENCY)
@click.option("--gpu", "gpus", metavar="NAME", multiple=True, required=True, help="GPU; give it again for others.")
@click.option("--price", "prices", metavar="NAME=PRICE", multiple=True, help="Of an hour of one such GPU.")
def cost(
    model: ModelShape,
    gpus: tuple[str, ...],
    prices: tuple[str, ...],
    lengths: RequestLengths,
    precision: Precision,
    tp: int,
    efficiency: float,
) -> PlanAnswer:
    """Compare what a million tokens cost on several GPUs, each at the knee of its throughput.

    A GPU whose price is not given has an assumed one; without any, it says how many times the price of one GPU another
    may cost.

    \b
    Examples:
      penstock plan cost --model llama-3.1-8b --gpu l4 --gpu h200
      penstock plan cost --model opt-13b --gpu h200 --price h200=3.80
    """
    prices_known, devices = prices_of(prices, gpus), [device_named(name) for name in gpus]
    plans = [PlanInput(model, device, lengths, precision, tp, efficiency=efficiency) for device in devices]
    found = [
        cost_of(each, prices_known.get(name, each.device.price_per_hour))
        for name, each in zip(gpus, plans, strict=True)
    ]
    assumed = [each.device for name, each in zip(gpus, plans, strict=True) if name not in prices_known]
    value = {
        **{key: each for key, each in inputs_of(plans[0]).items() if not key.startswith("gpu")},
        "tp": tp,
        "efficiency": efficiency,
        "gpus": [_cost_json(each) for each in found],
    }
    points = cost_points(found)
    kept = pareto(points, lambda each: each.price_per_million_tokens, lambda each: each.latency_s)
    value["pareto"] = [asdict(each) for each in kept]
    value["assumed_prices"] = {each.name: each.price_per_hour for each in assumed if each.price_per_hour is not None}
    currency = CURRENCY if value["assumed_prices"] else ""
    value["currency"] = currency or None
    advice, drawn = cost_advice(found, currency), pareto_plot(points, kept)
    return PlanAnswer(value, [_cost_table(found, currency or "price")], advice, drawn, assumed_prices(assumed))


def assumed_prices(devices: Sequence[Accelerator]) -> list[str]:
    """Say which prices of an hour nobody gave."""
    named = [f"{each.name} {each.price_per_hour:.2f}" for each in devices if each.price_per_hour is not None]
    if not named:
        return []
    return [f"Assumed prices, US dollars of an hour on demand in 2025: {', '.join(named)}. Give your own with --price."]


def pareto_plot(points: Sequence[CostPoint], kept: Sequence[CostPoint]) -> str:
    """Price over latency of all batches: a letter for each GPU, capital where no other batch beats it in both. Without
    prices: ""."""
    if not points:
        return ""
    letters = dict(zip(dict.fromkeys(each.gpu for each in points), ascii_lowercase, strict=False))
    points = sorted(points, key=kept.__contains__)  # those that are kept are drawn last, over the others
    signs = "".join(letters[each.gpu].upper() if each in kept else letters[each.gpu] for each in points)
    drawn = plot([(each.latency_s, each.price_per_million_tokens) for each in points], "latency of a request, s",
                 "price of a million tokens", signs=signs)  # fmt: skip
    names = ", ".join(f"{letter}: {name}" for name, letter in letters.items())
    return f"{drawn}\n{names}; each letter is a batch, doubling; capital: no other is as cheap at less latency"


def _cost_json(each: DeviceCost) -> dict[str, Any]:
    return {
        "gpu": each.device.name, "gpu_source": each.device.source, "price_per_hour": each.price_per_hour,
        "batch_at_knee": each.point.batch, "tokens_s": each.point.tokens_s, "latency_s": each.point.latency_s,
        "price_per_million_tokens": each.per_million, "joules_per_token": each.point.joules_token, "limit": each.limit,
    }  # fmt: skip


def _cost_table(found: Sequence[DeviceCost], money: str) -> PlanTable:
    columns: dict[str, Callable[[DeviceCost], str]] = {
        "gpu": lambda each: each.device.name,
        "batch": lambda each: f"{each.point.batch}",
        "ends at": lambda each: each.limit,
        "tokens/s": lambda each: three(each.point.tokens_s),
        "request": lambda each: seconds(each.point.latency_s),
        "J/token": lambda each: known(three, each.point.joules_token),
        f"{money}/h": lambda each: known(three, each.price_per_hour),
        f"{money}/1M tokens": lambda each: known(three, each.per_million),
    }
    return PlanTable.of(found, columns)


@plan_command("what-if", MODEL, GPU, LENGTHS, BITS, TP, EFFICIENCY)
@click.option("--rate", type=float, default=1.0, show_default=True, help="Requests a second.")
@click.option("--other-gpu", "others", metavar="NAME", multiple=True, help="Another GPU to ask of; may be repeated.")
@click.option("--attention-gpu", metavar="NAME[:COUNT]", help="Compute attention on such GPUs (Lamina).")
@click.option("--link-gb-s", type=float, default=25.0, show_default=True, help="To them, in GB/s.")
@click.option("--disk-gb-s", type=float, help="Stream the weights from a disk of so many GB/s (TPI-LLM).")
def what_if(
    given: PlanInput,
    rate: float,
    others: tuple[str, ...],
    attention_gpu: str | None,
    link_gb_s: float,
    disk_gb_s: float | None,
) -> PlanAnswer:
    """Say how many GPUs a load needs, also with twice the load, longer answers, other GPUs or fewer bits.

    \b
    Examples:
      penstock plan what-if --model llama-3.1-8b --gpu l4 --rate 4
      penstock plan what-if --model opt-13b --gpu h200 --other-gpu b200
    """
    for name, gb_s in (("--link-gb-s", link_gb_s), ("--disk-gb-s", disk_gb_s)):
        if gb_s is not None and gb_s <= 0:
            raise PlanError(f"{name} {gb_s:g}: a bandwidth is above 0, such as {name} 32")
    given = replace(given, rate=rate)
    cases = asked(given, [device_named(name) for name in others])
    offloaded = _offloaded(given, attention_gpu, link_gb_s, disk_gb_s)
    value = {
        **inputs_of(given, rate=rate, tp=given.tp, efficiency=given.efficiency),
        "cases": [_case_json(each) for each in cases],
        "offloaded": [{"case": name, "tokens_s_bound": tokens, "step_s": step} for name, tokens, step in offloaded],
    }
    tables = [PlanTable.of(cases, CASE_COLUMNS)]
    if offloaded:
        rows = [(name, three(tokens), seconds(step)) for name, tokens, step in offloaded]
        tables.append(
            PlanTable(("offloaded", "tokens/s", "step"), rows, "Upper bounds; no engine that Penstock runs does it")
        )
    return PlanAnswer(value, tables, what_if_advice(cases), notes=[each.why for each in cases if each.why])


def _offloaded(
    given: PlanInput, attention_gpu: str | None, link_gb_s: float, disk_gb_s: float | None
) -> list[tuple[str, float, float]]:
    """Name, tokens a second and step of what is offloaded."""
    found = []
    if attention_gpu is not None:
        name, _, count = attention_gpu.partition(":")
        if count and not (count.isdecimal() and 1 <= int(count) <= MAX_GPUS):
            raise PlanError(f"--attention-gpu {attention_gpu}: write NAME or NAME:COUNT, 1 to {MAX_GPUS:,}, as l4:4")
        devices = int(count or 1)
        step = attention_offloaded(given, device_named(name), devices, 1e9 * link_gb_s)
        found.append((f"attention on {devices} x {name}, batch {step.batch}", step.tokens_s, step.seconds))
    if disk_gb_s is not None:
        step_s = streamed_step_s(given, 1, given.lengths.mean, 1e9 * disk_gb_s)
        found.append(("weights from the disk, batch 1", 1 / step_s, step_s))
    return found


def _case_json(each: WhatIfCase) -> dict[str, Any]:
    found: dict[str, Any] = {"case": each.name, "gpu": each.given.device.name, "gpus": each.gpus, "why": each.why}
    if each.point is not None:
        found |= {
            "batch": each.point.batch, "limit": each.limit,
            "tokens_s_per_gpu": each.point.tokens_s / each.given.tp,
            "request_s": each.point.latency_s, "joules_per_token": each.point.joules_token,
        }  # fmt: skip
    return found


CASE_COLUMNS: Mapping[str, Callable[[WhatIfCase], str]] = {
    "case": lambda each: each.name,
    "bits w/a/kv": lambda each: bits_apart(each.given.precision),
    "gpus": lambda each: f"{each.gpus}" if each.point else "does not fit",
    "batch": lambda each: f"{each.point.batch}" if each.point else "-",
    "ends at": lambda each: each.limit or "-",
    "tok/s each": lambda each: three(each.point.tokens_s) if each.point else "-",
    "request": lambda each: seconds(each.point.latency_s) if each.point else "-",
}
