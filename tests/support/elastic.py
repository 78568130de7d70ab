"""A deployment under `penstock up` whose pools grow and shrink, and closed-loop clients that keep what they see."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path

from bench.chaos.asks import Ask, ClientView
from bench.chaos.checker import check
from bench.chaos.clients import Clients
from bench.chaos.history import ClientHistory
from bench.chaos.processes import until
from bench.penstock import PenstockUp
from streaming.fleet.plans import Noted, Overrides, Plan, Plans
from streaming.fleet.process import Process
from streaming.fleet.processes import Fleet
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

MODEL = "show"
WAIT_TIMEOUT_S = 120.0
CLIENT_TIMEOUT_S = 900.0
"""Clients wait for workers that are only started for them."""


class ElasticTestbed:
    """`async with ElasticTestbed(folder, model, settings) as testbed:` is up and ready until the end of it.

    `model` are the model's own settings, `settings` those of the sections, by `section.key`.
    """

    def __init__(self, folder: Path, model: Mapping[str, object], settings: Mapping[str, object]) -> None:
        folder.mkdir(parents=True)
        rows = [f"[models.{MODEL}]", 'engine = "sim"', *(f"{key} = {value}" for key, value in model.items())]
        (folder / "penstock.toml").write_text("\n".join([*rows, ""]))
        self._up = PenstockUp(folder, settings=settings)

    async def __aenter__(self) -> ElasticTestbed:
        await asyncio.to_thread(self._up.__enter__)
        self.port = self._up.port
        self.wire = RedisClient.open(RedisSettings(url=self._up.state()["redis_url"]))
        self.fleet, self.plans = Fleet(self.wire), Plans(self.wire)
        self.overrides = Overrides(self.wire)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.wire.close()
        await asyncio.to_thread(self._up.close)

    async def now_s(self) -> float:
        """Redis time."""
        return await self.wire.now_ms() / 1000

    async def workers(self) -> list[Process]:
        """Those that are ready."""
        return [process for process in await self.fleet.processes("worker") if process.state == "ready"]

    async def plan(self) -> Plan | None:
        return (await self.plans.read()).get(MODEL)

    async def actions(self, after_s: float, kind: str) -> list[Noted]:
        """Oldest first, from a moment of Redis time on."""
        found = reversed(await self.plans.actions(1000))
        return [noted for noted in found if noted.at_ms >= 1000 * after_s and noted.action.kind == kind]

    async def settled(self, ready: int) -> None:
        """Until so many workers are ready and no other is there. Raises TimeoutError."""

        async def is_so() -> bool:
            workers = await self.fleet.processes("worker")
            return len(workers) == ready and all(worker.state == "ready" for worker in workers)

        await until(is_so, WAIT_TIMEOUT_S)


class Crowd:
    """`size` sets how many ask; those sent away finish what they read."""

    def __init__(self, folder: Path, port: int, *, tokens: int) -> None:
        self.history = ClientHistory(folder / "history.jsonl")
        self.clients = Clients(self.history, [port], CLIENT_TIMEOUT_S)
        self.told: list[ClientView] = []
        self._tokens, self._numbers = tokens, itertools.count(1)
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

    async def ask(self, *, chat: bool = True) -> None:
        """One request, to the end it is told."""
        queue = {"priority": "interactive"}
        ask = Ask(f"request {next(self._numbers)}", self._tokens, queue=queue, model=MODEL, chat=chat)
        self.told.append(self.clients.tell(ask))
        await self.clients.run(self.told[-1])

    async def _keep_asking(self, leave: asyncio.Event) -> None:
        while not leave.is_set():
            await self.ask()

    async def go(self) -> None:
        """Send everybody away and wait for the last."""
        self.size(0)
        await asyncio.gather(*self._tasks)

    async def judged(self) -> dict[str, int]:
        """Requests, and what went wrong with them: broken promises, wrong ends, connections that were cut."""
        await asyncio.gather(*(self.clients.read_finally(told.job) for told in self.told if told.job))
        self.history.close()
        events = self.history.events
        return {
            "requests": len(self.told),
            "not accepted": sum(not told.job for told in self.told),
            "failed": sum(told.state != "completed" for told in self.told),
            "cut": sum(event["event"] in ("cut", "unknown") for event in events),
            "broken promises": len(check(events)),
        }
