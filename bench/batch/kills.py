"""Kill -9 of Celery workers and engine workers at random while a batch runs, and of Celery's messages one by one."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.batch.client import BatchClient, BatchVerdict, InputLine, judge, write
from bench.chaos.processes import ManagedProcess, RedisServer, until
from bench.penstock import own_environ
from bench.ports import free_port
from streaming.batches.store import Batches, DueNotice
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

TOKENS = 24
BATCH_TIMEOUT_S = 900.0
WAIT_TIMEOUT_S = 10.0

ENVIRON = {
    "PENSTOCK_SIM_STEP_MS": "15",
    "PENSTOCK_SIM_SLOTS": "8",
    # Workers are killed for no fault of the lines: none of them may be taken for a killer.
    "PENSTOCK_REDIS_MAX_ATTEMPTS": "1000",
    "PENSTOCK_TELEMETRY_LOG_LEVEL": "info",
}


class Killed(msgspec.Struct, frozen=True):
    """What came of it."""

    lines: int
    kills: dict[str, int]
    """By role."""
    verdict: BatchVerdict
    tokens: int
    """Counted by the batch."""
    tokens_asked: int
    seconds: float
    turns: int


class KillCluster:
    """Two of each kind of worker, an API process, a scheduler; each is started again whenever it ends."""

    def __init__(self, folder: Path, lease_ms: int, **environ: str) -> None:
        self.folder, self.server = folder, RedisServer(folder)
        self.port = free_port()
        self.environ = {
            **own_environ(),
            **ENVIRON,
            "PENSTOCK_REDIS_URL": self.server.url,
            "PENSTOCK_REDIS_LEASE_MS": str(lease_ms),
            "PENSTOCK_API_PORT": str(self.port),
            **environ,
        }
        self.wire = RedisClient.open(RedisSettings(url=self.server.url, lease_ms=lease_ms))
        self.victims = [self._child(role, number) for role in ("workers", "offline") for number in (1, 2)]
        self._others = [self._child("api", 1), self._child("scheduler", 1)]
        self.client = BatchClient(f"http://127.0.0.1:{self.port}")

    def _child(self, role: str, number: int) -> ManagedProcess:
        name = f"{role}-{number}"
        return ManagedProcess(name, [sys.executable, "-m", role, "--id", name], self.environ, self.folder)

    async def start(self) -> None:
        """Until the API answers."""
        await self.server.start()
        await asyncio.gather(*(child.start() for child in [*self.victims, *self._others]))
        await until(lambda: asyncio.to_thread(self.client.is_ready), 60, 0.1)

    async def close(self) -> None:
        """End every process."""
        self.client.close()
        await asyncio.gather(*(child.end() for child in [*self.victims, *self._others]))
        await self.wire.close()
        await self.server.child.end()


async def kills(folder: Path, lines: int, times: int, seed: int, on_progress: Callable[[int, int], None]) -> Killed:
    """`times` kills of random victims at random moments, all over the batch. Raises TimeoutError."""
    chance = random.Random(seed)  # noqa: S311 - so that a run can be repeated
    cluster = KillCluster(folder, 1000)
    asked = [InputLine(number, f"line {number} of the batch", TOKENS, "sim") for number in range(1, lines + 1)]
    try:
        await cluster.start()
        began = time.monotonic()
        batch_id = await asyncio.to_thread(cluster.client.begin, write(folder / "input.jsonl", asked), "none")
        count: Counter[str] = Counter()
        for number in range(times):
            completed = await _comes_to(cluster, batch_id, number * lines // times)
            await asyncio.sleep(chance.uniform(0.0, 0.6))
            child = chance.choice([each for each in cluster.victims if each.alive] or cluster.victims)
            child.kill()
            count[child.name.partition("-")[0]] += 1
            on_progress(number + 1, completed)
        batch = await asyncio.to_thread(cluster.client.ended, batch_id, BATCH_TIMEOUT_S)
        outputs, failures = cluster.client.lines(batch["output_file_id"]), cluster.client.lines(batch["error_file_id"])
        verdict = await asyncio.to_thread(judge, asked, outputs, failures)
        turns = sum(child.log.read_bytes().count(b"turn ") for child in cluster.victims)
        seconds = time.monotonic() - began
        return Killed(lines, dict(count), verdict, batch["usage"]["output_tokens"], lines * TOKENS, seconds, turns)
    finally:
        await cluster.close()


async def _comes_to(cluster: KillCluster, batch_id: str, lines: int) -> int:
    """Wait until so many lines are answered, or for WAIT_TIMEOUT_S: so kills are spread over the work."""
    deadline = time.monotonic() + WAIT_TIMEOUT_S
    while True:
        batch = await asyncio.to_thread(cluster.client.show, batch_id)
        completed = int(batch["request_counts"]["completed"])
        if completed >= lines or time.monotonic() > deadline:
            return completed
        await asyncio.sleep(0.05)


class Delays(msgspec.Struct, frozen=True):
    """Seconds until a batch went on, one for each trial."""

    message_lost: list[float]
    """The message that said that there is work was lost by Celery."""
    worker_killed: list[float]
    """The Celery worker was killed in the middle of a turn."""


async def delays(folder: Path, trials: int) -> Delays:
    """With the leases people run with. Raises TimeoutError."""
    cluster = KillCluster(folder, RedisSettings().lease_ms)
    lost, killed = [], []
    try:
        await cluster.start()
        path = write(folder / "input.jsonl", [InputLine(n, f"line {n}", 400, "sim") for n in range(1, 400)])
        for _ in range(trials):
            lost.append(await _message_lost(cluster, path))
            killed.append(await _worker_killed(cluster, path))
        return Delays(lost, killed)
    finally:
        await cluster.close()


async def _message_lost(cluster: KillCluster, path: Path) -> float:
    """The due notice is taken here, as by a worker that is killed before it has noted that it took it."""
    for child in _offline(cluster):
        child.send(signal.SIGSTOP)
    batch_id = await asyncio.to_thread(cluster.client.begin, path)
    told: list[DueNotice] = []
    while not told:
        told = await Batches(cluster.wire).due(10)
    began = time.monotonic()
    for child in _offline(cluster):
        child.send(signal.SIGCONT)
    await _until(cluster, batch_id, lambda batch: batch["status"] != "validating")
    seconds = time.monotonic() - began
    await _away_with(cluster, batch_id)
    return seconds


async def _worker_killed(cluster: KillCluster, path: Path) -> float:
    batch_id = await asyncio.to_thread(cluster.client.begin, path)
    batch = await _until(cluster, batch_id, lambda batch: batch["lines_in_queue"] > 0)
    for child in _offline(cluster):  # one of them has the batch; the other has nothing to lose
        child.kill()
    began = time.monotonic()
    done = batch["request_counts"]["completed"]
    await asyncio.sleep(0.5)
    before = (await asyncio.to_thread(cluster.client.show, batch_id))["request_counts"]["completed"]
    await _until(cluster, batch_id, lambda batch: batch["request_counts"]["completed"] > max(before, done))
    seconds = time.monotonic() - began
    await _away_with(cluster, batch_id)
    return seconds


def _offline(cluster: KillCluster) -> Sequence[ManagedProcess]:
    return [child for child in cluster.victims if child.name.startswith("offline")]


async def _until(cluster: KillCluster, batch_id: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while not condition(batch := await asyncio.to_thread(cluster.client.show, batch_id)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the batch does not go on: {batch['status']}")
        await asyncio.sleep(0.05)
    return batch


async def _away_with(cluster: KillCluster, batch_id: str) -> None:
    await asyncio.to_thread(cluster.client.cancel, batch_id)
    await asyncio.to_thread(cluster.client.ended, batch_id, 120)
