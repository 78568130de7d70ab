"""Deployment under `penstock up` for one demonstration, and its closed-loop clients."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.chaos.asks import Ask, ClientView
from bench.chaos.checker import check
from bench.chaos.clients import Clients
from bench.chaos.history import ClientHistory
from bench.chaos.processes import until
from bench.penstock import own_environ, variables
from bench.processes import Processes
from streaming.fleet.plans import Action, Lead, Leadership, Noted, Overrides, Plan, Plans
from streaming.fleet.process import Process
from streaming.fleet.processes import Fleet
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

MODEL = "show"
WAIT_TIMEOUT_S = 120.0
ACTIONS = 1000


class ElasticTestbed:
    """`async with ElasticTestbed(folder, models, settings) as testbed:` is up and ready until the end of it.

    `model` are the model's own settings, `settings` those of the sections, by `section.key`.
    """

    def __init__(self, folder: Path, model: Mapping[str, object], settings: Mapping[str, object]) -> None:
        folder.mkdir(parents=True)
        self.folder, self._data = folder, folder / "data"
        rows = [f"[models.{MODEL}]", 'engine = "sim"', *(f"{key} = {value}" for key, value in model.items())]
        (folder / "penstock.toml").write_text("\n".join([*rows, ""]))
        self.processes = Processes(folder, own_environ() | variables(settings))

    async def __aenter__(self) -> ElasticTestbed:
        argv: list[str | Path] = [sys.executable, "-P", "-m", "cli", "up", "--port", "0", "--data-dir", self._data]
        self.processes.start("up", argv)
        try:
            await asyncio.to_thread(self.processes.until, self._is_ready, "penstock up to be ready", WAIT_TIMEOUT_S)
            state = self._state()
            self.port = int(state["url"].rpartition(":")[2])
            self.wire = RedisClient.open(RedisSettings(url=state["redis_url"]))
        except BaseException:
            await asyncio.to_thread(self.processes.close)
            raise
        self.fleet, self.plans = Fleet(self.wire), Plans(self.wire)
        self.leadership, self.overrides = Leadership(self.wire), Overrides(self.wire)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.wire.close()
        await asyncio.to_thread(self.processes.close)

    def _is_ready(self) -> bool:
        return (self._data / "run" / "state.json").exists() and self._state()["state"] == "ready"

    def _state(self) -> dict[str, Any]:
        return dict(msgspec.json.decode((self._data / "run" / "state.json").read_bytes()))

    # --- looking -----------------------------------------------------------------------------------------------------

    async def now_s(self) -> float:
        """Redis time."""
        return await self.wire.now_ms() / 1000

    async def workers(self) -> list[Process]:
        """Those that are ready."""
        return [process for process in await self.fleet.processes("worker") if process.state == "ready"]

    async def plan(self) -> Plan | None:
        return (await self.plans.read()).get(MODEL)

    async def actions(self, after_s: float = 0.0, *kinds: str) -> list[Noted]:
        """Oldest first, from a moment of Redis time on."""
        found = reversed(await self.plans.actions(ACTIONS))
        return [noted for noted in found if noted.at_ms >= 1000 * after_s and (not kinds or noted.action.kind in kinds)]

    async def first(self, after_s: float, kind: str) -> Noted:
        """The first action of a kind from a moment on. Raises TimeoutError."""
        found: list[Noted] = []

        async def there() -> bool:
            found[:] = await self.actions(after_s, kind)
            return bool(found)

        await until(there, WAIT_TIMEOUT_S)
        return found[0]

    async def settled(self, ready: int) -> None:
        """Until so many workers are ready and no other is there. Raises TimeoutError."""

        async def is_so() -> bool:
            workers = await self.fleet.processes("worker")
            return len(workers) == ready and all(worker.state == "ready" for worker in workers)

        await until(is_so, WAIT_TIMEOUT_S)

    # --- schedulers --------------------------------------------------------------------------------------------------

    def start_scheduler(self, name: str) -> None:
        """One more, beside the one that `up` keeps."""
        settings = self._data / "run" / "settings.json"
        self.processes.start(name, [sys.executable, "-P", "-m", "scheduler", "--settings", settings, "--id", name])

    async def leader(self) -> tuple[Lead, int]:
        """Whoever leads, and its process id. Raises TimeoutError."""
        found: list[Lead] = []

        async def leads() -> bool:
            lead = await self.leadership.current()
            found[:] = [lead] if lead.holder else []
            return bool(found)

        await until(leads, WAIT_TIMEOUT_S)
        return found[0], int(found[0].holder.rpartition(":")[2])


def stale(actions: list[Noted]) -> list[Action]:
    """Actions under an epoch older than one that was there before them."""
    found, newest = [], 0
    for noted in actions:
        if noted.epoch < newest:
            found.append(noted.action)
        newest = max(newest, noted.epoch)
    return found


READERS = 8
"""Jobs read at the same time, at the end."""


CLIENT_TIMEOUT_S = 900.0
"""People here wait for workers that are only started for them."""


class Crowd:
    """`size` sets how many ask; those sent away finish what they read."""

    def __init__(self, folder: Path, port: int, *, tokens: int, priority: str = "interactive") -> None:
        self.history = ClientHistory(folder / "history.jsonl")
        self.clients = Clients(self.history, [port], CLIENT_TIMEOUT_S)
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
