"""Prediction: what the simulator says of requests at an engine's fitted step times, beside what was measured. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from random import Random
from statistics import median

from planner.calibration import MIN_REQUESTS, EngineFit, ServedLimits, ServedText, fitted
from planner.facts.catalogue import PlanError
from planner.serving import quantile, tpot_s
from planner.simulator.engine import ModelEngine, ModelText
from planner.simulator.pool import PoolEngine, PoolSimulation
from planner.simulator.queues import PenstockQueue
from planner.simulator.workers import PenstockWorker

MAX_TEXTS = 50_000
"""To divide, and to simulate."""
MIN_LOAD, MAX_LOADS = 20, 16
"""Requests of a load, and loads, into which records are divided."""
AFTER_S = 1e-6
"""A client's next request comes later than its answer, and no two clients ask at the same time."""
MAX_ERROR = 0.15
"""Of any figure: what is farther off is not planned with."""
FIGURES = {"tokens_s": "throughput", "ttft_p50_s": "TTFT p50", "ttft_p90_s": "TTFT p90", "tpot_p50_s": "TPOT p50"}
"""Of a load, by field."""


def predicted(fit: EngineFit, served: Sequence[ServedText], workers: int, scale: float = 1.0) -> list[ModelText]:
    """Simulate the same arrivals, `scale` times as fast, at so many workers, in the order of `served`. Queue, gate,
    preemption and the choice of a worker are those of Penstock."""
    begin_s = min(each.arrived_s for each in served)
    texts = [
        ModelText(
            max(1, each.prompt), each.answer, 1 << (each.answer - 1).bit_length(),
            (each.arrived_s - begin_s) / scale, each.lane, each.tenant,
        )
        for each in served
    ]  # fmt: skip
    pool = PoolSimulation(PoolEngine(fit.shape), queue=PenstockQueue(), make_worker=_worker)
    pool.order(workers, at_once=True)
    for text in texts:
        pool.at(text.arrived_s, partial(_arrive, pool, text))
    pool.run(math.inf)
    return texts


def predicted_clients(fit: EngineFit, clients: int, lengths: Sequence[tuple[int, int]]) -> list[ModelText]:
    """Simulate one engine under clients that each ask again as soon as they are answered, with these (prompt, answer)
    tokens in turn. What is asked at the end of a step comes when the next one is under way."""
    engine, now_s = ModelEngine(fit.shape), 0.0
    todo = iter([ModelText(prompt, answer, answer) for prompt, answer in lengths])
    numbers, coming = count(), list[tuple[float, int, ModelText]]()
    done: list[ModelText] = []

    def ask(at_s: float) -> None:
        if (text := next(todo, None)) is not None:
            text.arrived_s = at_s
            heapq.heappush(coming, (at_s, next(numbers), text))

    for number in range(clients):
        ask(number * AFTER_S)
    while coming or not engine.is_idle:
        if engine.is_idle:
            now_s = max(now_s, coming[0][0])
        while coming and coming[0][0] <= now_s:
            engine.submit(heapq.heappop(coming)[2])
        step = engine.step()
        now_s += step.duration_s
        for text in step.tokens:
            text.first_s = now_s if text.first_s is None else text.first_s
        for text in step.ended:
            text.ended_s = now_s
            done.append(text)
            ask(now_s + AFTER_S + fit.path_s + fit.delay_s)
    return done


def _arrive(pool: PoolSimulation, text: ModelText, _: float) -> None:
    pool.put_text(text)


def _worker(engine: ModelEngine) -> PenstockWorker:
    return PenstockWorker(engine, Random(1))  # noqa: S311 - a simulation


# --- compare ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """What became of the requests of one load."""

    tokens_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float


@dataclass(frozen=True, slots=True)
class ComparedLoad:
    """The requests of one span of time, measured and predicted."""

    begin_s: float
    """After the first arrival of all."""
    requests: int
    held_out: bool
    measured: LoadFigures
    predicted: LoadFigures


@dataclass(frozen=True, slots=True)
class FitErrors:
    """|predicted / measured - 1| over the loads that were held out: of each figure, the median or the most."""

    tokens_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float


def loads_of(served: Sequence[ServedText]) -> list[list[ServedText]]:
    """Divide texts into loads, by arrival: at moments at which nothing was in flight, or if there are too few of them,
    into equal numbers. Raises PlanError."""
    if len(served) < MIN_REQUESTS:
        raise PlanError(f"{len(served)} requests can be used, and a fit needs {MIN_REQUESTS}")
    if len(served) > MAX_TEXTS:
        raise PlanError(
            f"{len(served):,} requests are more than the {MAX_TEXTS:,} that are simulated: --since would cut them"
        )
    texts = sorted(served, key=lambda each: each.arrived_s)
    least = max(MIN_LOAD, len(texts) // MAX_LOADS)
    loads: list[list[ServedText]] = [[]]
    busy_s = -math.inf
    for text in texts:
        if len(loads[-1]) >= least and text.arrived_s >= busy_s:
            loads.append([])
        loads[-1].append(text)
        busy_s = max(busy_s, text.last_s)
    if len(loads) > 1 and len(loads[-1]) < least:
        loads[-2:] = [loads[-2] + loads[-1]]
    if len(loads) >= 4:
        return loads
    size = max(least, len(texts) // 8)
    count = max(2, len(texts) // size)
    edges = [round(number * len(texts) / count) for number in range(count + 1)]
    return [texts[begin:end] for begin, end in pairwise(edges)]


def compared(
    loads: Sequence[Sequence[ServedText]], limits: ServedLimits, workers: int
) -> tuple[EngineFit, list[ComparedLoad]]:
    """Fit the first, third, fifth... load, and predict all. Raises PlanError."""
    fit = fitted([text for load in loads[::2] for text in load], limits)
    everything = [text for load in loads for text in load]
    simulated = iter(predicted(fit, everything, workers))
    begin_s, found = everything[0].arrived_s, []
    for number, load in enumerate(loads):
        texts = [next(simulated) for _ in load]
        found.append(
            ComparedLoad(load[0].arrived_s - begin_s, len(load), number % 2 == 1, measured(load), figures(fit, texts))
        )
    return fit, found


def errors_of(found: Sequence[ComparedLoad]) -> FitErrors:
    """Medians over the loads that were held out."""
    return _errors(found, lambda name: [getattr(each.predicted, name) for each in found if each.held_out], median)


def worst_errors_of(found: Sequence[ComparedLoad]) -> FitErrors:
    """The same of the worst load that was held out, for each figure."""
    return _errors(found, lambda name: [getattr(each.predicted, name) for each in found if each.held_out], max)


def constant_errors_of(found: Sequence[ComparedLoad]) -> FitErrors:
    """Medians, for a predictor that knows nothing of load: it always says the median of the loads that were fitted. A
    simulator that is no better has not shown that it knows more."""

    def constant(name: str) -> list[float]:
        seen = [getattr(each.measured, name) for each in found if not each.held_out]
        return [median(seen)] * sum(each.held_out for each in found)

    return _errors(found, constant, median)


def _errors(
    found: Sequence[ComparedLoad], said: Callable[[str], list[float]], of: Callable[[list[float]], float]
) -> FitErrors:
    """`said`: what is predicted of a figure, for each load that was held out. One without a figure does not count."""

    def error(name: str) -> float:
        seen = [getattr(each.measured, name) for each in found if each.held_out]
        errors = [abs(value / true - 1) for value, true in zip(said(name), seen, strict=True) if true > 0]
        return of(errors) if errors else 0.0

    return FitErrors(*map(error, FIGURES))


def measured(load: Sequence[ServedText]) -> LoadFigures:
    """What the records say of a load."""
    seconds = max(each.last_s for each in load) - min(each.arrived_s for each in load)
    ttfts = sorted(each.heard_s - each.arrived_s for each in load)
    tpots = sorted(1 / each.pace for each in load if each.pace)
    return _figures(sum(each.answer for each in load), seconds, ttfts, tpots)


def figures(fit: EngineFit, texts: Sequence[ModelText]) -> LoadFigures:
    """What the simulator says of one."""
    seconds = max(text.ended_s or math.inf for text in texts) - min(text.arrived_s for text in texts)
    tpots = sorted(each for text in texts if (each := tpot_s(text)) is not None)
    return _figures(sum(text.generated for text in texts), seconds + fit.delay_s, sorted(map(fit.ttft_s, texts)), tpots)


def _figures(tokens: int, seconds: float, ttfts: Sequence[float], tpots: Sequence[float]) -> LoadFigures:
    p50, p90 = (quantile(ttfts, share) for share in (0.5, 0.9))
    return LoadFigures(tokens / max(seconds, 1e-9), p50, p90, quantile(tpots, 0.5) if tpots else 0.0)


def fit_advice(found: Sequence[ComparedLoad]) -> str:
    """How far the prediction may be trusted."""
    errors, constant = errors_of(found), constant_errors_of(found)
    held_out = sum(each.held_out for each in found)
    said = (
        f"Fitted to {len(found) - held_out} loads, the simulator predicts the {held_out} others to "
        f"{100 * errors.tokens_s:.0f} % in throughput, {100 * errors.ttft_p50_s:.0f} % in TTFT p50, "
        f"{100 * errors.ttft_p90_s:.0f} % in TTFT p90 and {100 * errors.tpot_p50_s:.0f} % in TPOT p50 (medians)"
    )
    worst = max(getattr(errors, name) for name in FIGURES)
    said += (
        ": its step times may be planned with"
        if worst <= MAX_ERROR
        else ": too far to plan with latencies; records of more, and of more different, loads would help"
    )
    if beaten := [what for name, what in FIGURES.items() if getattr(constant, name) < getattr(errors, name)]:
        said += f". The median of the fitted loads, whatever the load, is nearer in {' and '.join(beaten)}"
    return said + "."
