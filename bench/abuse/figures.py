"""TTFT of a short chat, alone and beside large requests, as rows and as figures with their goal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.report import Ratio, columns

COLUMNS = columns("""
    tree: tree; slots: slots; kv_tokens: KV cache, tokens; bodies: large requests; choices: choices of each;
    lane: their lane; running: of them running; alone_ms: TTFT alone: median, ms .0;
    arrival_ms: as they arrive: median, ms .0; beside_ms: beside: median, ms .0; worst_ms: longest, ms .0;
    ratio: beside / alone .2; late: chats past the limit
""")


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """What the simulated engine charges: see section [sim] of docs/configuration.md."""

    step_ms: float
    step_ms_per_text: float
    prefill_ms_per_1k_tokens: float
    prefill_batch: int
    prefill_ms: float = 0.0


LLAMACPP = EngineCosts(step_ms=4.3, step_ms_per_text=2.4, prefill_ms_per_1k_tokens=1200, prefill_batch=128)
"""The embedded engine with the default model at Q8_0 on two cores, prompts of 99 tokens: a token takes 6.7 ms alone and
23.2 ms beside seven others, and the first one comes after 124 ms."""
GPU = EngineCosts(step_ms=15, step_ms_per_text=0.1, prefill_ms_per_1k_tokens=40, prefill_batch=8192)
"""Assumed, not measured: 25,000 prompt tokens a second, and at 128 texts 4,600 tokens a second."""


@dataclass(frozen=True, slots=True)
class Case:
    """What the chat is measured beside. `kv_tokens`: that the engine's cache holds; 0: as many as its slots need."""

    slots: int
    choices: int
    bodies: int = 1
    lane: str = "interactive"
    """Of the large requests; the chat's is interactive."""
    kv_tokens: int = 0
    engine: EngineCosts = GPU

    def running(self, context: int) -> int:
        """Choices of one request, each as large as the context, that a worker gives its engine at the same time: half
        of the slots, or half of the cache."""
        most = self.slots // 2
        if self.kv_tokens:
            most = min(most, self.kv_tokens // 2 // context)
        return min(self.choices, max(1, most))

    @property
    def words(self) -> str:
        """For people."""
        what = "one request" if self.bodies == 1 else f"{self.bodies} requests"
        cache = f", {self.kv_tokens:,} tokens of cache" if self.kv_tokens else ""
        lane = "" if self.lane == "interactive" else f" in lane {self.lane}"
        return f"{self.slots} slots{cache}, beside {what} of {self.choices:,} choices{lane}"


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds to the first token; None where it did not come in time."""

    alone: Sequence[float | None]
    beside: Sequence[float | None]
    arrival: float | None = None
    """Of a chat that was sent once the large requests were accepted, and before they had a token."""
    running: int = 0
    """Choices of the first large request that had a token when the chats beside it began."""


def row_of(tree: str, case: Case, rounds: Sequence[Round], limit_s: float) -> dict[str, Any]:
    """All rounds of one case. A chat whose first token did not come in time counts as late as the limit: the figure is
    then a lower bound."""
    ratios = ratios_of(rounds, limit_s)
    alone = [_s(each, limit_s) for one in rounds for each in one.alone]
    beside = [_s(each, limit_s) for one in rounds for each in one.beside]
    return {
        "tree": tree,
        "slots": case.slots,
        "kv_tokens": case.kv_tokens or None,
        "bodies": case.bodies,
        "choices": case.choices,
        "lane": case.lane,
        "running": min(each.running for each in rounds) if case.bodies == 1 else None,
        "alone_ms": 1e3 * median(alone),
        "arrival_ms": 1e3 * median(_s(each.arrival, limit_s) for each in rounds),
        "beside_ms": 1e3 * median(beside),
        "worst_ms": 1e3 * max(beside),
        "ratio": median(ratios),
        "ratios": ratios,
        "late": sum(each is None for one in rounds for each in (*one.alone, one.arrival, *one.beside)),
    }


def goals_of(case: Case, rounds: Sequence[Round], limit_s: float) -> list[Ratio]:
    """Beside one request the median of the rounds' ratios is judged; beside several it is only shown, and so are the
    latest of all chats and the one that came as the large requests did."""
    ratios = ratios_of(rounds, limit_s)
    alone = [_median_s(each.alone, limit_s) for each in rounds]
    worst = max(_s(time, limit_s) / base for one, base in zip(rounds, alone, strict=True) for time in one.beside)
    arrivals = [_s(each.arrival, limit_s) / base for each, base in zip(rounds, alone, strict=True)]
    return [
        Ratio.held(
            "abuse.chat" if case.bodies == 1 else None,
            what=f"{case.words}: TTFT over that of the chat alone",
            value=median(ratios),
            rounds=tuple(ratios),
        ),
        Ratio(what=f"{case.words}: the latest of all chats over alone", value=worst),
        Ratio(what=f"{case.words}: TTFT as it arrives over alone", value=median(arrivals), rounds=tuple(arrivals)),
    ]


def ratios_of(rounds: Sequence[Round], limit_s: float) -> list[float]:
    """Of each round: the median beside over the median alone."""
    return [_median_s(each.beside, limit_s) / _median_s(each.alone, limit_s) for each in rounds]


def _median_s(times: Sequence[float | None], limit_s: float) -> float:
    return median(_s(each, limit_s) for each in times)


def _s(seconds: float | None, limit_s: float) -> float:
    return limit_s if seconds is None else seconds
