"""What rows stand on: a folder, a history, houses, and the list of what was wrong. One stage per row."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.chaos.budget import NOTHING, Budget
from bench.chaos.checker import Violation, lives_of
from bench.chaos.history import ClientHistory, of_kind
from bench.chaos.house import House
from bench.chaos.servers import RedisServer


@dataclass(frozen=True, slots=True)
class FaultRow:
    """One fault. `play` injects it; the history is judged after it."""

    id: str
    title: str
    inject: str
    trials: int
    """Faults injected, each with open streams or jobs that are judged."""
    play: Callable[[FaultTestbed], Awaitable[None]]
    limit_s: float
    alone: bool = False
    """It measures latency: nothing runs beside it."""
    resets_allowed: bool = False
    """The store loses data: a reader may be told stream.reset, for that loss."""
    proves: str = ""
    """In one sentence, what a passed row shows."""
    budget: Budget = NOTHING
    short: int = 2
    """Trials of the short form."""

    @property
    def most_missed(self) -> int:
        """So many trials whose fault did not bite are repeated; more fail the row."""
        return max(3, self.trials // 2)


@dataclass
class FaultTestbed:
    """`trials` counts faults really injected; `wrong` says which criteria of the row did not hold."""

    row: FaultRow
    folder: Path
    times: float = 1
    """Trials are multiplied by this in a long run. 0: the short form."""
    trials: int = 0
    missed: int = 0
    """Faults that did not bite."""
    wrong: list[str] = field(default_factory=list)
    figures: dict[str, float | str] = field(default_factory=dict)
    """What else was measured."""
    lease_ms: int = 1000
    houses: int = 0
    """Opened so far; each says in the end what it still holds."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.history = ClientHistory(self.folder / "history.jsonl")
        self.rng = random.Random(self.row.id)  # noqa: S311 - the same faults in every run

    @property
    def wanted(self) -> int:
        """Trials to make."""
        return int(self.row.trials * self.times) or min(self.row.short, self.row.trials)

    @property
    def short(self) -> bool:
        return not self.times

    def tries(self) -> Iterator[int]:
        """Numbers of trials, until enough of them counted or too many did not."""
        number = 0
        while self.trials < self.wanted and self.missed <= self.row.most_missed:
            yield number
            number += 1

    def fault(self, what: str) -> None:
        """It is injected now."""
        self.trials += 1
        self.history.add("fault", trial=self.trials, what=what)

    def bit(self, did: object, why_not: str) -> None:
        """Whether the last fault bit. If not, its trial does not count, and another one takes its place."""
        if not did:
            self.trials -= 1
            self.missed += 1
            self.history.add("missed", trial=self.trials + 1, why=why_not)

    def across(self, reqs: Iterable[int]) -> int:
        """How many of these readers had a token before the last fault and were told something after it."""
        fault = of_kind(self.history.events, "fault")[-1]["t"]
        lives, found = lives_of(self.history.events), 0
        for req in reqs:
            times = [event["t"] for event in lives[req].of("token", "end", "reset")]
            found += bool(times) and times[0] <= fault < times[-1]
        return found

    def moved(self, reqs: Iterable[int]) -> int:
        """How many of these requests' jobs were begun more than once."""
        lives = lives_of(self.history.events)
        jobs = {lives[req].job for req in reqs}
        return sum(event["job"] in jobs and event["attempts"] > 1 for event in of_kind(self.history.events, "final"))

    def must(self, holds: bool, why: str) -> None:
        """A criterion of the row beyond the invariants."""
        if not holds:
            self.wrong.append(why)

    @asynccontextmanager
    async def house(self, server: RedisServer | None = None, url: str = "", **options: Any) -> AsyncIterator[House]:
        """A house, ready to be used, on a server of its own unless one is given; emptied and checked at the end."""
        self.houses += 1
        folder = self.folder / f"house-{self.houses}"
        folder.mkdir()
        own = None
        if server is None and not url:
            own = server = RedisServer(folder)
            await server.start()
        house = House(folder, self.history, url or (server.url if server else ""), **options)
        try:
            await house.start()
            yield house
            await house.quiet()
        finally:
            await house.close()
            if own is not None:
                await own.child.end()


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What came of a row."""

    row: FaultRow
    trials: int
    missed: int
    violations: list[Violation]
    answers: dict[str, int]
    """How many were refused, unanswered and broken."""
    wrong: list[str]
    stalls: list[float]
    lease_ms: int
    figures: dict[str, float | str]
    seconds: float
    folder: Path

    @property
    def passed(self) -> bool:
        return not self.violations and not self.wrong

    def count(self, kinds: frozenset[str]) -> int:
        return sum(violation.kind in kinds for violation in self.violations)
