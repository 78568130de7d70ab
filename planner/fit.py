"""Fitting: step times from the records of a Penstock, and how well the simulator with them predicts these (`fit`).

The fit is by least squares of relative errors, with no coefficient below zero.

After DistServe: a prefill takes a + b sum(n) + c sum(n^2) seconds, a decode step a + b sum(ctx) + c B, in two regimes
that meet near a batch of 95. The terms of both are fitted together, for requests share steps.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from itertools import accumulate, islice, pairwise, takewhile
from operator import mul
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import click

from planner.answers import PlanAnswer, PlanTable, seconds, three
from planner.facts.catalogue import PlanError
from planner.options import plan_command
from planner.search import quantile, tpots_s
from planner.simulator.engine import EngineShape, ModelEngine, ModelText
from planner.simulator.queues import PenstockWorker, PoolSimulation, TextQueue, by_lane
from planner.trace import records_in
from telemetry.records.reader import Evidence, ReportedRequest

REGIME = 95
"""Batch at which DistServe's decode times change their slope."""
ROUNDS, SOME_ROUNDS = 8, 3
"""Of reweighting, from equal weights and from those of nearly the same fit."""
LEAST_ERROR = 0.01
"""Smaller relative errors count as this one."""


Rows: TypeAlias = Sequence[Sequence[float]]
Values: TypeAlias = Sequence[float]


def least_squares(rows: Rows, values: Values, weights: Values | None = None) -> list[float]:
    """The coefficients x for which rows * x is nearest to the values. Errors count relative to the value, as the noise
    of a time is a share of it, times the row's weight. Raises ValueError if the rows do not tell all coefficients."""
    if not rows:
        raise ValueError("nothing was measured")
    size = len(rows[0])
    normal = [[0.0] * (size + 1) for _ in range(size)]
    for row, value, weight in zip(rows, values, weights or [1.0] * len(rows), strict=True):
        scaled = [each / value for each in (*row, value)]
        for i in range(size):
            for j in range(size + 1):
                normal[i][j] += weight * scaled[i] * scaled[j]
    return _solved(normal)


def _solved(matrix: list[list[float]]) -> list[float]:
    """Gauss' elimination of a square matrix with a last column of values. Its columns are scaled to one size first."""
    size = len(matrix)
    scales = [*(matrix[i][i] ** 0.5 or 1.0 for i in range(size)), 1.0]
    rows = [[matrix[i][j] / scales[i] / scales[j] for j in range(size + 1)] for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(rows[row][i]))
        if abs(rows[pivot][i]) < 1e-10:
            raise ValueError("the measurements do not differ enough to tell all coefficients")
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for row in {*range(size)} - {i}:
            factor = rows[row][i] / rows[i][i]
            rows[row] = [a - factor * b for a, b in zip(rows[row], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] / scales[i] for i in range(size)]


def nonnegative(rows: Rows, values: Values, doubtful: Sequence[int], weights: Values | None = None) -> list[float]:
    """Coefficients that are not negative: the column that would take most away is left out (0), and so are columns that
    the rows do not tell apart, in the order of `doubtful`. Raises ValueError if they do not tell the others apart."""
    left, doubts = list(range(len(rows[0] if rows else ()))), list(doubtful)
    while True:
        try:
            found = least_squares([[row[each] for each in left] for row in rows], values, weights)
        except ValueError:
            doubts = [each for each in doubts if each in left]
            if not doubts:
                raise
            left.remove(doubts[0])
            continue
        if min(found) >= 0:
            return [found[left.index(each)] if each in left else 0.0 for each in range(len(rows[0]))]
        added = [each * sum(row[column] for row in rows) for each, column in zip(found, left, strict=True)]
        left.pop(added.index(min(added)))


def robust(
    rows: Rows, values: Values, doubtful: Sequence[int], weights: Values | None = None, rounds: int = ROUNDS
) -> list[float]:
    """Coefficients that are not negative, with the least sum of |relative errors|, so that outliers count little: least
    squares, again and again with each row weighted by 1 / its error, from these weights on. Raises ValueError as
    `nonnegative`."""
    found = nonnegative(rows, values, doubtful, weights)
    for _ in range(rounds):
        found = nonnegative(rows, values, doubtful, _weights(rows, values, found))
    return found


def sparse(rows: Rows, values: Values, doubtful: Sequence[int]) -> list[float]:
    """As `robust`, with those of the doubtful columns alone, in their order, that the rows call for. A column stays if
    Schwarz's criterion says so, of errors with a Laplace distribution: without it the sum of |errors| must grow by more
    than a factor of n^(1/2n). Raises ValueError as `nonnegative`."""
    kept = [list(row) for row in rows]
    found = robust(kept, values, doubtful)
    enough = len(rows) ** (0.5 / len(rows))
    for column in doubtful:
        if found[column]:
            fewer = [[0.0 if place == column else each for place, each in enumerate(row)] for row in kept]
            less = robust(fewer, values, (column, *doubtful), _weights(kept, values, found), SOME_ROUNDS)
            if sum(_errors(fewer, values, less)) <= enough * sum(_errors(kept, values, found)):
                kept, found = fewer, less
    return found


def _weights(rows: Rows, values: Values, found: Values) -> list[float]:
    return [1 / max(error, LEAST_ERROR) for error in _errors(rows, values, found)]


def _errors(rows: Rows, values: Values, found: Values) -> list[float]:
    return [abs(sum(map(mul, row, found)) / value - 1) for row, value in zip(rows, values, strict=True)]


@dataclass(frozen=True, slots=True)
class DecodeRegime:
    """a + b sum(ctx) + c B seconds."""

    fixed_s: float
    held_s: float
    text_s: float

    def step_s(self, texts: int, held: int) -> float:
        return self.fixed_s + self.held_s * held + self.text_s * texts


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Step times by measurement. It is a `StepTime` of the simulator."""

    prefill: tuple[float, float, float]
    """a, b, c of a + b sum(n) + c sum(n^2): what prompts of n tokens add to a step."""
    small: DecodeRegime
    large: DecodeRegime
    """From REGIME texts on."""
    lone_s: float | None = None
    """A step that gives one token alone, if it takes another time than `small` says: it multiplies matrices with a
    vector, for which engines have other kernels. It also takes `small.held_s` for each token in the cache."""

    def step_s(self, texts: int, held: int, prefilled: int, squares: int | None = None) -> float:
        regime = self.large if texts >= REGIME else self.small
        if texts == 1 and not prefilled and self.lone_s is not None:
            return self.lone_s + regime.held_s * held
        decode = regime.step_s(texts, held - prefilled)
        if not prefilled:
            return decode
        a, b, c = self.prefill
        return decode + a + b * prefilled + c * float(prefilled**2 if squares is None else squares)


# What is known of a request is when it arrived and began, and when its first and its last token came. A decode of n
# tokens has n - 1 steps, which it shares with the other texts of its worker, so for each request
#
#     last - first  = sum over its steps of (a + b * tokens in the cache + c * texts) + the prefills of others in them
#     first - begun = the same of the steps that compute its prompt, + their prefill, + a delay that holds up no step
#
# where a prefill of n tokens adds d + e n + f n^2 to its step. All coefficients are fitted together. Steps
# that give one token alone are a case of their own: their time is that of the texts that had their worker to
# themselves, and what others spent alone is left out of the first equation. The second is taken of prompts that were
# computed alone: those that overlap share steps in a way that no time tells.


MIN_REQUESTS = 40
"""With fewer, nothing is fitted."""
MAX_FITTED = 4000
"""Requests to fit: the newest."""
MIN_ALONE = 5
"""Least number of prompts that were computed alone to use only these; also of texts that ran alone, to take the time of
a step that gives one token from them."""
ALONE = 0.95
"""Share of a text's decode time without other texts from which it counts as alone."""
SAME_STEP = 0.25
"""Of the mean step of a text: first tokens that come so soon after its own come from the same step."""
LEAST_SHARED = 0.2
"""Least share of a text's decode time beside others for that time to be used."""
MIN_IDLE = 10
"""Least number of texts that found their worker idle to use only these."""
NO_LIMIT = 1 << 30
"""Tokens of a cache that only its slots limit."""


class ServedText(NamedTuple):
    """One text that an engine has generated in one attempt. Times are seconds of one clock."""

    worker: str
    arrived_s: float
    begun_s: float
    """The engine began to run it."""
    first_s: float
    last_s: float
    """The engine's first and last token."""
    heard_s: float
    """Its client had the first token."""
    prompt: int
    """Tokens that were computed: those from a cache are left out."""
    answer: int
    lane: str = "standard"
    tenant: str = ""

    @property
    def pace(self) -> float:
        """Tokens a second after the first."""
        return (self.answer - 1) / (self.last_s - self.first_s) if self.last_s > self.first_s else 0.0


@dataclass(frozen=True, slots=True)
class EngineFit:
    """An engine as its requests showed it."""

    times: FittedTimes
    limits: EngineShape
    """What it takes at once; its costs are unused (`shape` has the fitted ones). The texts of an engine that works by
    slot, which is llama.cpp, begin while a step is under way."""
    delay_s: float
    """From the begin of a text to its first token, beside its steps."""
    path_s: float
    """Of a first token, outside the engine: the way in and out."""
    requests: int
    """That it was fitted to."""

    @property
    def shape(self) -> EngineShape:
        """For the simulator."""
        return replace(self.limits, costs=self.times)


COLUMNS = ("a", "b", "c", "d", "e", "f", "delay")
DOUBTFUL = tuple(map(COLUMNS.index, ("f", "b", "delay", "d", "c")))
"""What is left out first if the requests do not tell all, or not enough to call for it."""


def fitted(served: Sequence[ServedText], limits: EngineShape) -> EngineFit:
    """Fit an engine to what it has served. Raises PlanError if that is too little, or too much alike."""
    served = sorted(served, key=lambda each: each.last_s)[-MAX_FITTED:]
    neighbours = [each for texts in by_worker(served).values() for each in _neighbours(texts)]
    alone = [each.text for each in neighbours if each.has_decode and each.alone_s > ALONE * each.decode_s]
    lone_s = median([1 / each.pace for each in alone]) if len(alone) >= MIN_ALONE else None
    rows = _equations(neighbours, limits, lone_s)
    if lone_s is not None and sum(each.terms[-1] == 0 for each in rows) < MIN_REQUESTS:
        lone_s, rows = None, _equations(neighbours, limits, None)
    try:
        small, prefill, delay_s = _solved_steps([each for each in rows if each.batch < REGIME] or rows)
        large = [each for each in rows if each.batch >= REGIME]
        regimes = small, _solved_steps(large)[0] if len(large) >= MIN_REQUESTS else small
    except ValueError as error:
        raise PlanError(f"{len(served)} requests tell no step times: {error}") from None
    if lone_s is not None:
        lone_s = max(0.0, median([1 / each.pace - small.held_s * _mean_held(each) for each in alone]))
    times = FittedTimes(prefill, *regimes, lone_s)
    return EngineFit(times, limits, delay_s, _path_s(served, limits.slots), len(served))


def _path_s(served: Sequence[ServedText], slots: int) -> float:
    """What a first token takes outside the engine, in the median: of the texts that found their worker idle, or else of
    those that found a free slot, which wait for the step under way, by half a step in the mean."""
    idle, beside = [], []
    for texts in by_worker(served).values():
        ends: list[float] = []
        for text in texts:
            while ends and ends[0] <= text.arrived_s:
                heapq.heappop(ends)
            outside_s = (text.heard_s - text.arrived_s) - (text.first_s - text.begun_s)
            if not ends:
                idle.append(outside_s)
            elif len(ends) < slots and text.pace:
                beside.append(outside_s - 0.5 / text.pace)
            heapq.heappush(ends, text.last_s)
    found = idle if len(idle) >= MIN_IDLE else [*idle, *beside]
    return max(0.0, median(found)) if found else 0.0


class _Equation(NamedTuple):
    """One measured time as a sum of terms, by COLUMNS."""

    terms: Sequence[float]
    seconds: float
    batch: float
    """Texts in the mean of its steps."""


def _solved_steps(equations: Sequence[_Equation]) -> tuple[DecodeRegime, tuple[float, float, float], float]:
    if len(equations) < MIN_REQUESTS:
        raise ValueError(f"at least {MIN_REQUESTS} are needed")
    found = sparse([each.terms for each in equations], [each.seconds for each in equations], DOUBTFUL)
    a, b, c, d, e, f, delay_s = found
    return DecodeRegime(a, b, c), (d, e, f), delay_s


def by_worker(served: Sequence[ServedText]) -> dict[str, list[ServedText]]:
    """The texts of each worker, by their begin."""
    found: defaultdict[str, list[ServedText]] = defaultdict(list)
    for each in sorted(served, key=lambda text: text.begun_s):
        found[each.worker].append(each)
    return found


class _Neighbours(NamedTuple):
    """A text among those that its worker had at the same time."""

    text: ServedText
    others: Sequence[ServedText]
    marks: Sequence[float]
    """When first and last tokens of its worker came, sorted: ends of steps."""

    @property
    def decode_s(self) -> float:
        return self.text.last_s - self.text.first_s

    @property
    def has_decode(self) -> bool:
        return self.text.answer > 1 and self.decode_s > 0

    @property
    def alone_s(self) -> float:
        """Of its decode, without any other."""
        at_s, free_s = self.text.first_s, 0.0
        for other in sorted(self.others, key=lambda each: each.begun_s):
            free_s += max(0.0, min(other.begun_s, self.text.last_s) - at_s)
            at_s = max(at_s, other.last_s)
        return free_s + max(0.0, self.text.last_s - at_s)

    @property
    def is_alone_in_prefill(self) -> bool:
        text = self.text
        return not any(_overlap_s(text.begun_s, text.first_s, each.begun_s, each.first_s) for each in self.others)


def _neighbours(texts: Sequence[ServedText]) -> Iterator[_Neighbours]:
    """Of one worker's texts, which are ordered by their begin."""
    marks = sorted([at for text in texts for at in (text.first_s, text.last_s)])
    alive: list[ServedText] = []
    for place, text in enumerate(texts):
        alive = [each for each in alive if each.last_s > text.begun_s]
        later = takewhile(lambda each: each.begun_s < text.last_s, islice(texts, place + 1, None))  # noqa: B023
        yield _Neighbours(text, [*alive, *later], marks)
        alive.append(text)


def _equations(neighbours: Sequence[_Neighbours], limits: EngineShape, lone_s: float | None) -> list[_Equation]:
    prefills = [each for each in neighbours if each.text.first_s > each.text.begun_s]
    alone = [each for each in prefills if each.is_alone_in_prefill]
    told = alone if len(alone) >= MIN_ALONE else prefills
    decodes = [_of_decode(each, limits.prefill_tokens, lone_s) for each in neighbours if each.has_decode]
    return [*(_of_prefill(each, limits) for each in told), *filter(None, decodes)]


def _chunks(text: ServedText, step_tokens: int) -> tuple[float, float, float]:
    """Steps of a prefill, its tokens, and the sum of the squares of those in each step."""
    whole, rest = divmod(text.prompt, step_tokens)
    return whole + (rest > 0), float(text.prompt), float(whole * step_tokens**2 + rest**2)


def _of_prefill(given: _Neighbours, limits: EngineShape) -> _Equation:
    text = given.text
    span_s, texts, held = text.first_s - text.begun_s, 0.0, 0.0
    decoding = [each for each in given.others if each.first_s <= text.begun_s < each.last_s]
    room = max(1, limits.prefill_tokens - len(decoding)) if limits.by_slot else limits.prefill_tokens
    chunks, tokens, squares = _chunks(text, room)
    for other in given.others:
        share = _overlap_s(text.begun_s, text.first_s, other.first_s, other.last_s) / span_s
        texts += share
        held += share * _held(other, (text.begun_s + text.first_s) / 2)
        together = _overlap_s(text.begun_s, text.first_s, other.begun_s, other.first_s)
        if together and other.first_s > other.begun_s:
            share = together / (other.first_s - other.begun_s)
            _, prompt, square = _chunks(other, room)
            tokens, squares = tokens + share * prompt, squares + share * square
    chunks = max(chunks, tokens / room)
    waited, seconds = _wait(given, decoding) if limits.by_slot else (0.0, 0.0)
    steps = chunks + waited
    return _Equation(
        (steps, steps * held, steps * texts + 1, chunks, tokens, squares, 1.0), span_s + seconds, texts + 1
    )


def _wait(given: _Neighbours, decoding: Sequence[ServedText]) -> tuple[float, float]:
    """Steps that were under way when the text came, and how long before it: a whole one since the last token of another
    text, as in a closed loop; else half of one, in the mean; none if the engine was idle."""
    step_s = max([1 / each.pace for each in decoding if each.pace], default=0.0)
    place = bisect_right(given.marks, given.text.begun_s) - 1
    gap_s = given.text.begun_s - given.marks[place] if place >= 0 else math.inf
    return (1.0, gap_s) if gap_s < step_s else (0.5 * bool(decoding), 0.0)


def _of_decode(given: _Neighbours, step_tokens: int, lone_s: float | None) -> _Equation | None:
    """None: it was alone for too long to tell what shared steps take."""
    text, seconds, steps = given.text, given.decode_s, float(given.text.answer - 1)
    if lone_s is not None:
        alone_s = given.alone_s
        steps -= min(steps, alone_s / lone_s)
        seconds -= alone_s
        if seconds < LEAST_SHARED * given.decode_s or steps < 1:
            return None
    pace, batch, held = steps / seconds, steps, steps * _mean_held(text)
    prefills, tokens, squares = 0.0, 0.0, 0.0
    same_s = SAME_STEP / text.pace
    step_s = text.first_s
    for other in sorted(given.others, key=lambda each: each.first_s):
        together = _overlap_s(text.first_s, text.last_s, other.first_s, other.last_s)
        middle = max(text.first_s, other.first_s) + together / 2
        batch += together * pace
        held += together * pace * _held(other, middle)
        if text.first_s + same_s < other.first_s <= text.last_s:
            more, prompt, square = _chunks(other, step_tokens)
            prefills += more - (other.first_s <= step_s + same_s)
            step_s, tokens, squares = other.first_s, tokens + prompt, squares + square
    return _Equation((steps, held, batch, prefills, tokens, squares, 0.0), seconds, batch / steps)


def _overlap_s(begin: float, end: float, other_begin: float, other_end: float) -> float:
    return max(0.0, min(end, other_end) - max(begin, other_begin))


def _mean_held(text: ServedText) -> float:
    """Tokens in the cache of its decode, in the mean."""
    return text.prompt + text.answer / 2


def _held(text: ServedText, at_s: float) -> float:
    """Tokens in the cache of a text that generates."""
    return text.prompt + 1 + text.pace * max(0.0, at_s - text.first_s)


MAX_TEXTS = 50_000
"""Most texts that are divided and simulated."""
MIN_LOAD, MAX_LOADS = 20, 16
"""Requests of a load, and loads, into which records are divided."""
MAX_ERROR = 0.15
"""A fit with a larger error in any figure is not planned with."""


def predicted(fit: EngineFit, served: Sequence[ServedText], workers: int, scale: float = 1.0) -> list[ModelText]:
    """Simulate the same arrivals, `scale` times as fast, at so many workers, in the order of `served`. Gate,
    preemption and the choice of a worker are those of Penstock. The queue has its lanes, but no floor, no age and no
    counters of tenants."""
    begin_s = min(each.arrived_s for each in served)
    texts = [
        ModelText(
            max(1, each.prompt), each.answer, 1 << (each.answer - 1).bit_length(),
            (each.arrived_s - begin_s) / scale, each.lane, each.tenant,
        )
        for each in served
    ]  # fmt: skip
    pool = [PenstockWorker(ModelEngine(fit.shape), Random(1)) for _ in range(workers)]  # noqa: S311 - a simulation
    PoolSimulation(TextQueue(by_lane), pool).run(texts)
    return texts


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """What became of the requests of one load, or the relative error of each figure."""

    tokens_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float


FIGURES = tuple(each.name for each in fields(LoadFigures))


@dataclass(frozen=True, slots=True)
class ComparedLoad:
    """The requests of one span of time, measured and predicted."""

    begin_s: float
    """After the first arrival of all."""
    requests: int
    held_out: bool
    measured: LoadFigures
    predicted: LoadFigures


def loads_of(served: Sequence[ServedText]) -> list[list[ServedText]]:
    """Divide texts into loads, by arrival: at moments at which nothing was in flight, or if there are too few of them,
    into equal numbers. Raises PlanError."""
    if len(served) < MIN_REQUESTS:
        raise PlanError(
            f"{len(served)} requests can be used, and a fit needs {MIN_REQUESTS} that completed in their first attempt"
        )
    if len(served) > MAX_TEXTS:
        raise PlanError(
            f"{len(served):,} requests are more than the {MAX_TEXTS:,} that are simulated: --since would cut them"
        )
    texts = sorted(served, key=lambda each: each.arrived_s)
    loads: list[list[ServedText]] = [[]]
    busy_s = -math.inf
    least = max(MIN_LOAD, len(texts) // MAX_LOADS)
    for text in texts:
        if len(loads[-1]) >= least and text.arrived_s >= busy_s:
            loads.append([])
        loads[-1].append(text)
        busy_s = max(busy_s, text.last_s)
    if len(loads) > 1 and len(loads[-1]) < least:
        loads[-2:] = [loads[-2] + loads[-1]]
    if len(loads) >= 4:
        return loads
    count = max(2, len(texts) // max(least, len(texts) // 8))
    edges = [round(number * len(texts) / count) for number in range(count + 1)]
    return [texts[begin:end] for begin, end in pairwise(edges)]


def compared(
    loads: Sequence[Sequence[ServedText]], limits: EngineShape, workers: int
) -> tuple[EngineFit, list[ComparedLoad]]:
    """Fit the first, third, fifth... load, and predict all. Raises PlanError."""
    fit = fitted([text for load in loads[::2] for text in load], limits)
    simulated = iter(predicted(fit, [text for load in loads for text in load], workers))
    begin_s, found = loads[0][0].arrived_s, []
    for number, load in enumerate(loads):
        said = figures(fit, list(islice(simulated, len(load))))
        found.append(ComparedLoad(load[0].arrived_s - begin_s, len(load), number % 2 == 1, measured(load), said))
    return fit, found


def errors_of(found: Sequence[ComparedLoad], of: Callable[[list[float]], float] = median) -> LoadFigures:
    """|predicted / measured - 1| over the loads that were held out: of each figure, the median or the most. A load
    without a figure does not count."""

    def error(name: str) -> float:
        pairs = [(getattr(each.predicted, name), getattr(each.measured, name)) for each in found if each.held_out]
        errors = [abs(said / true - 1) for said, true in pairs if true > 0]
        return of(errors) if errors else 0.0

    return LoadFigures(*map(error, FIGURES))


def measured(load: Sequence[ServedText]) -> LoadFigures:
    """What the records say of a load."""
    seconds = max(each.last_s for each in load) - min(each.arrived_s for each in load)
    ttfts = sorted(each.heard_s - each.arrived_s for each in load)
    tpots = sorted(1 / each.pace for each in load if each.pace)
    return _figures(sum(each.answer for each in load), seconds, ttfts, tpots)


def figures(fit: EngineFit, texts: Sequence[ModelText]) -> LoadFigures:
    """What the simulator says of a load."""
    seconds = max(text.ended_s or math.inf for text in texts) - min(text.arrived_s for text in texts)
    tokens, late_s = sum(text.generated for text in texts), fit.delay_s + fit.path_s
    ttfts = sorted(text.ttft_s + late_s for text in texts)
    return _figures(tokens, seconds + fit.delay_s, ttfts, tpots_s(texts))


def _figures(tokens: int, seconds: float, ttfts: Sequence[float], tpots: Sequence[float]) -> LoadFigures:
    p50, p90 = (quantile(ttfts, share) for share in (0.5, 0.9))
    return LoadFigures(tokens / max(seconds, 1e-9), p50, p90, quantile(tpots, 0.5) if tpots else 0.0)


def fit_advice(found: Sequence[ComparedLoad]) -> str:
    """How far the prediction may be trusted."""
    errors, held_out = errors_of(found), sum(each.held_out for each in found)
    return (
        f"Fitted to {len(found) - held_out} loads, the simulator predicts the {held_out} others to "
        f"{100 * errors.tokens_s:.0f} % in throughput, {100 * errors.ttft_p50_s:.0f} % in TTFT p50, "
        f"{100 * errors.ttft_p90_s:.0f} % in TTFT p90 and {100 * errors.tpot_p50_s:.0f} % in TPOT p50 (medians): "
    ) + (
        "its step times may be planned with."
        if max(astuple(errors)) <= MAX_ERROR
        else "too far to plan with latencies; records of more, and of more different, loads would help."
    )


# --- records and command ---------------------------------------------------------------------------------------------

DEFAULT_STEP_TOKENS, EMBEDDED_STEP_TOKENS = 512, 128
"""Prompt tokens of one step of the simulated and of the embedded engine, unless they are set otherwise."""


RecordsSource: TypeAlias = Callable[[Path | None, str | None], tuple[Path, float]]
"""Where the records are, and from which Unix time on they count, by --records and --since. Raises PlanError."""


def of_model(requests: Iterable[ReportedRequest], model: str | None) -> list[ReportedRequest]:
    """The requests of one model. Raises PlanError if none is named and there are several, or if there is no such."""
    found = [each for each in requests if each.record.model]
    names = sorted({each.record.model for each in found})
    if model is None and len(names) > 1:
        raise PlanError(f"the records are of {', '.join(names)}: name one with --model")
    if model is not None and model not in names:
        raise PlanError(f"the records have no request of {model}; they are of {', '.join(names) or 'no model'}")
    return [each for each in found if model in (None, each.record.model)]


def served_of(requests: Iterable[ReportedRequest]) -> list[ServedText]:
    """The texts of the requests that ended in their first attempt: several for a request with several choices."""
    found = list[ServedText]()
    for request in requests:
        record, choices = request.record, max(1, request.record.choices)
        begun, arrived = record.scheduled_us or record.released_us, record.received_us or record.accepted_us
        is_timed = 0 < arrived <= begun <= record.first_us <= record.last_us
        if request.completed and record.attempts == 1 and is_timed and record.completion_tokens:
            heard, prompt = request.stamps.first_sent or record.first_us, record.prompt_tokens - record.cached_tokens
            text = ServedText(
                record.by, arrived / 1e6, begun / 1e6, record.first_us / 1e6, record.last_us / 1e6, heard / 1e6,
                max(1, prompt), max(1, record.completion_tokens // choices), record.lane or "standard", record.tenant,
            )  # fmt: skip
            found += [text] * choices
    return found


def limits_of(
    evidence: Evidence, served: Sequence[ServedText], step_tokens: int, *, by_slot: bool = False
) -> EngineShape:
    """What an engine takes at once, as its worker's samples say; without them, what one was seen to hold. `by_slot`: it
    is llama.cpp."""
    workers = by_worker(served)
    samples = [each for (name, _), rows in evidence.samples.items() if name in workers for each in rows]
    seen = (_at_once([(each.begun_s, each.last_s) for each in texts]) for texts in workers.values())
    slots = max((each.slots for each in samples), default=0) or max(seen, default=1)
    kv_tokens = max((each.kv_tokens for each in samples), default=0) or NO_LIMIT
    return EngineShape(kv_tokens, slots, step_tokens, by_slot=by_slot)


def workers_of(served: Sequence[ServedText]) -> int:
    """How many workers served at the same time, at most: each from its first text to its last."""
    return _at_once([(texts[0].begun_s, max(each.last_s for each in texts)) for texts in by_worker(served).values()])


def _at_once(spans: Sequence[tuple[float, float]]) -> int:
    """The most spans that overlap."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    return max(accumulate(change for _, change in changes), default=1)


LANES_NOTE = "The simulated lanes have no floor and no counters of tenants: an overload of several of these differs."
STEP_TOKENS = f"Prompt tokens of a step [{DEFAULT_STEP_TOKENS}; embedded: {EMBEDDED_STEP_TOKENS}]."
EMBEDDED = "The engine was the embedded one, which computes prompts in the order of its slots."


@plan_command("fit", shown="fitting the records")
@click.option("--records", type=click.Path(path_type=Path), help="Folder, or one file [those of this instance].")
@click.option("--since", help="Requests that ended since: 15m, 2h, 7d ago, or a time [all].")
@click.option("--model", metavar="NAME", help="Only this model, as penstock.toml names it.")
@click.option("--scale", type=float, help="Also: what if requests came so many times as fast?")
@click.option("--step-tokens", type=int, help=STEP_TOKENS)
@click.option("--embedded", is_flag=True, help=EMBEDDED)
def fit_command(
    records: Path | None,
    since: str | None,
    model: str | None,
    scale: float | None,
    step_tokens: int | None,
    embedded: bool,
    source: RecordsSource,
) -> PlanAnswer:
    """Fit step times to the records of a Penstock, and say how far the simulator's prediction is from them.

    Half of the loads are fitted; the simulator predicts all, with the lanes, gate and preemption of Penstock.

    \b
    Examples:
      penstock plan fit --since 1h
      penstock plan fit --records .penstock/records --scale 2
    """
    if scale is not None and not 0 < scale <= 1000:
        raise PlanError(f"--scale {scale:g}: above 0 and at most 1000, such as 2 for twice the load")
    step_tokens = (EMBEDDED_STEP_TOKENS if embedded else DEFAULT_STEP_TOKENS) if step_tokens is None else step_tokens
    if step_tokens < 1:
        raise PlanError(f"--step-tokens {step_tokens}: a step computes at least 1")
    evidence = records_in(*source(records, since), since)
    requests = of_model(evidence.requests, model)
    served = served_of(requests)
    loads, workers = loads_of(served), workers_of(served)
    found, rows = compared(loads, limits_of(evidence, served, step_tokens, by_slot=embedded), workers)
    errors = {"median_errors": errors_of(rows), "worst_errors": errors_of(rows, max)}
    value: dict[str, Any] = {
        "requests": len(requests),
        "texts": len(served),
        "workers": workers,
        **_coefficients(found),
        "loads": [asdict(each) for each in rows],
        **{name: asdict(each) for name, each in errors.items()},
    }
    named = (("simulator, median", errors["median_errors"]), ("simulator, worst load", errors["worst_errors"]))
    error_rows = [(name, *(f"{100 * share:.1f} %" for share in astuple(each))) for name, each in named]
    tables = [
        PlanTable.of(rows, LOAD_COLUMNS, "Measured > predicted"),
        PlanTable(("error of the held-out loads", *FIGURE_NAMES), error_rows),
    ]
    if scale is not None:
        whole, scaled = (figures(found, predicted(found, served, workers, each)) for each in (1.0, scale))
        value["scaled"] = {"scale": scale, **asdict(scaled)}
        told = [("as recorded", *_shown(whole)), (f"{scale:g} times as fast", *_shown(scaled))]
        tables.append(PlanTable(("predicted", *FIGURE_NAMES), told))
    notes = [_fit_note(found, workers), _left_out(requests, served), LANES_NOTE]
    return PlanAnswer(value, tables, fit_advice(rows), notes=notes)


def _coefficients(found: EngineFit) -> dict[str, Any]:
    return {
        "slots": found.limits.slots,
        "kv_tokens": 0 if found.limits.kv_tokens == NO_LIMIT else found.limits.kv_tokens,
        "step_tokens": found.limits.prefill_tokens,
        "decode": asdict(found.times.small),
        "decode_from_95_texts": asdict(found.times.large),
        "lone_s": found.times.lone_s,
        "prefill": dict(zip(("fixed_s", "token_s", "square_s"), found.times.prefill, strict=True)),
        "delay_s": found.delay_s,
        "path_s": found.path_s,
    }


FIGURE_NAMES = ("tokens/s", "first p50", "first p90", "token p50")
"""Of LoadFigures, as tables head them."""


def _shown(each: LoadFigures) -> list[str]:
    rate, *times = astuple(each)
    return [three(rate), *map(seconds, times)]


def _compared(place: int) -> Callable[[ComparedLoad], str]:
    return lambda row: f"{_shown(row.measured)[place]} > {_shown(row.predicted)[place]}"


LOAD_COLUMNS: Mapping[str, Callable[[ComparedLoad], str]] = {
    "from, s": lambda row: f"{row.begin_s:,.0f}",
    "texts": lambda row: f"{row.requests:,}",
    "": lambda row: "held out" if row.held_out else "fitted",
    **{name: _compared(place) for place, name in enumerate(FIGURE_NAMES)},
}


def _fit_note(found: EngineFit, workers: int) -> str:
    small, (fixed_s, token_s, _) = found.times.small, found.times.prefill
    return (
        f"A step takes {seconds(small.fixed_s)}, {seconds(small.text_s)} more for each text and "
        f"{seconds(1000 * small.held_s)} more for 1,000 tokens in the cache; a prompt adds {seconds(fixed_s)} and "
        f"{seconds(1000 * token_s)} for 1,000 tokens. Simulated with {workers} worker{'s' * (workers > 1)} of "
        f"{found.limits.slots} slots all the time."
    )


def _left_out(requests: list[ReportedRequest], served: list[ServedText]) -> str:
    used = len({(text.arrived_s, text.begun_s, text.worker) for text in served})
    return f"{used:,} of {len(requests):,} requests are used: those that ended in their first attempt."
