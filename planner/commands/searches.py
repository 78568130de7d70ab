"""Plans that search: `penstock plan search`, `grid`, `goodput` and `place`.

Here are also the words and tables of `penstock tune`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from planner.commands.answers import PlanAnswer, PlanTable, inputs_of, known, plot, seconds, three
from planner.commands.estimates import assumed_prices
from planner.commands.inputs import EFFICIENCY, GPU, GPUS, LEAST, MOST, SLO, plan_command, search_options
from planner.cost import best_by_concurrency, grid_advice, knee_of, per_million
from planner.cost import grid as layouts_of
from planner.facts import catalogue
from planner.facts.catalogue import Accelerator, PlanError
from planner.goodput import GoodputRow, best_goodput, goodput_advice, work_note
from planner.knee import modelled, pareto
from planner.load import LatencySlo, PlanInput, Precision, RequestLengths
from planner.memory import replicas_for
from planner.placement import place as placed
from planner.placement import place_advice
from planner.search import Attainment, PlanOutcome, SearchWatch, best, quantile, search_advice
from planner.search import search as tried
from planner.tuning import LevelReading, MeasuredFrontier, Recommendation


def frontier_json(
    found: MeasuredFrontier, wanted: Recommendation, readings: Mapping[int, Sequence[LevelReading]]
) -> dict[str, Any]:
    """The frontier with its knee and what it speaks for."""
    return {
        "points": [
            {
                "concurrency": point.batch,
                "tokens_s": point.tokens_s,
                "requests_s": point.requests_s,
                "latency_s": point.latency_s,
                "joules_per_token": point.joules_token,
                "is_dominated": point not in found.kept,
                "repeats": len(readings[point.batch]),
                "requests": sum(each.requests for each in readings[point.batch]),
                "failed": sum(each.failed for each in readings[point.batch]),
            }
            for point in found.points
        ],
        "knee": {
            "concurrency": found.knee.batch,
            "gain_of_twice": found.knee.gain,
            "confidence": found.knee.confidence if found.repeats > 1 and not found.is_open else None,
            "is_beyond": found.knee.is_beyond,
            "is_fitted": found.knee.is_fitted,
            "reason": found.knee.reason,
        },
        "recommended": {
            "max_batch_size": None if wanted.withheld else wanted.max_batch_size,
            "kv_tokens": None if wanted.withheld else wanted.kv_tokens,
            "replicas": wanted.replicas,
            "withheld": wanted.withheld or None,
        },
        "left_out": found.left_out,
        "curve": found.curve,
        "held_out_error": found.error,
    }


def frontier_table(found: MeasuredFrontier) -> PlanTable:
    """Joules have a column if they are known."""
    header, has_joules = ["at once", "tokens/s", "requests/s", "request"], any(p.joules_token for p in found.points)
    rows = []
    for point in found.points:
        row = [f"{point.batch}", three(point.tokens_s), three(point.requests_s), seconds(point.latency_s)]
        row += [known(three, point.joules_token)] * has_joules
        rows.append([*row, "knee" if point.batch == found.knee.batch else "" if point in found.kept else "dominated"])
    return PlanTable((*header, *["J/token"] * has_joules, "note"), rows)


def power_note(readings: Mapping[int, Sequence[LevelReading]], device: Accelerator | None, gpus: int) -> list[str]:
    """How near to its limit the GPU was at the highest concurrency whose energy is known: a line of advice."""
    metered = [(clients, one) for clients, ones in readings.items() for one in ones if one.joules is not None]
    if device is None or not device.watts or not metered:
        return []
    clients, reading = max(metered, key=lambda each: each[0])
    watts = (reading.joules or 0.0) / reading.seconds
    share = watts / (device.watts * max(1, gpus))
    return [f"At {clients} at once the GPUs draw {watts:.0f} W, {100 * share:.0f} % of their limit ({device.name})."]


def frontier_plot(found: MeasuredFrontier) -> str:
    points = [(float(point.batch), point.tokens_s) for point in found.points]
    marked = next(point for point in points if point[0] == found.knee.batch)
    return plot(points, "requests at once", "tokens/s", marked, "the knee")


def frontier_notes(found: MeasuredFrontier, wanted: Recommendation) -> list[str]:
    if found.knee.is_beyond:
        notes = [f"The knee is at least {found.knee.batch}; how far beyond was not measured."]
    elif found.left_out:
        notes = []
    else:
        once = "measured once: its confidence is unknown"
        sure = f"{100 * found.knee.confidence:.0f} % sure" if found.repeats > 1 else once
        notes = [f"The knee is {sure}. KV cache of that batch: {wanted.kv_tokens:,} tokens."]
    if found.error is not None:
        notes.append(
            f"The curve of every second concurrency predicts the throughput of the others to {100 * found.error:.0f} %."
        )
    return notes


BATCH_KEY = {"trtllm": "max_batch_size", "sim": "slots", "llamacpp": "slots"}
"""By engine, the option of the requests at once."""
KV_KEY = {"trtllm": "kv_cache.max_tokens", "sim": "kv_tokens"}
"""By engine, the option of the cache's tokens; llama.cpp's follows from slots and context."""


def settings_lines(model: str, wanted: Recommendation) -> list[str]:
    """The settings of a Penstock that serves the model, by engine."""
    found = ["Put this into penstock.toml, and restart the instance: penstock down, penstock up", f'[models."{model}"]']
    for engine, key in BATCH_KEY.items():
        cache = f", options.{KV_KEY[engine]} = {wanted.kv_tokens}" if engine in KV_KEY else ""
        found.append(f"# engine {engine}: options.{key} = {wanted.max_batch_size}{cache}")
    return found + ([f"max_workers = {wanted.replicas}"] if wanted.replicas else [])


def kept(reading: LevelReading, slo: LatencySlo) -> Attainment:
    """Shares of all requests that kept the objectives; one that failed kept none."""
    answered = [(answer.ttft, answer.tpot or 0.0) for answer in reading.answers]
    return Attainment.of(answered, reading.requests, slo)


def goodput_words(found: float, tried: dict[float, Attainment], slo: LatencySlo, ended: str) -> str:
    """The rate, what gives way first, and why the search ended before its end, if it did."""
    end, share = f" {ended}" if ended else "", f"{100 * slo.share:.0f} %"
    if not tried:
        return f"No rate was measured.{end}"
    worst = min((each for rate, each in tried.items() if rate > found), key=lambda each: each.both, default=None)
    gives = "first token" if worst and worst.ttft < worst.tpot else "time between tokens"
    if not found:
        return f"At no rate do {share} of the requests keep {slo.words}: the {gives} gives way.{end}"
    beyond = f"; beyond it the {gives} gives way" if worst else ""
    return f"{three(found)} requests a second keep {slo.words} for {share} of them{beyond}.{end}"


SHOWN = 12
"""Rows of the table; --json has all."""


@plan_command("search", *search_options(), SLO, shown="searching")
@click.option("--rate", type=float, help="Requests a second of all GPUs; then latencies are those at this rate.")
@click.option("--price", type=float, help="Of an hour of one such GPU.")
def search(given: PlanInput, rate: float | None, price: float | None, watch: SearchWatch) -> PlanAnswer:
    """Try every parallelism (dp, pp, tp, experts, attention-dp) on several GPUs, and name the best.

    \b
    Examples:
      penstock plan search --model llama-3.1-70b --gpu h200 --gpus 8 --price 3.80
      penstock plan search --model llama-3.1-8b --gpu l4 --rate 1
    """
    if rate is not None and rate <= 0:
        raise PlanError(f"--rate {rate:g}: requests a second are above 0")
    if price is not None and not price > 0:
        raise PlanError(f"--price {price:g}: a price of an hour is above 0")
    given, gpus = replace(given, rate=rate), given.gpus
    assumed = [given.device] if price is None else []
    price = given.device.price_per_hour if price is None else price
    found = tried(given, watch)
    top = best(found)
    value = {
        **inputs_of(given, gpus=gpus, efficiency=given.efficiency, rate=rate),
        **{f"{aim}_optimal": each.plan.name for aim, each in top._asdict().items()},
        "price_per_hour": price,
        "pareto": [each.plan.name for each in cheapest(found, gpus, price)],
        "plans": [_outcome_json(each) | _cost_json(each, gpus, price) for each in found],
    }
    columns: dict[str, Callable[[PlanOutcome], str]] = {
        "plan": lambda each: each.plan.name,
        "best": lambda each: marks_of(each, found),
        **COLUMNS,
        **({} if rate is None else AT_RATE_COLUMNS),
    }
    drawn = _plot(found, gpus, price) if len(found) > 1 else ""
    advice, notes = search_advice(given, found), _notes(given.efficiency, found) + assumed_prices(assumed)
    return PlanAnswer(value, [PlanTable.of(found[:SHOWN], columns)], advice, drawn, notes)


def cost_of(each: PlanOutcome, gpus: int, price: float | None) -> float:
    """Of a million tokens: GPU-hours, or with a price of an hour of one GPU their price."""
    return per_million(gpus * (price or 1.0), each.backlog.tokens_s)


def cheapest(found: list[PlanOutcome], gpus: int, price: float | None) -> list[PlanOutcome]:
    """The plans that no other beats in both cost and the latency of a lone request, the quickest first."""
    return pareto(found, lambda each: cost_of(each, gpus, price), lambda each: each.alone_s)


def _cost_json(each: PlanOutcome, gpus: int, price: float | None) -> dict[str, float | None]:
    return {
        "gpu_hours_per_million_tokens": cost_of(each, gpus, None),
        "price_per_million_tokens": None if price is None else cost_of(each, gpus, price),
    }


def _plot(found: list[PlanOutcome], gpus: int, price: float | None) -> str:
    kept = cheapest(found, gpus, price)
    found = sorted(found, key=kept.__contains__)  # those that are kept are drawn last, over the others
    points = [(each.alone_s, cost_of(each, gpus, price)) for each in found]
    signs = "".join("P" if each in kept else "." for each in found)
    y = "GPU-hours of a million tokens" if price is None else "price of a million tokens"
    names = ", ".join(each.plan.name for each in kept)
    drawn = plot(points, "latency of a lone request, s", y, signs=signs)
    return f"{drawn}\nP: no other is as cheap at less latency: {names}"


def marks_of(outcome: PlanOutcome, found: list[PlanOutcome]) -> str:
    """What a plan is best for."""
    marks = [aim for aim, each in best(found)._asdict().items() if each is outcome]
    return ", ".join(marks) or "-"


def _outcome_json(each: PlanOutcome) -> dict[str, Any]:
    """One plan with its figures."""
    plan = each.plan
    found = {
        "plan": plan.name, "dp": plan.dp, "pp": plan.pp, "tp": plan.tp, "ep": plan.ep,
        "attention_dp": plan.attention_dp, "kv_tokens_per_replica": each.kv_tokens,
        "alone_s": each.alone_s, "alone_ttft_s": each.alone_ttft_s, "alone_tpot_s": each.alone_tpot_s,
        "tokens_s": each.backlog.tokens_s, "joules_per_token": each.backlog.joules_token,
        "mfu": each.backlog.mfu, "mbu": each.backlog.mbu,
    }  # fmt: skip
    if each.at_rate is not None and each.kept is not None:
        for name, values in (("ttft", each.at_rate.ttfts_s), ("tpot", each.at_rate.tpots_s)):
            found |= {f"{name}_{rank}_s": quantile(values, share) for rank, share in (("p50", 0.5), ("p95", 0.95))}
        found |= {"kept_both": each.kept.both, "kept_ttft": each.kept.ttft, "kept_tpot": each.kept.tpot}
    return found


COLUMNS: Mapping[str, Callable[[PlanOutcome], str]] = {
    "alone": lambda each: seconds(each.alone_s),
    "first token": lambda each: seconds(each.alone_ttft_s),
    "per token": lambda each: seconds(each.alone_tpot_s),
    "backlog tok/s": lambda each: three(each.backlog.tokens_s),
    "J/token": lambda each: three(each.backlog.joules_token),
    "mfu": lambda each: f"{each.backlog.mfu:.2f}",
    "mbu": lambda each: f"{each.backlog.mbu:.2f}",
}
AT_RATE_COLUMNS: Mapping[str, Callable[[PlanOutcome], str]] = {
    "p95 first": lambda each: seconds(quantile(each.at_rate.ttfts_s, 0.95)) if each.at_rate else "-",
    "p95 token": lambda each: seconds(quantile(each.at_rate.tpots_s, 0.95)) if each.at_rate else "-",
    "kept": lambda each: f"{100 * each.kept.both:.0f} %" if each.kept else "-",
}


def _notes(efficiency: float, found: list[PlanOutcome]) -> list[str]:
    more = f" {len(found) - SHOWN} more plans are in --json." if len(found) > SHOWN else ""
    return [f"Simulated at {efficiency:g} of the roofline.{more}"]


USUAL_BATCH = 64
"""ScaleLLM's router sends more concurrent requests than that to several replicas."""


@plan_command("grid", *search_options(USUAL_BATCH))
def grid(given: PlanInput) -> PlanAnswer:
    """Compare one large replica with several small ones on the same GPUs, by concurrent requests.

    \b
    Examples:
      penstock plan grid --model mixtral-8x7b --gpu h100 --gpus 8
    """
    rows = layouts_of(given)
    top = best_by_concurrency(rows)
    value = {
        **inputs_of(given, gpus=given.gpus, efficiency=given.efficiency, max_batch=given.max_batch),
        "layouts": [{"plan": row.plan.name, "tokens_s": row.tokens_s} for row in rows],
        "best": {each: plan.name for each, plan in top.items()},
    }
    table = [[f"{each}", *(three(row.tokens_s[each]) for row in rows), plan.name] for each, plan in top.items()]
    header = ["concurrent", *(f"{row.plan.name} tok/s" for row in rows), "best"]
    return PlanAnswer(value, [PlanTable(header, table)], grid_advice(rows))


@plan_command("goodput", *search_options(), SLO, shown="searching")
def goodput(given: PlanInput, watch: SearchWatch) -> PlanAnswer:
    """Find the highest rate of requests that keep both latency objectives, with prefill beside decode or apart.

    \b
    Examples:
      penstock plan goodput --model opt-13b --gpu a100-80gb --gpus 2
    """
    rows, slo = best_goodput(given, watch=watch), given.slo
    value = {
        **inputs_of(given, gpus=given.gpus, efficiency=given.efficiency),
        "ttft_ms": 1e3 * slo.ttft_s,
        "tpot_ms": 1e3 * slo.tpot_s,
        "share": slo.share,
        "deployments": [
            {
                "prefill": row.deployment.prefill.name if row.deployment.prefill else None,
                "decode": row.deployment.decode.name,
                "gpus": row.deployment.gpus,
                "requests_s": row.rate,
                "requests_s_per_gpu": row.per_gpu,
                "requests_s_if_judged_apart": row.separate_rate,
            }
            for row in rows
        ],
    }
    notes = [work_note(given, rows[0].deployment)] if given.gpus > 1 else []
    return PlanAnswer(value, [PlanTable.of(rows, GOODPUT_COLUMNS)], goodput_advice(given, rows), notes=notes)


GOODPUT_COLUMNS: Mapping[str, Callable[[GoodputRow], str]] = {
    "prefill": lambda row: row.deployment.prefill.name if row.deployment.prefill else "beside decode",
    "decode": lambda row: row.deployment.decode.name,
    "requests/s": lambda row: three(row.rate),
    "per GPU": lambda row: three(row.per_gpu),
}
FORM = "write MODEL=RATE or MODEL=RATE:IN:OUT, as opt-1.3b=4:512:256"


def load_of(text: str, w_bits: float | None, device: Accelerator) -> PlanInput:
    """The load that a text such as opt-1.3b=4:512:256 describes. Raises PlanError."""
    name, _, numbers = text.partition("=")
    rate, *lengths = numbers.split(":")
    try:
        found = float(rate), [int(each) for each in lengths]
    except ValueError:
        raise PlanError(f"--load {text}: {FORM}") from None
    if not LEAST <= found[0] <= MOST or len(lengths) not in (0, 2):
        raise PlanError(f"--load {text}: {FORM}")
    model = catalogue.model(name)
    tokens = RequestLengths(found[1][0], found[1][1]) if found[1] else RequestLengths()
    return PlanInput(model, device, tokens, Precision.stored(model, w_bits), rate=found[0])


@plan_command("place", GPU, GPUS, SLO, EFFICIENCY, shown="placing")
@click.option("--load", "texts", metavar="MODEL=RATE[:IN:OUT]", multiple=True, required=True,
              help="A model and its requests a second; give it again for others.")  # fmt: skip
@click.option("--w-bits", type=float, help="Bits of a weight of all models [as their files have them].")
def place(
    texts: tuple[str, ...], device: Accelerator, gpus: int, w_bits: float | None, slo: LatencySlo, efficiency: float
) -> PlanAnswer:
    """Choose which of several models run on which GPUs, so that most requests keep their objectives.

    \b
    Examples:
      penstock plan place --load opt-1.3b=20 --load opt-13b=2 --gpu h200 --gpus 2
    """
    asked = [load_of(text, w_bits, device) for text in texts]
    loads = [replace(load, gpus=gpus, slo=slo, efficiency=efficiency) for load in asked]
    names = [load.model.name for load in loads]
    if len(set(names)) < len(names):
        raise PlanError("--load names a model twice: add its rates, and give it once")
    found = placed(loads)
    shared = {load.model.name: _shared(load) for load in loads}
    value = {
        "gpu": device.name,
        "gpu_source": device.source,
        "gpus": gpus,
        "kept": found.kept,
        "copies": [dict(zip(names, gpu, strict=True)) for gpu in found.copies],
        "copies_per_gpu_at_the_knee": shared,
        "kept_after_each_copy": found.steps,
    }
    rows = [
        [f"{number}", *(f"{count}" if count else "-" for count in gpu)] for number, gpu in enumerate(found.copies, 1)
    ]
    note = ", ".join(f"{name} {count}" for name, count in shared.items())
    return PlanAnswer(
        value,
        [PlanTable(["gpu", *names], rows)],
        place_advice(loads, found),
        notes=[f"Copies that a whole GPU holds with the batch of their knee (at most 3, which gained most): {note}."],
    )


def _shared(load: PlanInput) -> int:
    """Copies of a model on a GPU of its own."""
    return replicas_for(load, knee_of(modelled(load))[0].batch)
