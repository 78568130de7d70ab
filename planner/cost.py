"""Price of tokens on each device, and what a change of the load would do (the commands cost and what-if).

The knee is the batch from which doubling it gains less than a tenth. SLM-Pareto compares small and large devices by
price / (3600 * tokens a second at the knee).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from string import ascii_lowercase
from typing import Any, Literal, TypeAlias, TypeVar

import click

from planner.answers import PlanAnswer, PlanTable, inputs_of, known, plot, seconds, three
from planner.facts.catalogue import Accelerator, ModelShape, PlanError
from planner.load import MAX_GPUS, PlanInput, Precision, RequestLengths
from planner.options import BITS, EFFICIENCY, GPU, LEAST, LENGTHS, MODEL, MOST, TP, device_named, plan_command
from planner.roofline import attention_offloaded, batches, decode, memory_plan, prefill, streamed_step_s

GAIN = 0.10
"""Least gain of doubling the batch that is worth it."""
Limit: TypeAlias = Literal["knee", "memory"]
"""What ends a batch's growth: twice it gains less than a tenth, or it does not fit."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One batch size; a measured one has the number of concurrent requests, which stands for it."""

    batch: int
    tokens_s: float
    """Of the answers, of all requests together."""
    requests_s: float
    latency_s: float
    """Mean, of a whole request."""
    joules_token: float | None = None
    """None: power is unknown."""


def pareto(points: Iterable[T], cost: Callable[[T], float], latency: Callable[[T], float]) -> list[T]:
    """By rising latency, those that no other beats: none costs as little at less latency."""
    kept: list[T] = []
    for point in sorted(points, key=lambda each: (latency(each), cost(each))):
        if not kept or cost(point) < cost(kept[-1]):
            kept.append(point)
    return kept


def modelled(given: PlanInput) -> list[FrontierPoint]:
    """The frontier that the roofline predicts, on `tp` devices, up to the batch that memory holds.

    A batch of B steady requests has a decode step for every B tokens, and a prefill of one prompt for every answer.

    Raises PlanError if not one request fits.
    """
    return [_point(given, batch) for batch in batches(memory_plan(given).max_batch)]


def _point(given: PlanInput, batch: int) -> FrontierPoint:
    lengths = given.lengths
    step, first = decode(given, batch, lengths.mean), prefill(given, 1, lengths.prompt)
    # While a request runs, each of the others of its batch begins once: their prefills hold it up.
    latency = (batch * first.seconds + lengths.answer * step.seconds) / given.efficiency
    requests = batch / latency
    power = given.tp * given.device.watts
    joules = power / (requests * lengths.answer) if power else None
    return FrontierPoint(batch, requests * lengths.answer, requests, latency, joules)


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """One device (or `tp` of them) at its knee."""

    device: Accelerator
    points: Sequence[FrontierPoint]
    """Batches that fit, doubling, and the largest."""
    point: FrontierPoint
    limit: Limit
    price_per_hour: float | None
    """Of all `tp` devices."""

    def per_million(self, point: FrontierPoint) -> float | None:
        """The price of a million tokens of answers."""
        return None if self.price_per_hour is None else per_million(self.price_per_hour, point.tokens_s)


def per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """The price of a million tokens, in the currency of the price."""
    return 1e6 * price_per_hour / (3600 * tokens_per_s)


def knee_of(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, Limit]:
    """The first of rising batches where doubling gains less than GAIN; else the last, which memory limits. A step
    that is less than a doubling has to gain its part, on a logarithmic scale."""
    for point, more in pairwise(points):
        if more.tokens_s / point.tokens_s < (1 + GAIN) ** math.log2(more.batch / point.batch):
            return point, "knee"
    return points[-1], "memory"


def cost_of(given: PlanInput, price: float | None) -> DeviceCost:
    """The cost on one kind of device, `price` per hour and device. Raises PlanError if the model does not fit."""
    points = modelled(given)
    return DeviceCost(given.device, points, *knee_of(points), None if price is None else price * given.tp)


def cost_advice(found: Sequence[DeviceCost], currency: str = "") -> str:
    """Which device to take, and why. `currency`: of the prices, if it is known."""
    prices = [(each.per_million(each.point), each.device.name, each.point.batch) for each in found]
    priced = sorted((price, name, batch) for price, name, batch in prices if price is not None)
    if len(priced) == len(found):
        (least, name, batch), *others = priced
        said = (
            f"{name} is the cheapest: {f'{least:.3g} {currency}'.rstrip()} for a million tokens at a batch of {batch}"
        )
        beside = ", ".join(f"{price / least:.2f} x on {other}" for price, other, _ in others)
        return f"{said}, beside {beside}." if beside else f"{said}."
    slow, *faster = sorted(found, key=lambda each: each.point.tokens_s)
    if not faster:
        return (
            f"{slow.device.name} yields {3600 * slow.point.tokens_s / 1e6:.3g} million tokens an hour; give --price "
            f"{slow.device.name}=PRICE for the price of a million."
        )
    ratios = ", ".join(
        f"{each.device.name} may cost up to {each.point.tokens_s / slow.point.tokens_s:.1f} x" for each in faster
    )
    return f"Beside the price of an hour of {slow.device.name}, {ratios}: so many times more tokens it yields."


@dataclass(frozen=True, slots=True)
class WhatIfCase:
    """One change and what it does. `point` is None where the model does not fit, and `why` says so."""

    name: str
    given: PlanInput
    point: FrontierPoint | None = None
    limit: Limit | None = None
    why: str = ""

    @property
    def gpus(self) -> int | None:
        """GPUs for the rate, each at its knee."""
        if self.point is None:
            return None
        return self.given.tp * math.ceil(self.given.checked_rate / self.point.requests_s)


def changes(given: PlanInput, others: Sequence[Accelerator]) -> Iterator[tuple[str, PlanInput]]:
    """Every change, by name; the first is none."""
    bits = given.precision
    yield "as it is", given
    yield "twice the load", replace(given, rate=2 * given.checked_rate)
    longer = RequestLengths(given.lengths.prompt, 2 * given.lengths.answer)
    if longer.whole <= given.model.context:
        yield "answers twice as long", replace(given, lengths=longer)
    narrower: list[tuple[str, dict[str, float]]] = [
        ("weights of 8 bits", {"w": 8.0}),
        ("weights and activations of 8 bits", {"w": 8.0, "a": 8.0}),
        ("weights of 4 bits", {"w": 4.0}),
        ("KV cache of 8 bits", {"kv": 8.0}),
    ]
    for name, changed in narrower:
        if all(getattr(bits, field) > wanted for field, wanted in changed.items()):
            yield name, replace(given, precision=replace(bits, **changed))
    yield from ((f"on {other.name}", replace(given, device=other)) for other in others)


def what_if(given: PlanInput, others: Sequence[Accelerator]) -> list[WhatIfCase]:
    """All cases, the first as it is. Raises PlanError if that one does not fit, or if the rate is not above 0."""
    asked, cases = list(changes(given, others)), list[WhatIfCase]()  # refuses the rate before it computes anything
    given.lengths.check(given.model)
    for name, changed in asked:
        try:
            cases.append(WhatIfCase(name, changed, *knee_of(modelled(changed))))
        except PlanError as error:
            if not cases:
                raise
            cases.append(WhatIfCase(name, changed, why=str(error)))
    return cases


def what_if_advice(cases: Sequence[WhatIfCase]) -> str:
    """What helps most, and what the doubled load takes."""
    now, doubled = cases[0], cases[1]
    said = f"The load takes {now.gpus} {now.given.device.name}, twice the load {doubled.gpus}"
    rates = {each.name: each.point.tokens_s for each in cases if each.point and each.name.startswith(("weights", "KV"))}
    if rates and now.point and (most := max(rates.values())) > 1.05 * now.point.tokens_s:
        name = max(rates, key=rates.__getitem__)
        said += f". {name.capitalize()} would help most: {most / now.point.tokens_s:.2f} x the tokens of a GPU"
    elif now.limit == "knee":
        said += ". Fewer bits help little, for throughput ends at its knee and not at the memory"
    return said + "."


# --- commands --------------------------------------------------------------------------------------------------------

CURRENCY = "USD"
"""Of the prices that are assumed, and so of those that are given beside them."""


def prices_of(texts: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Prices by device of texts such as h200=3.80. Raises PlanError."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = -1.0
        if name not in names or not LEAST <= found[name] <= MOST:
            raise PlanError(
                f"--price {text}: write NAME=PRICE for a --gpu that is given ({', '.join(names)}), as {names[0]}=2.50"
            )
    return found


@plan_command("cost", MODEL, LENGTHS, BITS, TP, EFFICIENCY)
@click.option("--gpu", "gpus", metavar="NAME", multiple=True, required=True, help="GPU; give it again for others.")
@click.option("--price", "prices", metavar="NAME=PRICE", multiple=True, help="Of an hour of one such GPU.")
def cost_command(
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
    asked = list(zip(gpus, plans, strict=True))
    found = [cost_of(each, prices_known.get(name, each.device.price_per_hour)) for name, each in asked]
    assumed = [each.device for name, each in asked if name not in prices_known]
    assumed_now = {each.name: each.price_per_hour for each in assumed if each.price_per_hour is not None}
    currency = CURRENCY if assumed_now else ""
    points: list[dict[str, Any]] = [
        {"gpu": each.device.name, "batch": point.batch, "latency_s": point.latency_s, PER_MILLION: price}
        for each in found
        for point in each.points
        if (price := each.per_million(point)) is not None
    ]
    kept = pareto(points, lambda each: each[PER_MILLION], lambda each: each["latency_s"])
    value = {key: each for key, each in inputs_of(plans[0]).items() if not key.startswith("gpu")} | {
        "tp": tp,
        "efficiency": efficiency,
        "gpus": [_cost_json(each) for each in found],
        "pareto": kept,
        "assumed_prices": assumed_now,
        "currency": currency or None,
    }
    money = currency or "price"
    columns = COST_COLUMNS | {
        f"{money}/h": lambda each: known(three, each.price_per_hour),
        f"{money}/1M tokens": lambda each: known(three, each.per_million(each.point)),
    }
    advice, drawn = cost_advice(found, currency), pareto_plot(points, kept)
    return PlanAnswer(value, [PlanTable.of(found, columns)], advice, drawn, assumed_prices(assumed))


PER_MILLION = "price_per_million_tokens"
COST_COLUMNS: dict[str, Callable[[DeviceCost], str]] = {
    "gpu": lambda each: each.device.name,
    "batch": lambda each: f"{each.point.batch}",
    "ends at": lambda each: each.limit,
    "tokens/s": lambda each: three(each.point.tokens_s),
    "request": lambda each: seconds(each.point.latency_s),
    "J/token": lambda each: known(three, each.point.joules_token),
}


def _cost_json(each: DeviceCost) -> dict[str, Any]:
    return {
        "gpu": each.device.name, "gpu_source": each.device.source, "price_per_hour": each.price_per_hour,
        "batch_at_knee": each.point.batch, "tokens_s": each.point.tokens_s, "latency_s": each.point.latency_s,
        PER_MILLION: each.per_million(each.point), "joules_per_token": each.point.joules_token, "limit": each.limit,
    }  # fmt: skip


def assumed_prices(devices: Iterable[Accelerator]) -> list[str]:
    """Say which prices of an hour nobody gave."""
    named = [f"{each.name} {each.price_per_hour:.2f}" for each in devices if each.price_per_hour is not None]
    said = f"Assumed prices, US dollars of an hour on demand in 2025: {', '.join(named)}. Give your own with --price."
    return [said] if named else []


def pareto_plot(points: Sequence[dict[str, Any]], kept: Sequence[dict[str, Any]]) -> str:
    """Price over latency of all batches: a letter for each GPU, capital where no other batch beats it in both. Without
    prices: ""."""
    if not points:
        return ""
    letters = dict(zip(dict.fromkeys(each["gpu"] for each in points), ascii_lowercase, strict=False))
    points = sorted(points, key=kept.__contains__)  # those that are kept are drawn last, over the others
    signs = "".join(letters[each["gpu"]].upper() if each in kept else letters[each["gpu"]] for each in points)
    places = [(each["latency_s"], each[PER_MILLION]) for each in points]
    drawn = plot(places, "latency of a request, s", "price of a million tokens", signs=signs)
    names = ", ".join(f"{letter}: {name}" for name, letter in letters.items())
    return f"{drawn}\n{names}; each letter is a batch, doubling; capital: no other is as cheap at less latency"


@plan_command("what-if", MODEL, GPU, LENGTHS, BITS, TP, EFFICIENCY)
@click.option("--rate", type=float, default=1.0, show_default=True, help="Requests a second.")
@click.option("--other-gpu", "others", metavar="NAME", multiple=True, help="Another GPU to ask of; may be repeated.")
@click.option("--attention-gpu", metavar="NAME[:COUNT]", help="Compute attention on such GPUs (Lamina).")
@click.option("--link-gb-s", type=float, default=25.0, show_default=True, help="To them, in GB/s.")
@click.option("--disk-gb-s", type=float, help="Stream the weights from a disk of so many GB/s (TPI-LLM).")
def what_if_command(
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
    cases = what_if(given, [device_named(name) for name in others])
    offloaded = list(_offloaded(given, attention_gpu, link_gb_s, disk_gb_s))
    value = inputs_of(given, "rate", "tp", "efficiency") | {
        "cases": [_case_json(each) for each in cases],
        "offloaded": [{"case": name, "tokens_s_bound": tokens, "step_s": step} for name, tokens, step in offloaded],
    }
    rows = [(name, three(tokens), seconds(step)) for name, tokens, step in offloaded]
    header, title = ("offloaded", "tokens/s", "step"), "Upper bounds; no engine that Penstock runs does it"
    tables = [PlanTable.of(cases, CASE_COLUMNS), *[PlanTable(header, rows, title)] * bool(rows)]
    return PlanAnswer(value, tables, what_if_advice(cases), notes=[each.why for each in cases if each.why])


def _offloaded(
    given: PlanInput, attention_gpu: str | None, link_gb_s: float, disk_gb_s: float | None
) -> Iterator[tuple[str, float, float]]:
    """Name, tokens a second and step of what is offloaded."""
    if attention_gpu is not None:
        name, _, count = attention_gpu.partition(":")
        if count and not (count.isdecimal() and 1 <= int(count) <= MAX_GPUS):
            raise PlanError(f"--attention-gpu {attention_gpu}: write NAME or NAME:COUNT, 1 to {MAX_GPUS:,}, as l4:4")
        devices = int(count or 1)
        step = attention_offloaded(given, device_named(name), devices, 1e9 * link_gb_s)
        yield f"attention on {devices} x {name}, batch {step.batch}", step.tokens_s, step.seconds
    if disk_gb_s is not None:
        step_s = streamed_step_s(given, 1, given.lengths.mean, 1e9 * disk_gb_s)
        yield "weights from the disk, batch 1", 1 / step_s, step_s


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
    "bits w/a/kv": lambda each: "/".join(f"{bits:g}" for bits in asdict(each.given.precision).values()),
    "gpus": lambda each: f"{each.gpus}" if each.point else "does not fit",
    "batch": lambda each: f"{each.point.batch}" if each.point else "-",
    "ends at": lambda each: each.limit or "-",
    "tok/s each": lambda each: three(each.point.tokens_s) if each.point else "-",
    "request": lambda each: seconds(each.point.latency_s) if each.point else "-",
}
