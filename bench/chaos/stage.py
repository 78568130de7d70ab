"""Stage of a fault row: its folder, history and clusters; rows are run within their time limit and judged from it.

A bare server that is asked all the time shows what the machine itself does to an answer: where a shared machine stands
still, everything on it is late, and only what is late beside that server is Penstock's.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.chaos.asks import NOTHING, Ask, Budget
from bench.chaos.checker import check, counts_of, trials_of
from bench.chaos.cluster import PenstockCluster
from bench.chaos.history import ClientHistory, Life, Violation, lives_of, of_kind, stalls_ms
from bench.chaos.http import Cut, fetch
from bench.chaos.processes import ManagedProcess, RedisServer, until
from bench.ports import free_port
from bench.stats import percentile


@dataclass(frozen=True, slots=True)
class FaultRow:
    """One fault. `play` injects it; the history is judged after it. rows.toml has the other fields."""

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
    clusters: int = 0
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

    def waiting(self, reqs: Iterable[int]) -> list[int]:
        """Those of these readers of events whose stream is open now and had no token yet."""
        return [life.ask["req"] for life in self.lives(reqs) if life.of("event") and not life.of("token", "end")]

    def moved(self, reqs: Iterable[int]) -> int:
        """How many of these requests' jobs were begun more than once."""
        lives = lives_of(self.history.events)
        jobs = {lives[req].job for req in reqs}
        return sum(event["job"] in jobs and event["attempts"] > 1 for event in of_kind(self.history.events, "final"))

    def lives(self, reqs: Iterable[int]) -> list[Life]:
        """The lives of these requests."""
        lives = lives_of(self.history.events)
        return [lives[req] for req in reqs]

    def stalled_at_most(self, allowed_ms: float) -> None:
        """A criterion: the 99th percentile of the stalls of all readers."""
        p99 = percentile(stalls_ms(self.history.events), 0.99) or 0.0
        self.must(p99 <= allowed_ms, f"streams waited p99 {p99:.0f} ms, allowed: {allowed_ms:.0f} ms")

    def must(self, holds: bool, why: str) -> None:
        """A criterion of the row beyond the invariants."""
        if not holds:
            self.wrong.append(why)

    @asynccontextmanager
    async def cluster(
        self,
        server: RedisServer | None = None,
        url: str = "",
        *,
        store: Sequence[str] = (),
        store_environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> AsyncIterator[PenstockCluster]:
        """A cluster, ready to be used, on a server of its own unless one is given; emptied and checked at the end.
        `store`: lines of that server's configuration; `store_environ`: variables beside those it has anyway."""
        self.clusters += 1
        folder = self.folder / f"cluster-{self.clusters}"
        folder.mkdir()
        own = None
        if server is None and not url:
            own = server = RedisServer(folder, "redis", *store, environ=store_environ)
            await server.start()
        cluster = PenstockCluster(folder, self.history, url or (server.url if server else ""), **options)
        if server is not None:
            cluster.server = server
        try:
            await cluster.start()
            yield cluster
            await cluster.quiet()
        finally:
            await cluster.close()
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
    """How many were refused, unanswered and broken, in all and at the most in one trial."""
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


async def play_all(
    rows: Sequence[FaultRow], folder: Path, times: float, jobs: int, console: Console
) -> tuple[list[RowOutcome], float]:
    """Outcomes in the order of `rows`, and seconds taken. Rows that measure latency come last, one by one."""
    began = time.monotonic()
    room = asyncio.Semaphore(jobs)

    async def play(row: FaultRow) -> RowOutcome:
        async with room:
            return _told(console, await play_row(row, folder, times), began)

    together = [row for row in rows if not row.alone]
    # The longest first, so that none is left to run by itself at the end.
    together.sort(key=lambda row: -row.limit_s)
    outcomes = list(await asyncio.gather(*(play(row) for row in together)))
    for row in rows:
        if row.alone:
            outcomes.append(await play(row))
    order = {row.id: number for number, row in enumerate(rows)}
    return sorted(outcomes, key=lambda outcome: order[outcome.row.id]), time.monotonic() - began


async def play_row(row: FaultRow, folder: Path, times: float = 1) -> RowOutcome:
    """Play one row and judge it."""
    stage = FaultTestbed(row, folder / row.id, times)
    began = time.monotonic()
    try:
        async with asyncio.timeout(row.limit_s * max(1, times)) as limit:
            await row.play(stage)
    except Exception as error:  # noqa: BLE001 - a row that breaks is a row that failed; the others are still played
        over = f"not over within {row.limit_s * max(1, times):.0f} s"
        stage.wrong.append(over if limit.expired() else f"broke off: {error!r}")
        (stage.folder / "traceback.txt").write_text(traceback.format_exc())
    return await asyncio.to_thread(_judged, stage, time.monotonic() - began)  # other rows' clients go on meanwhile


def _judged(stage: FaultTestbed, seconds: float) -> RowOutcome:
    row = stage.row
    stage.history.close()
    if stage.trials < stage.wanted:
        stage.wrong.append(f"{stage.trials} trials instead of {stage.wanted}; {stage.missed} faults did not bite")
    events = stage.history.events
    each = [counts_of(trial) for trial in trials_of(events)]
    return RowOutcome(
        row=row,
        trials=stage.trials,
        missed=stage.missed,
        violations=check(
            events,
            resets_allowed=row.resets_allowed,
            budget=row.budget,
            clusters=stage.clusters,
        ),
        answers={
            "refused": len(of_kind(events, "refused", "answered")),
            "unanswered": len(of_kind(events, "unknown")),
            "broken": len(of_kind(events, "cut")),
            **{f"most_{kind}_in_a_trial": max(counts[kind] for counts in each) for kind in each[0]},
        },
        wrong=stage.wrong,
        stalls=stalls_ms(events),
        lease_ms=stage.lease_ms,
        figures=stage.figures,
        seconds=seconds,
        folder=stage.folder,
    )


def _told(console: Console, outcome: RowOutcome, began: float) -> RowOutcome:
    verdict = "[green]pass[/]" if outcome.passed else "[red]FAIL[/]"
    elapsed = time.monotonic() - began
    console.print(f"{elapsed:5.0f} s  {outcome.row.id:5} {verdict}  {outcome.row.title} ({outcome.seconds:.0f} s)")
    return outcome


PROBE_INTERVAL_S = 0.04
PASSES = 2
"""An answer of ours passes several processes, each of which may be made to wait; a bare one passes its server."""


@asynccontextmanager
async def bare_server(stage: FaultTestbed, *, refuses: bool = True) -> AsyncIterator[int]:
    """The port of a server that refuses every request at once, or grants it on a connection that stays."""
    port, how = free_port(), ["refuse"] if refuses else []
    argv = [sys.executable, "-m", "bench.bare_server", str(port), *how]
    child = ManagedProcess(f"bare-{port}", argv, dict(os.environ), stage.folder)

    async def answers() -> bool:
        with suppress(Cut):
            await bare_answer(port)
            return True
        return False

    await child.start()
    try:
        await until(answers, 10.0, 0.05)
        yield port
    finally:
        await child.end()


async def bare_answer(port: int) -> float:
    """Ask the bare server once. Returns the seconds it took. Raises Cut."""
    began, ask = time.monotonic(), Ask("bare", 1)
    await fetch(port, "POST", ask.path, ask.body)
    return time.monotonic() - began


@asynccontextmanager
async def yardstick(stage: FaultTestbed, interval_s: float = PROBE_INTERVAL_S) -> AsyncIterator[list[float]]:
    """How long a bare server's answers took so far, asked at even intervals; milliseconds. Clear it to begin anew. If
    this process stands still, what was due meanwhile is asked at once, as a row that offers a load does."""
    took: list[float] = []

    async def ask(port: int) -> None:
        with suppress(Cut):
            took.append(1000 * await bare_answer(port))

    async def go_on(port: int) -> None:
        async with asyncio.TaskGroup() as asking:
            due = time.monotonic()
            while True:
                asking.create_task(ask(port))
                due += interval_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async with bare_server(stage) as port:
        asked = asyncio.create_task(go_on(port))
        try:
            yield took
        finally:
            asked.cancel()
            await asyncio.wait([asked])
