"""Calibration: the step times of an engine from the requests that it has served. Pure.

What is known of a request is when it arrived and began, and when its first and its last token came. A decode of n
tokens has n - 1 steps, which it shares with the other texts of its worker, so for each request

    last - first  = sum over its steps of (a + b * tokens in the cache + c * texts) + the prefills of others in them
    first - begun = the same of the steps that compute its prompt, + their prefill, + a delay that holds up no step

where a prefill of n tokens adds d + e n + f n^2 to its step. All coefficients are fitted together (planner/fitting.py).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from planner.facts.catalogue import PlanError
from planner.fitting import REGIME, DecodeRegime, FittedTimes, robust
from planner.simulator.engine import EngineShape, ModelText

MIN_REQUESTS = 40
"""With fewer, nothing is fitted."""
MAX_FITTED = 4000
"""Requests to fit: the newest."""
MIN_IDLE = 10
"""Texts that found their worker idle, to go by them alone."""
SAME_STEP_S = 1e-4
"""First tokens that are no further apart come from one step."""
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
class ServedLimits:
    """What one engine takes at once."""

    slots: int
    kv_tokens: int = 0
    """0: only the slots limit it."""
    step_tokens: int = 512
    """Prompt tokens of one step."""


@dataclass(frozen=True, slots=True)
class EngineFit:
    """An engine as its requests showed it."""

    times: FittedTimes
    limits: ServedLimits
    delay_s: float
    """From the begin of a text to its first token, beside its steps."""
    path_s: float
    """Of a first token, outside the engine: the way in and out."""
    requests: int
    """That it was fitted to."""

    @property
    def shape(self) -> EngineShape:
        """For the simulator."""
        limits = self.limits
        return EngineShape(limits.kv_tokens or NO_LIMIT, limits.slots, limits.step_tokens, costs=self.times)

    def ttft_s(self, text: ModelText) -> float:
        """What the client of a simulated text sees."""
        return (math.inf if text.first_s is None else text.first_s) - text.arrived_s + self.delay_s + self.path_s


COLUMNS = ("a", "b", "c", "d", "e", "f", "delay")
DOUBTFUL = tuple(map(COLUMNS.index, ("f", "b", "delay", "d", "c")))
"""What is left out first if the requests do not differ enough to tell all."""


def fitted(served: Sequence[ServedText], limits: ServedLimits) -> EngineFit:
    """Fit an engine to what it has served. Raises PlanError if that is too little, or too much alike."""
    served = sorted(served, key=lambda each: each.last_s)[-MAX_FITTED:]
    rows = [each for texts in by_worker(served).values() for each in _equations(texts, limits.step_tokens)]
    try:
        small, prefill, delay_s = _solved([each for each in rows if each.batch < REGIME] or rows)
        large = [each for each in rows if each.batch >= REGIME]
        regimes = small, _solved(large)[0] if len(large) >= MIN_REQUESTS else small
    except ValueError as error:
        raise PlanError(f"{len(served)} requests tell no step times: {error}") from None
    return EngineFit(FittedTimes(prefill, *regimes), limits, delay_s, _path_s(served, limits.slots), len(served))


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


def _solved(equations: Sequence[_Equation]) -> tuple[DecodeRegime, tuple[float, float, float], float]:
    if len(equations) < MIN_REQUESTS:
        raise ValueError(f"at least {MIN_REQUESTS} are needed")
    found = robust([each.terms for each in equations], [each.seconds for each in equations], DOUBTFUL)
    a, b, c, d, e, f, delay_s = found
    return DecodeRegime(a, b, c), (d, e, f), delay_s


def by_worker(served: Sequence[ServedText]) -> dict[str, list[ServedText]]:
    """The texts of each worker, by their begin."""
    found: defaultdict[str, list[ServedText]] = defaultdict(list)
    for each in sorted(served, key=lambda text: text.begun_s):
        found[each.worker].append(each)
    return found


def _equations(texts: Sequence[ServedText], step_tokens: int) -> Iterator[_Equation]:
    """Those of one worker's texts, which are ordered by their begin."""
    alive: list[ServedText] = []
    for place, text in enumerate(texts):
        alive = [each for each in alive if each.last_s > text.begun_s]
        others = list(alive)
        for each in texts[place + 1 :]:
            if each.begun_s >= text.last_s:
                break
            others.append(each)
        alive.append(text)
        if text.first_s > text.begun_s:
            yield _of_prefill(text, others, step_tokens)
        if text.answer > 1 and text.last_s > text.first_s:
            yield _of_decode(text, others, step_tokens)


def _chunks(text: ServedText, step_tokens: int) -> tuple[float, float, float]:
    """Steps of a prefill, its tokens, and the sum of the squares of those in each step."""
    whole, rest = divmod(text.prompt, step_tokens)
    return whole + (rest > 0), float(text.prompt), float(whole * step_tokens**2 + rest**2)


def _of_prefill(text: ServedText, others: Sequence[ServedText], step_tokens: int) -> _Equation:
    span_s = text.first_s - text.begun_s
    steps, tokens, squares = _chunks(text, step_tokens)
    batch, held = 1.0, 0.0
    for other in others:
        decoding = _overlap_s(text.begun_s, text.first_s, other.first_s, other.last_s) / span_s
        batch += decoding
        held += decoding * _held(other, (text.begun_s + text.first_s) / 2)
        together = _overlap_s(text.begun_s, text.first_s, other.begun_s, other.first_s)
        if together and other.first_s > other.begun_s:
            share = together / (other.first_s - other.begun_s)
            more, prompt, square = _chunks(other, step_tokens)
            steps += 0.0 if abs(other.first_s - text.first_s) < SAME_STEP_S else share * more
            tokens, squares = tokens + share * prompt, squares + share * square
    return _Equation((steps, steps * held, steps * batch, steps, tokens, squares, 1.0), span_s, batch)


def _of_decode(text: ServedText, others: Sequence[ServedText], step_tokens: int) -> _Equation:
    steps = text.answer - 1
    batch = float(steps)
    held = steps * (text.prompt + text.answer / 2)
    prefills, tokens, squares = 0.0, 0.0, 0.0
    for other in others:
        together = _overlap_s(text.first_s, text.last_s, other.first_s, other.last_s)
        middle = max(text.first_s, other.first_s) + together / 2
        batch += together * text.pace
        held += together * text.pace * _held(other, middle)
        if text.first_s < other.first_s <= text.last_s:
            more, prompt, square = _chunks(other, step_tokens)
            prefills, tokens, squares = prefills + more, tokens + prompt, squares + square
    seconds = text.last_s - text.first_s
    return _Equation((steps, held, batch, prefills, tokens, squares, 0.0), seconds, batch / steps)


def _overlap_s(begin: float, end: float, other_begin: float, other_end: float) -> float:
    return max(0.0, min(end, other_end) - max(begin, other_begin))


def _held(text: ServedText, at_s: float) -> float:
    """Tokens in the cache of a text that generates."""
    return text.prompt + 1 + text.pace * max(0.0, at_s - text.first_s)
