"""Load of `penstock tune`: requests of given lengths to a server, in a closed loop or at a rate, with their times."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import count
from statistics import fmean
from typing import Any, TypeAlias, TypeVar

from bench.energy import EnergyMeter, used
from bench.load.prompts import PromptSource
from bench.table1.client import HttpConnection, NotAServer, TargetServer, TimedAnswer, ask, closed_loop, seen
from cli.client import KEY, Client
from cli.options import Where
from cli.output import Problem, note
from planner.load import RequestLengths
from planner.tuning import LevelReading, SweepLevel

SEED = 1
TIMEOUT_S = 600.0
"""Of one request."""
MAX_OPEN = 1024
"""Requests at once of a rate; more are counted as failed."""
MAX_FAILED = 0.1
"""Share of failed requests from which a measurement counts for nothing."""

NO_METER = EnergyMeter(dict, "")

T = TypeVar("T")


def run_until(until: float, task: Coroutine[Any, Any, T]) -> T | None:
    """Run it, or give it up at a moment of time.monotonic(): then None."""

    async def in_time() -> T:
        async with asyncio.timeout(until - time.monotonic()):
            return await task

    try:
        return asyncio.run(in_time())
    except TimeoutError:
        return None


def server_at(where: Where, model: str | None) -> tuple[str, TargetServer]:
    """The server of --url, else the Penstock that other commands would ask, by its base URL; with the first of its
    models unless one is named. Raises Problem."""
    url, key = where.url, os.environ.get(KEY, "")
    if url is None:
        with Client.find(replace(where, url=os.environ.get("PENSTOCK_URL"))) as client:
            url, key = f"{client.url}/v1", client.key
    note(f"asking {url} for its model")
    try:
        server = TargetServer.at(url, model or "", key)
        return url, server if server.model else replace(server, model=server.first_model())
    except NotAServer as error:
        raise Problem(str(error), code="usage") from None
    except OSError as error:
        raise Problem(
            f"nothing answers at {url}", cause=str(error), next_step="penstock up, or another --url", code="unreachable"
        ) from None


def penstock_context(server: TargetServer) -> int | None:
    """The context that a Penstock tells of its model, 0 if it tells none; None: it is no Penstock."""
    try:
        models = next(server.get([f"{server.path}/models"]))["data"]
        mine = [each for each in models if each.get("id") == server.model and each.get("owned_by") == "penstock"]
        return int(mine[0].get("context_length") or 0) if mine else None
    except (NotAServer, OSError, LookupError, TypeError, ValueError, AttributeError):
        return None


Told: TypeAlias = Callable[[int, int], None]
"""Is told the number of answers, of how many."""


def untold(_: int, __: int) -> None:
    """Tells nobody."""


class LoadSource:
    """Requests of one length mix to one server. Each prompt begins differently, so that no cached prefix answers it."""

    def __init__(
        self,
        server: TargetServer,
        lengths: RequestLengths,
        timeout_s: float,
        meter: EnergyMeter = NO_METER,
    ) -> None:
        """`timeout_s`: of a request, at most TIMEOUT_S; a server that hangs must not outlast the budget by far."""
        self.server, self.lengths, self.meter = server, lengths, meter
        self._timeout_s = min(TIMEOUT_S, timeout_s)
        self._prompts = PromptSource(server, lengths, SEED)
        self._random = random.Random(SEED)  # noqa: S311 - a workload
        self._fields: dict[str, object] = {"temperature": 0, "ignore_eos": True}

    async def probe(self, clients: int) -> float:
        """Mean seconds of a request, of `clients` at once. Raises Problem if they fail.

        A server that refuses the field `ignore_eos` gets requests without it, whose answers may end early.
        """
        found = await self.level(SweepLevel(clients, clients))
        if "ignore_eos" in self._fields and "status 4" in found.fault:
            del self._fields["ignore_eos"]
            found = await self.level(SweepLevel(clients, clients))
        check(found)
        return found.latency_s

    async def level(self, level: SweepLevel, told: Told = untold) -> LevelReading:
        """So many clients, each asking again as soon as it is answered."""
        bodies, before, answered = self._bodies(level.requests), self.meter.read(), count(1)
        told(0, len(bodies))
        seen_ = await closed_loop(
            self.server, level.clients, bodies, self._timeout_s, lambda: told(next(answered), len(bodies))
        )
        reading = _reading(level.clients, seen_.asked, seen_.answers, seen_.seconds)
        return replace(reading, joules=used(before, self.meter.read()))

    async def at_rate(self, rate: float, requests: int, told: Told = untold) -> LevelReading:
        """Requests with exponential gaps, whether or not earlier ones are answered."""
        open_, idle, answers = 0, list[HttpConnection](), list[TimedAnswer]()
        due = began = time.monotonic()

        async def one(body: bytes) -> None:
            nonlocal open_
            if open_ >= MAX_OPEN:
                answers.append(TimedAnswer(time.monotonic(), [], 0, "too many requests at once"))
                return
            open_ += 1
            line = idle.pop() if idle else HttpConnection(self.server)
            answer = await ask(line, body, 0, self._timeout_s)
            open_ -= 1
            line.close() if answer.fault else idle.append(line)
            answers.append(seen(answer))
            told(len(answers), requests)

        async with asyncio.TaskGroup() as tasks:
            for body in self._bodies(requests):
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.create_task(one(body))
                due += self._random.expovariate(rate)
        for line in idle:
            line.close()
        return _reading(0, requests, answers, time.monotonic() - began)

    def _bodies(self, count: int) -> list[bytes]:
        return self._prompts.bodies(count, self._fields)


def check(found: LevelReading) -> None:
    """Raises Problem if too many requests failed."""
    if found.failed > MAX_FAILED * found.requests:
        raise Problem(
            f"{found.failed} of {found.requests} requests failed",
            cause=found.fault,
            next_step="see the log of the server; --url is the base URL of OpenAI's API",
        )


def _reading(clients: int, asked: int, answers: Sequence[TimedAnswer], seconds: float) -> LevelReading:
    good = [answer for answer in answers if not answer.fault]
    latency = fmean(answer.times[-1] - answer.sent for answer in good) if good else 0.0
    tokens = sum(answer.tokens for answer in good)
    fault = next((answer.fault for answer in answers if answer.fault), "")
    return LevelReading(
        clients, asked, asked - len(good), tokens / seconds, len(good) / seconds, latency, seconds, good, fault
    )
