"""Life of each request as its client saw it, out of the history: its events, and how long a fault made it wait."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.chaos import oracle
from bench.chaos.history import Event, of_kind


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise."""

    kind: str
    who: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.who}): {self.detail}"


@dataclass(slots=True)
class Life:
    """Everything that happened to one request, as its client saw it."""

    ask: Event
    job: str = ""
    events: list[Event] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        return oracle.chat(self.ask["prompt"])

    @property
    def name(self) -> str:
        return f"request {self.ask['req']}, {self.job or 'never accepted'}"

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["event"] in kinds]

    def first(self, kind: str) -> float:
        """When an event of this kind came first; infinity if none did."""
        return next((event["t"] for event in self.events if event["event"] == kind), float("inf"))


@dataclass(frozen=True, slots=True)
class Losses:
    """When the store forgot, and what it may have forgotten: everything between the two times of each loss."""

    spans: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, events: Iterable[Event]) -> Losses:
        return cls(tuple((event["since"], event["t"]) for event in of_kind(events, "rollback")))

    def between(self, after: float, before: float) -> int:
        """How often the store forgot something while `after` to `before` passed."""
        return sum(since <= before and after <= until for since, until in self.spans)

    def hold(self, moment: float) -> bool:
        """Whether what was written at this moment may be forgotten."""
        return any(since <= moment <= until for since, until in self.spans)


def lives_of(events: Iterable[Event]) -> dict[int, Life]:
    """Requests by number."""
    lives: dict[int, Life] = {}
    for event in events:
        if event["event"] == "ask":
            lives[event["req"]] = Life(event)
        elif "req" in event:
            life = lives[event["req"]]
            life.events.append(event)
            if event["event"] == "accepted":
                life.job = life.job or event["job"]
    return lives


def stalls_ms(events: Sequence[Event]) -> list[float]:
    """For each fault and each reader that had a token before it and one after it: the longest gap between two tokens
    that reaches beyond the fault and begins before the next one."""
    faults = [event["t"] for event in of_kind(events, "fault")]
    found = []
    for life in lives_of(events).values():
        times = [event["t"] for event in life.of("token")]
        for fault, following in zip(faults, [*faults[1:], float("inf")], strict=False):
            if times and times[0] <= fault < times[-1]:
                found.append(_longest(times, fault, following))
    return sorted(found)


def _longest(times: Sequence[float], fault: float, following: float) -> float:
    gaps = itertools.pairwise(times)
    return max((1000 * (after - before) for before, after in gaps if after > fault and before < following), default=0.0)
