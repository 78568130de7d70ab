"""Requests of a trace, in BurstGPT's columns or APEX's JSON lines, and requests that are generated with such gaps.

APEX's lines: {"StartTimeOffset": ns, "ContextTokens": n, "GeneratedTokens": n}. BurstGPT's columns: Timestamp (s),
Model, Request tokens, Response tokens, Total tokens, Log Type; newer files add Session ID and Elapsed time. A row
without response tokens is a request that failed: counted, never sent.

Generated gaps are Gamma with shape 1/cv^2 and scale cv^2/rate: mean 1/rate, coefficient of variation cv. Where the rate
changes with time, gaps are drawn at rate 1 and stretched by the rate of their moment.
"""

from __future__ import annotations

import csv
import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.text import fault_of

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
CONVERSATION, API = "Conversation log", "API log"
LANES = {CONVERSATION: "interactive", API: "standard"}
"""People wait for a conversation; a program that calls the API can wait a little."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One row. `at` in seconds since the trace began."""

    at: float
    prompt: int
    answer: int
    lane: str = "interactive"
    model: str = "ChatGPT"
    session: str = ""


class ApexLine(msgspec.Struct, frozen=True):
    """One line of APEX's form."""

    StartTimeOffset: Annotated[int, msgspec.Meta(ge=0)]
    """Nanoseconds since the trace began."""
    ContextTokens: Annotated[int, msgspec.Meta(ge=0)]
    GeneratedTokens: Annotated[int, msgspec.Meta(ge=0)]


class Malformed(ValueError):
    """A row that cannot be read, with its number and what is wrong."""


@dataclass(slots=True)
class Trace:
    """A file as an iterable of requests; `failed` counts the rows that were left out on the way. Its name ends in
    .jsonl if it has JSON lines."""

    path: Path
    failed: int = 0

    def __iter__(self) -> Iterator[TraceRow]:
        """Rows in the order of the file. Raises Malformed, OSError."""
        try:
            for request in self._lines() if self.path.suffix == ".jsonl" else self._rows():
                if request.answer > 0:
                    yield request
                else:
                    self.failed += 1
        except UnicodeDecodeError:
            raise Malformed(f"{self.path}: it is {fault_of(self.path.read_bytes())}") from None

    def _lines(self) -> Iterator[TraceRow]:
        with self.path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                try:
                    found = msgspec.json.decode(line, type=ApexLine)
                except msgspec.DecodeError as error:
                    raise Malformed(f"{self.path}, line {number}: {error}") from None
                yield TraceRow(found.StartTimeOffset / 1e9, max(1, found.ContextTokens), found.GeneratedTokens)

    def _rows(self) -> Iterator[TraceRow]:
        with self.path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            if missing := [name for name in COLUMNS if name not in self._columns(rows)]:
                raise Malformed(f"{self.path}: no column {', '.join(map(repr, missing))}")
            try:
                for row in rows:
                    yield _request(row, f"{self.path}, line {rows.line_num}")
            except csv.Error as error:
                raise Malformed(f"{self.path}, line {rows.line_num + 1}: {error}") from None

    def _columns(self, rows: csv.DictReader[str]) -> Sequence[str]:
        try:
            return rows.fieldnames or ()
        except csv.Error as error:
            raise Malformed(f"{self.path} is no CSV: {error}") from None


def _request(row: dict[str, str], where: str) -> TraceRow:
    try:
        at = float(row["Timestamp"])
        prompt, answer = int(float(row["Request tokens"])), int(float(row["Response tokens"]))
    except (TypeError, ValueError, OverflowError) as error:
        raise Malformed(f"{where}: {error}") from None
    if at < 0 or prompt < 0 or answer < 0 or not math.isfinite(at):
        raise Malformed(f"{where}: a number is negative or not finite")
    lane = LANES.get((row["Log Type"] or "").strip(), "standard")
    return TraceRow(at, max(1, prompt), answer, lane, (row["Model"] or "").strip(), row.get("Session ID") or "")


def cut(
    requests: Iterable[TraceRow], *, begin: float = 0.0, end: float = float("inf"), scale: float = 1.0, longest: int = 0
) -> Iterator[TraceRow]:
    """The requests of [begin, end) seconds, `scale` times as fast, so that the first may come at 0; lengths cut to a
    context of `longest` tokens, the prompt first (0: as they are)."""
    for each in requests:
        if begin <= each.at < end:
            yield _clipped(replace(each, at=(each.at - begin) / scale), longest)


def _clipped(request: TraceRow, longest: int) -> TraceRow:
    if not longest or request.prompt + request.answer <= longest:
        return request
    answer = min(request.answer, longest - 1)
    return replace(request, prompt=min(request.prompt, longest - answer), answer=answer)


DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts: `unit` times a rank drawn with probability proportional to rank^-exponent, ranks up to `most`.

    Cutting the ranks off is the same as drawing again whatever is beyond the cap.
    """

    unit: int
    most: int
    exponent: float = 1.0

    @property
    def mean(self) -> float:
        """Tokens."""
        weights = [math.pow(rank, -self.exponent) for rank in range(1, self.most + 1)]
        return self.unit * sum(rank * weight for rank, weight in enumerate(weights, 1)) / sum(weights)

    def draws(self, chance: random.Random) -> Iterator[int]:
        """For ever."""
        ranks = range(1, self.most + 1)
        weights = list(accumulate(math.pow(rank, -self.exponent) for rank in ranks))
        while True:
            yield from (self.unit * rank for rank in chance.choices(ranks, cum_weights=weights, k=1024))


@dataclass(frozen=True, slots=True)
class Burst:
    """For `length_s` seconds from `at` the rate is `factor` times what it would be, with `ramp_s` up and down."""

    at: float
    length_s: float
    factor: float
    ramp_s: float = 30.0

    def strength(self, at: float) -> float:
        """1 outside, `factor` inside."""
        inside = min(at - self.at, self.at + self.length_s - at)
        if inside <= 0:
            return 1.0
        return 1.0 + (self.factor - 1.0) * (min(1.0, inside / self.ramp_s) if self.ramp_s else 1.0)


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """What a workload looks like. `rate` in conversations (or single calls) a second, in the mean without bursts."""

    rate: float
    cv: float = 1.0
    wave: float = 0.0
    """0: the same all day; 0.6: from 0.4 to 1.6 times the mean, lowest at midnight."""
    bursts: tuple[Burst, ...] = ()
    prompts: Lengths = field(default_factory=lambda: Lengths(16, 256))
    answers: Lengths = field(default_factory=lambda: Lengths(6, 256))
    api: float = 0.3
    """Share of calls by programs, on the standard lane; the others are conversations, on the interactive lane."""
    turns: float = 1.0
    """Of a conversation, in the mean; each brings the earlier ones along in its prompt."""
    think_s: float = 30.0
    """Between the answer (at 25 tokens a second) and the next turn, in the mean."""

    def rate_at(self, at: float) -> float:
        """Conversations a second at second `at` of the day. Bursts that overlap add up."""
        more = sum(burst.strength(at) - 1.0 for burst in self.bursts)
        return self.rate * (1.0 - self.wave * math.cos(2 * math.pi * at / DAY_S)) * (1.0 + more)


READ_TOKENS_S = 25.0


def bursts(chance: random.Random, seconds: float, *, every_s: float, factor: tuple[float, float]) -> tuple[Burst, ...]:
    """Bursts at random times, one every `every_s` seconds in the mean, of 2 to 10 minutes, a factor of this range."""
    found, at = [], chance.expovariate(1 / every_s)
    while at < seconds:
        found.append(Burst(at, chance.uniform(120, 600), chance.uniform(*factor)))
        at += chance.expovariate(1 / every_s)
    return tuple(found)


def arrivals(shape: WorkloadShape, chance: random.Random, seconds: float) -> Iterator[float]:
    """Times at which conversations begin."""
    gap_shape, gap_scale = 1 / shape.cv**2, shape.cv**2
    at, second, rate = 0.0, -1, 0.0
    while True:
        if int(at) != second:  # rates change little within a second
            second, rate = int(at), max(shape.rate_at(at), 1e-9)
        at += chance.gammavariate(gap_shape, gap_scale) / rate
        if at >= seconds:
            return
        yield at


def requests(shape: WorkloadShape, seed: int, seconds: float = DAY_S) -> Iterator[TraceRow]:
    """The requests of so many seconds, by time; the same for the same seed. Later turns of conversations that began
    before the end may come after it."""
    chance = random.Random(seed)  # noqa: S311 - a workload, not a secret
    prompts, answers = shape.prompts.draws(chance), shape.answers.draws(chance)
    later: list[tuple[float, int, TraceRow, int]] = []
    for count, at in enumerate(arrivals(shape, chance, seconds)):
        while later and later[0][0] <= at:
            yield _turn(later, chance, shape, prompts, answers)
        first = TraceRow(at, next(prompts), next(answers), "standard" if chance.random() < shape.api else "interactive")
        turns = _turns(shape, chance) if first.lane == "interactive" else 1
        if turns > 1:
            heapq.heappush(later, (at, count, first, turns))
        else:
            yield first
    while later:
        yield _turn(later, chance, shape, prompts, answers)


def _turns(shape: WorkloadShape, chance: random.Random) -> int:
    """Geometric with the given mean."""
    if shape.turns <= 1:
        return 1
    return 1 + int(math.log(1.0 - chance.random()) / math.log(1.0 - 1.0 / shape.turns))


def _turn(
    later: list[tuple[float, int, TraceRow, int]],
    chance: random.Random,
    shape: WorkloadShape,
    prompts: Iterator[int],
    answers: Iterator[int],
) -> TraceRow:
    """The next turn of those begun; the one after it is put off by reading and thinking."""
    at, count, turn, left = heapq.heappop(later)
    if left > 1:
        again = at + turn.answer / READ_TOKENS_S + chance.expovariate(1 / shape.think_s)
        session = turn.session or f"s{count}"
        prompt = turn.prompt + turn.answer + next(prompts)
        follow = TraceRow(again, prompt, next(answers), turn.lane, turn.model, session)
        heapq.heappush(later, (again, count, follow, left - 1))
        return TraceRow(at, turn.prompt, turn.answer, turn.lane, turn.model, session)
    return turn
