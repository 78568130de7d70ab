"""Requests of the part `replay`, with Gamma gaps and lengths by Zipf's law.

Gaps are Gamma with shape 1/cv^2 and scale cv^2/rate: mean 1/rate, coefficient of variation cv.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate

from planner.simulator.trace import TraceRow

MAX_RANK = 256
PROMPT_UNIT, ANSWER_UNIT = 16, 6
"""Tokens of a generated request: so many times a rank up to MAX_RANK, drawn with a probability of 1 / rank (Zipf)."""
API_SHARE = 0.3
"""Of generated calls, those by programs, on the standard lane; the others are conversations, on lane interactive."""


def arrivals(rate: float, cv: float, chance: random.Random, seconds: float) -> Iterator[float]:
    """Times at which `rate` requests a second come, in the mean."""
    at = 0.0
    while (at := at + chance.gammavariate(1 / cv**2, cv**2) / rate) < seconds:
        yield at


def requests(rate: float, cv: float, seed: int, seconds: float) -> Iterator[TraceRow]:
    """The requests of so many seconds, by time; the same for the same seed."""
    chance = random.Random(seed)  # noqa: S311 - a workload, not a secret
    prompts, answers = _ranks(chance), _ranks(chance)
    for at in arrivals(rate, cv, chance, seconds):
        prompt, answer = PROMPT_UNIT * next(prompts), ANSWER_UNIT * next(answers)
        yield TraceRow(at, prompt, answer, "standard" if chance.random() < API_SHARE else "interactive")


def _ranks(chance: random.Random) -> Iterator[int]:
    """For ever."""
    ranks = range(1, MAX_RANK + 1)
    weights = list(accumulate(1 / rank for rank in ranks))
    while True:
        yield from chance.choices(ranks, cum_weights=weights, k=1024)
