"""Timeline: a trace served by the replicas of a plan, and what became of its requests over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.facts.catalogue import PlanError
from planner.facts.model import ModelShape
from planner.parallel import ReplicaModel
from planner.serving import BatchLimits, LatencySlo, ServedLoad, attainment, quantile, serve, tpot_s
from planner.simulator.engine import ModelText
from planner.simulator.trace import TraceRow

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
    texts = []
    for row in rows:
        answer = min(row.answer, model.context - 1)
        prompt = min(row.prompt, model.context - answer)
        texts.append(ModelText(prompt, answer, answer, row.at, row.lane))
        if len(texts) > MAX_REQUESTS:
            raise PlanError(f"more than {MAX_REQUESTS:,} requests: cut the trace")
    if not texts:
        raise PlanError("the trace has no request with an answer")
    return texts


def simulated(replica: ReplicaModel, texts: Sequence[ModelText], limits: BatchLimits) -> ServedLoad:
    """Serve the trace. Raises PlanError if the weights, or one of its requests, do not fit."""
    longest = max(text.prompt + text.output for text in texts)
    if longest + 1 > 0.95 * replica.kv_tokens:
        raise PlanError(
            f"the longest request has {longest} tokens, and the cache of a replica holds {replica.kv_tokens}; "
            "more GPUs in a replica (--tp) or fewer bits would do"
        )
    return serve(replica, texts, limits)


def timeline(texts: Sequence[ModelText], slo: LatencySlo, buckets: int = BUCKETS) -> list[TimelineRow]:
    """The requests by their arrival, in equal spans from the first to the last."""
    begin, end = min(text.arrived_s for text in texts), max(text.arrived_s for text in texts)
    width = max((end - begin) / buckets, 1e-9)
    spans: dict[int, list[ModelText]] = {}
    for text in texts:
        spans.setdefault(min(buckets - 1, int((text.arrived_s - begin) / width)), []).append(text)
    return [_row(begin + number * width, each, slo) for number, each in sorted(spans.items())]


def _row(begin_s: float, texts: Sequence[ModelText], slo: LatencySlo) -> TimelineRow:
    ttft = sorted((text.first_s or math.inf) - text.arrived_s for text in texts)
    tpot = sorted(each for text in texts if (each := tpot_s(text)) is not None)
    kept = attainment(texts, slo).both
    tokens = sum(text.generated for text in texts)
    return TimelineRow(begin_s, len(texts), tokens, kept, quantile(ttft, 0.9), quantile(tpot, 0.9) if tpot else 0.0)


def timeline_advice(rows: Sequence[TimelineRow], kept: float, slo: LatencySlo) -> str:
    """Whether the plan serves the trace, and when it does worst."""
    worst = min(rows, key=lambda row: row.kept)
    said = f"{100 * kept:.1f} % of the requests keep {slo.words}"
    if kept >= slo.share and worst.kept >= slo.share:
        return f"{said}, at no time fewer than {100 * worst.kept:.0f} %: the plan serves this trace."
    said += f"; fewest, {100 * worst.kept:.0f} %, of those that come from second {worst.begin_s:,.0f} on"
    late = "first tokens" if worst.ttft_p90_s > slo.ttft_s else "further tokens"
    return f"{said}, whose {late} are late" + (": more replicas (--dp) would serve them." if kept < slo.share else ".")
