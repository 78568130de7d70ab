"""Clients in a closed loop: each asks, reads to the end, and asks again; what they saw is judged at the end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

from bench.chaos.asks import Ask, ClientView
from bench.chaos.checker import check
from bench.chaos.clients import Clients
from bench.chaos.history import ClientHistory
from bench.elastic.yard import MODEL

READERS = 8
"""Jobs read at the same time, at the end."""


PATIENCE_S = 900.0
"""People here wait for workers that are only started for them."""


class Crowd:
    """`size` sets how many ask; those sent away finish what they read."""

    def __init__(self, folder: Path, port: int, *, tokens: int, priority: str = "interactive") -> None:
        self.history = ClientHistory(folder / "history.jsonl")
        self.clients = Clients(self.history, [port], PATIENCE_S)
        self.told: list[ClientView] = []
        self._tokens, self._priority = tokens, priority
        self._numbers = itertools.count(1)
        self._members: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    def size(self, number: int) -> None:
        """So many from now on."""
        while len(self._members) < number:
            leave = asyncio.Event()
            self._members.append(leave)
            self._tasks.append(asyncio.create_task(self._keep_asking(leave)))
        while len(self._members) > number:
            self._members.pop().set()

    def ask(
        self, words: str = "", tokens: int = 0, *, chat: bool = True
    ) -> tuple[ClientView, asyncio.Task[ClientView]]:
        """One request beside the others."""
        ask = Ask(
            prompt=f"{words} request {next(self._numbers)}".strip(),
            tokens=tokens or self._tokens,
            queue={"priority": self._priority},
            model=MODEL,
            chat=chat,
        )
        told = self.clients.tell(ask)
        self.told.append(told)
        return told, asyncio.create_task(self.clients.run(told))

    async def _keep_asking(self, leave: asyncio.Event) -> None:
        while not leave.is_set():
            await self.ask()[1]

    async def go(self) -> None:
        """Send everybody away and wait for the last."""
        self.size(0)
        await asyncio.gather(*self._tasks)

    async def judged(self) -> dict[str, int]:
        """Requests, and what went wrong with them: broken promises, wrong ends, connections that were cut."""
        gate = asyncio.Semaphore(READERS)

        async def read(job: str) -> None:
            async with gate:
                await self.clients.read_finally(job)

        await asyncio.gather(*(read(told.job) for told in self.told if told.job))
        self.history.close()
        events = self.history.events
        return {
            "requests": len(self.told),
            "not accepted": sum(not told.job for told in self.told),
            "failed": sum(told.state != "completed" for told in self.told),
            "cut": sum(event["event"] in ("cut", "unknown") for event in events),
            "broken promises": len(check(events)),
        }

    def times(self, kind: str, told: Sequence[ClientView]) -> list[float]:
        """When the first event of a kind happened to each of these, in the history's seconds."""
        firsts: dict[int, float] = {}
        for event in self.history.events:
            if event["event"] == kind:
                firsts.setdefault(event["req"], event["t"])
        return [firsts[each.req] for each in told]
