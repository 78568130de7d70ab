"""What rows stand on: a folder, a history, houses, and the list of what was wrong. One stage per row."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.chaos.checker import Violation
from bench.chaos.history import History
from bench.chaos.house import House
from bench.chaos.servers import Server


@dataclass(frozen=True, slots=True)
class Row:
    """One fault. `play` injects it; the history is judged after it."""

    id: str
    title: str
    inject: str
    trials: int
    """Faults injected, each with open streams or jobs that are judged."""
    play: Callable[[Stage], Awaitable[None]]
    limit_s: float
    alone: bool = False
    """It measures latency: nothing runs beside it."""
    resets_allowed: bool = False


@dataclass
class Stage:
    """`trials` counts faults really injected; `wrong` says which criteria of the row did not hold."""

    row: Row
    folder: Path
    times: int = 1
    """Trials are multiplied by this in a long run."""
    trials: int = 0
    wrong: list[str] = field(default_factory=list)
    figures: dict[str, float | str] = field(default_factory=dict)
    """What else was measured."""
    stalls_x: dict[str, float] = field(default_factory=dict)
    lease_ms: int = 1000

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.history = History(self.folder / "history.jsonl")
        self.rng = random.Random(self.row.id)  # noqa: S311 - the same faults in every run
        self._houses = 0

    @property
    def wanted(self) -> int:
        """Trials to make."""
        return self.row.trials * self.times

    def fault(self, what: str) -> None:
        """It is injected now."""
        self.trials += 1
        self.history.add("fault", trial=self.trials, what=what)

    def must(self, holds: bool, why: str) -> None:
        """A criterion of the row beyond the invariants."""
        if not holds:
            self.wrong.append(why)

    @asynccontextmanager
    async def house(self, server: Server | None = None, url: str = "", **options: Any) -> AsyncIterator[House]:
        """A house, ready to be used, on a server of its own unless one is given; emptied and checked at the end."""
        self._houses += 1
        folder = self.folder / f"house-{self._houses}"
        folder.mkdir()
        own = None
        if server is None and not url:
            own = server = Server(folder)
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
class Outcome:
    """What came of a row."""

    row: Row
    trials: int
    violations: list[Violation]
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
