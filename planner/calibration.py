"""Calibration: the step times of an engine from the requests that it has served. Pure.

What is known of a request is when it arrived and began, and when its first and its last token came. A decode of n
tokens has n - 1 steps, which it shares with the other texts of its worker, so for each request

    last - first  = sum over its steps of (a + b * tokens in the cache + c * texts) + the prefills of others in them
    first - begun = the same of the steps that compute its prompt, + their prefill, + a delay that holds up no step

where a prefill of n tokens adds d + e n + f n^2 to its step. All coefficients are fitted together (planner/fitting.py).
Steps that give one token alone are a case of their own: their time is that of the texts that had their worker to
themselves, and what others spent alone is left out of the first equation. The second is taken of prompts that were
computed alone: those that overlap share steps in a way that no time tells.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from planner.facts.catalogue import PlanError
from planner.fitting import REGIME, DecodeRegime, FittedTimes, sparse
from planner.simulator.engine import EngineShape, ModelText

MIN_REQUESTS = 40
"""With fewer, nothing is fitted."""
MAX_FITTED = 4000
"""Requests to fit: the newest."""
MIN_ALONE = 5
"""Prompts that were computed alone, to go by them alone; as few texts tell what a step takes that gives one token."""
ALONE = 0.95
"""Of its time to have had the worker to itself."""
SAME_STEP = 0.25
"""Of the mean step of a text: first tokens that come so soon after its own come from the same step."""
LEAST_SHARED = 0.2
"""Of the time of a text to tell what steps take that it shares."""
MIN_IDLE = 10
"""Texts that found their worker idle, to go by them alone."""
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
    by_slot: bool = False
    """Whether it is llama.cpp, which computes prompts in the order of their slots (`EngineShape`), and whose texts
    begin while a step is under way."""


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
        return EngineShape(
            limits.kv_tokens or NO_LIMIT, limits.slots, limits.step_tokens, costs=self.times, by_slot=limits.by_slot
        )

    def ttft_s(self, text: ModelText) -> float:
        """What the client of a simulated text sees."""
        return (math.inf if text.first_s is None else text.first_s) - text.arrived_s + self.delay_s + self.path_s


COLUMNS = ("a", "b", "c", "d", "e", "f", "delay")
DOUBTFUL = tuple(map(COLUMNS.index, ("f", "b", "delay", "d", "c")))
"""What is left out first if the requests do not tell all, or not enough to call for it."""


def fitted(served: Sequence[ServedText], limits: ServedLimits) -> EngineFit:
    """Fit an engine to what it has served. Raises PlanError if that is too little, or too much alike."""
    served = sorted(served, key=lambda each: each.last_s)[-MAX_FITTED:]
    neighbours = [each for texts in by_worker(served).values() for each in _neighbours(texts)]
    alone = [each.text for each in neighbours if each.has_decode and each.alone_s > ALONE * each.decode_s]
    lone_s = median([1 / each.pace for each in alone]) if len(alone) >= MIN_ALONE else None
    rows = _equations(neighbours, limits, lone_s)
    if lone_s is not None and sum(each.terms[-1] == 0 for each in rows) < MIN_REQUESTS:
        lone_s, rows = None, _equations(neighbours, limits, None)
    try:
        small, prefill, delay_s = _solved([each for each in rows if each.batch < REGIME] or rows)
        large = [each for each in rows if each.batch >= REGIME]
        regimes = small, _solved(large)[0] if len(large) >= MIN_REQUESTS else small
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


def _solved(equations: Sequence[_Equation]) -> tuple[DecodeRegime, tuple[float, float, float], float]:
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
        others = list(alive)
        for each in texts[place + 1 :]:
            if each.begun_s >= text.last_s:
                break
            others.append(each)
        alive.append(text)
        yield _Neighbours(text, others, marks)


def _equations(neighbours: Sequence[_Neighbours], limits: ServedLimits, lone_s: float | None) -> list[_Equation]:
    prefills = [each for each in neighbours if each.text.first_s > each.text.begun_s]
    alone = [each for each in prefills if each.is_alone_in_prefill]
    told = alone if len(alone) >= MIN_ALONE else prefills
    decodes = [_of_decode(each, limits.step_tokens, lone_s) for each in neighbours if each.has_decode]
    return [*(_of_prefill(each, limits) for each in told), *(each for each in decodes if each is not None)]


def _chunks(text: ServedText, step_tokens: int) -> tuple[float, float, float]:
    """Steps of a prefill, its tokens, and the sum of the squares of those in each step."""
    whole, rest = divmod(text.prompt, step_tokens)
    return whole + (rest > 0), float(text.prompt), float(whole * step_tokens**2 + rest**2)


def _of_prefill(given: _Neighbours, limits: ServedLimits) -> _Equation:
    text = given.text
    span_s, texts, held = text.first_s - text.begun_s, 0.0, 0.0
    decoding = [each for each in given.others if each.first_s <= text.begun_s < each.last_s]
    room = max(1, limits.step_tokens - len(decoding)) if limits.by_slot else limits.step_tokens
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
