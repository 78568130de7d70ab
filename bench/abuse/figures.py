"""TTFT of a short chat, alone and beside large requests, as rows and as figures with their goal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.report import Column, Ratio

MAX_RATIO = 3.0

COLUMNS = (
    Column("tree", "tree"),
    Column("slots", "slots"),
    Column("bodies", "large requests"),
    Column("choices", "choices of each"),
    Column("alone_ms", "TTFT alone: median, ms", 0),
    Column("beside_ms", "beside: median, ms", 0),
    Column("worst_ms", "longest, ms", 0),
    Column("ratio", "beside / alone", 2),
    Column("late", "chats past the limit"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """What the chat is measured beside."""

    slots: int
    choices: int
    bodies: int = 1

    @property
    def words(self) -> str:
        """For people."""
        what = "one request" if self.bodies == 1 else f"{self.bodies} requests"
        return f"{self.slots} slots, beside {what} of {self.choices:,} choices"


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds to the first token; None where it did not come in time."""

    alone: Sequence[float | None]
    beside: Sequence[float | None]


def row_of(tree: str, case: Case, rounds: Sequence[Round], limit_s: float) -> dict[str, Any]:
    """All rounds of one case. A chat whose first token did not come in time counts as late as the limit: the figure is
    then a lower bound."""
    ratios = ratios_of(rounds, limit_s)
    alone = [_s(each, limit_s) for one in rounds for each in one.alone]
    beside = [_s(each, limit_s) for one in rounds for each in one.beside]
    return {
        "tree": tree,
        "slots": case.slots,
        "bodies": case.bodies,
        "choices": case.choices,
        "alone_ms": 1e3 * median(alone),
        "beside_ms": 1e3 * median(beside),
        "worst_ms": 1e3 * max(beside),
        "ratio": median(ratios),
        "ratios": ratios,
        "late": sum(each is None for one in rounds for each in (*one.alone, *one.beside)),
    }


def goal_of(case: Case, rounds: Sequence[Round], limit_s: float) -> Ratio:
    """Beside one request the median of the rounds' ratios is judged; beside several it is only shown."""
    ratios = ratios_of(rounds, limit_s)
    return Ratio(
        what=f"{case.words}: TTFT over that of the chat alone",
        value=median(ratios),
        at_most=MAX_RATIO if case.bodies == 1 else None,
        rounds=tuple(ratios),
    )


def ratios_of(rounds: Sequence[Round], limit_s: float) -> list[float]:
    """Of each round: the median beside over the median alone."""
    return [_median_s(each.beside, limit_s) / _median_s(each.alone, limit_s) for each in rounds]


def _median_s(times: Sequence[float | None], limit_s: float) -> float:
    return median(_s(each, limit_s) for each in times)


def _s(seconds: float | None, limit_s: float) -> float:
    return limit_s if seconds is None else seconds
