"""Simulation of one parallelism under a trace: who was served in time, and when (the command simulate)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import click

from planner.answers import PlanAnswer, PlanTable, inputs_of, seconds, three
from planner.facts.catalogue import ModelShape, PlanError
from planner.load import MAX_GPUS, LatencySlo, PlanInput
from planner.options import BITS, EFFICIENCY, GPU, LENGTHS, MODEL, SLO, max_batch, plan_command
from planner.search import ParallelPlan, ReplicaModel, ServedLoad, attainment, is_valid, quantiles, requests, serve
from planner.simulator.engine import ModelText
from planner.trace import Trace, TraceRow, cut

BUCKETS = 24
"""Rows of a timeline, at most."""
MAX_REQUESTS = 200_000


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """The requests that arrived in one span of time."""

    begin_s: float
    requests: int
    tokens: int
    kept: float
    """Share that kept both objectives."""
    ttft_p90_s: float
    tpot_p90_s: float


def texts_of(rows: Iterable[TraceRow], model: ModelShape) -> list[ModelText]:
    """The requests of a trace, cut to the model's context, the prompt first. Raises PlanError if there are none, or too
    many."""
    first_ones = islice(cut(rows, longest=model.context), MAX_REQUESTS + 1)
    texts = [ModelText(row.prompt, row.answer, row.answer, row.at, row.lane) for row in first_ones]
    if len(texts) > MAX_REQUESTS:
        raise PlanError(f"more than {MAX_REQUESTS:,} requests: cut the trace")
    if not texts:
        raise PlanError("the trace has no request with an answer")
    return texts


def simulated(replica: ReplicaModel, texts: Sequence[ModelText]) -> ServedLoad:
    """Serve the trace. Raises PlanError if the weights, or one of its requests, do not fit."""
    longest = max(text.prompt + text.output for text in texts)
    if longest + 1 > 0.95 * replica.kv_tokens:
        raise PlanError(
            f"the longest request has {longest} tokens, and the cache of a replica holds {replica.kv_tokens}; "
            "more GPUs in a replica (--tp) or fewer bits would do"
        )
    return serve(replica, texts)


def timeline(texts: Sequence[ModelText], slo: LatencySlo, buckets: int = BUCKETS) -> list[TimelineRow]:
    """The requests by their arrival, in equal spans from the first to the last."""
    begin, end = min(text.arrived_s for text in texts), max(text.arrived_s for text in texts)
    width = max((end - begin) / buckets, 1e-9)
    spans: dict[int, list[ModelText]] = {}
    for text in texts:
        spans.setdefault(min(buckets - 1, int((text.arrived_s - begin) / width)), []).append(text)
    return [_row(begin + number * width, each, slo) for number, each in sorted(spans.items())]


def _row(begin_s: float, texts: Sequence[ModelText], slo: LatencySlo) -> TimelineRow:
    tokens, kept = sum(text.generated for text in texts), attainment(texts, slo).both
    return TimelineRow(begin_s, len(texts), tokens, kept, *quantiles(texts, p90=0.9).values())


def timeline_advice(rows: Sequence[TimelineRow], kept: float, slo: LatencySlo) -> str:
    """Whether the plan serves the trace, and when it does worst."""
    worst = min(rows, key=lambda row: row.kept)
    said = f"{100 * kept:.1f} % of the requests keep {slo.words}"
    if kept >= slo.share and worst.kept >= slo.share:
        return f"{said}, at no time fewer than {100 * worst.kept:.0f} %: the plan serves this trace."
    said += f"; fewest, {100 * worst.kept:.0f} %, of those that come from second {worst.begin_s:,.0f} on"
    return said + (": more replicas (--dp) would serve them." if kept < slo.share else ".")


# --- command ---------------------------------------------------------------------------------------------------------


@plan_command("simulate", MODEL, GPU, LENGTHS, BITS, max_batch(), SLO, EFFICIENCY, shown="simulating")
@click.option("--trace", "path", type=click.Path(path_type=Path), help="A CSV, a .jsonl, or records.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="So many times as fast as the trace.")
@click.option("--rate", type=float, default=1.0, show_default=True, help="Without a trace: requests a second.")
@click.option("--count", type=int, default=1000, show_default=True, help="Without a trace: requests.")
@click.option("--dp", type=int, default=1, show_default=True, help="Replicas.")
@click.option("--pp", type=int, default=1, show_default=True, help="Stages of a replica.")
@click.option("--tp", type=int, default=1, show_default=True, help="GPUs of a stage.")
def simulate_command(
    given: PlanInput, path: Path | None, scale: float, rate: float, count: int, dp: int, pp: int, tp: int
) -> PlanAnswer:
    """Serve a trace with one parallelism, iteration by iteration, and show who was served in time, and when.

    A trace is a CSV in BurstGPT's columns, a .jsonl in APEX's form, or Penstock's own records: a file or their folder.

    \b
    Examples:
      penstock plan simulate --model opt-13b --gpu h200 --rate 4
      penstock plan simulate --model opt-13b --gpu h200 --trace burstgpt.csv
      penstock plan simulate --model opt-13b --gpu l4 --trace .penstock/records
    """
    model, slo, plan = given.model, given.slo, ParallelPlan(dp, pp, tp)
    if min(dp, pp, tp) < 1 or not is_valid(plan, model):
        raise PlanError(f"{plan.name} does not divide {model.name}: `penstock plan search` lists what does")
    if plan.gpus > MAX_GPUS:
        raise PlanError(f"{plan.name} takes {plan.gpus:,} GPUs: at most {MAX_GPUS:,} can be planned with")
    if not (0 < scale < math.inf and 0 < rate < math.inf) or count < 1:
        raise PlanError(f"--scale {scale:g} --rate {rate:g} --count {count}: the first two are above 0, --count from 1")
    if count > MAX_REQUESTS:
        raise PlanError(f"--count {count}: at most {MAX_REQUESTS:,} requests are simulated")
    given.lengths.check(model)
    texts, failed = _texts(path, scale, rate, count, given)
    prompt = round(sum(text.prompt for text in texts) / len(texts))
    replica = ReplicaModel(replace(given, lengths=replace(given.lengths, prompt=prompt)), plan)
    found = simulated(replica, texts)
    rows, kept = timeline(texts, slo), attainment(texts, slo)
    evictions = sum(text.evictions for text in texts)
    value = {
        **{name: each for name, each in inputs_of(given).items() if name not in ("in", "out")},
        "efficiency": given.efficiency,
        "plan": plan.name,
        "gpus": plan.gpus,
        "failed_in_trace": failed,
        "evictions": evictions,
        "requests": len(texts),
        "seconds": found.seconds,
        **found.value,
        **kept.value,
        **quantiles(texts, p50=0.5, p90=0.9),
        "timeline": [asdict(row) for row in rows],
    }
    note = (
        f"{three(found.tokens_s)} tokens/s over {seconds(found.seconds)}, {three(found.joules_token)} J/token, "
        f"{evictions} evictions." + (f" {failed} requests without an answer are left out." if failed else "")
    )
    tables = [] if all(row.kept == 1.0 for row in rows) else [PlanTable.of(rows, COLUMNS)]
    return PlanAnswer(value, tables, timeline_advice(rows, kept.both, slo), notes=[note])


def _texts(path: Path | None, scale: float, rate: float, count: int, given: PlanInput) -> tuple[list[ModelText], int]:
    """The requests, and how many of the trace are left out because they had no answer. Raises PlanError."""
    if path is None:
        return requests(given.lengths, count, rate), 0
    trace = Trace(path)
    try:
        return texts_of(cut(trace, scale=scale), given.model), trace.failed
    except OSError as error:
        raise PlanError(
            f"--trace {path}: {(error.strerror or str(error)).lower()}",
            "give a CSV or .jsonl that is there, or leave --trace out and give --rate and --count",
        ) from None


COLUMNS: Mapping[str, Callable[[TimelineRow], str]] = {
    "from, s": lambda row: f"{row.begin_s:,.0f}",
    "requests": lambda row: f"{row.requests:,}",
    "tokens": lambda row: three(row.tokens),
    "first p90": lambda row: seconds(row.ttft_p90_s),
    "token p90": lambda row: seconds(row.tpot_p90_s),
    "kept": lambda row: f"{100 * row.kept:.0f} %",
    "": lambda row: "#" * round(20 * row.kept),
}
