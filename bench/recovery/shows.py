"""The kills, with real processes: a worker with all its jobs running, and an API process with all its readers."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.http import RequestRefused, answer_to, request
from bench.penstock import MODEL, Penstock, start_api, start_worker
from bench.processes import Died, Processes
from bench.report import Column, Ratio
from penstock.engine import ChatTurn
from workers.engines.sim.answers import prompt_text, token_text


@dataclass(slots=True)
class Reader:
    """One request and what its reader has."""

    prompt: str
    tokens: int
    job: str = ""
    cursor: str = ""
    """The id of its last event."""
    text: str = ""
    came: list[float] = field(default_factory=list)
    """When each token did (monotonic)."""
    resets: int = 0
    ended: str = ""
    """The name of its last event."""

    @property
    def body(self) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": self.prompt}], "max_tokens": self.tokens}

    @property
    def is_exact(self) -> bool:
        """Whether it has every token of its answer once and in order."""
        prompt = prompt_text((ChatTurn("user", self.prompt),))
        return self.text == "".join(token_text(prompt, index) for index in range(self.tokens))

    def silence_s(self, since: float) -> float | None:
        """The longest time between two tokens that ended after `since`; None if none came after it."""
        gaps = [after - before for before, after in itertools.pairwise(self.came) if after > since]
        return max(gaps, default=None)

    async def chat(self, port: int) -> None:
        """Stream a chat to its end. Raises RequestRefused, OSError."""
        sent = request("POST", "/v1/chat/completions", {**self.body, "stream": True})
        async with answer_to(port, sent) as (reader, _):
            while line := await reader.readline():
                if line.startswith(b"data: [DONE]"):
                    self.ended = "completed"
                    return
                if line.startswith(b"data: "):
                    self._take_chunk(json.loads(line[6:]))

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.ended = str(chunk["error"]["code"])
        elif chunk["choices"] and (text := chunk["choices"][0]["delta"].get("content")):
            self.text += text
            self.came.append(time.monotonic())

    async def put(self, port: int) -> None:
        """As a job. Raises RequestRefused, OSError."""
        async with answer_to(port, request("POST", "/v1/jobs", self.body, {"Connection": "close"})) as (reader, _):
            self.job = json.loads(await reader.read())["id"]

    async def follow(self, port: int) -> None:
        """The job's events behind the last one, to its end or until it is cut. Raises RequestRefused, OSError."""
        headers = {"Last-Event-ID": self.cursor} if self.cursor else {}
        name = ""
        async with answer_to(port, request("GET", f"/v1/jobs/{self.job}/events", None, headers)) as (reader, _):
            while line := await reader.readline():
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"id: "):
                    self.cursor = line[4:].strip().decode()
                elif line.startswith(b"data: ") and self._take_event(name, line[6:]):
                    return

    def _take_event(self, name: str, data: bytes) -> bool:
        """Whether it was the last one."""
        if name == "delta":
            self.text += json.loads(data)["text"]
            self.came.append(time.monotonic())
        elif name == "stream.reset":
            self.resets, self.text = self.resets + 1, ""
        elif name in ("completed", "failed", "cancelled", "expired"):
            self.ended = name
        return bool(self.ended)


COLUMNS = (Column("show", "what was killed"), Column("what", "figure"), Column("value", "value", 1))


@dataclass(frozen=True, slots=True)
class RecoverySample:
    """What one show found."""

    rows: list[dict[str, Any]]
    goals: list[Ratio]


def sample(show: str, figures: Mapping[str, float | None], goal: Ratio, readers: Sequence[Reader]) -> RecoverySample:
    """Figures and their goal; and no reader may have lost anything."""
    wrong = {
        "readers told to begin anew": sum(reader.resets for reader in readers),
        "answers that did not complete": sum(reader.ended != "completed" for reader in readers),
        "readers without every token once": sum(not reader.is_exact for reader in readers),
    }
    rows = [{"show": show, "what": what, "value": value} for what, value in figures.items()]
    return RecoverySample(rows, [goal, *(Ratio.none(f"{show}: {what}", count) for what, count in wrong.items())])


def of_worker(readers: Sequence[Reader], killed: float, lease_s: float) -> RecoverySample:
    """A worker was killed at that time (monotonic) with all these running."""
    heard = [silence for reader in readers if (silence := reader.silence_s(killed)) is not None]
    show = f"worker with {len(readers)} running"
    beyond = max(0.0, max(heard) - lease_s) if len(heard) == len(readers) else None
    goal = Ratio.held("recovery.silence", f"{show}: silence beyond the lease, s", beyond)
    figures = {"longest silence, s": max(heard, default=None), "shortest, s": min(heard, default=None)}
    return sample(show, figures, goal, readers)


def of_api(readers: Sequence[Reader], killed: float) -> RecoverySample:
    """An API process was killed at that time with all these listening, and another one was asked at once."""
    resumed = [next((at - killed for at in reader.came if at > killed), None) for reader in readers]
    on = [each for each in resumed if each is not None]
    show = f"API process with {len(readers)} readers"
    last = max(on) if len(on) == len(readers) else None
    goal = Ratio.held("recovery.resumed", f"{show}: until all have gone on, s", last)
    return sample(show, {"until the first has gone on, s": min(on, default=None)}, goal, readers)


LEASE_S = 2.0
WAIT_TIMEOUT_S = 300.0
AT_ONCE = 100
"""Requests under way while jobs are put and readers begin: what is measured is not the beginning."""
RETRY_DELAY_S = 0.2
"""A reader that was refused, or found nobody, asks again after so long."""


class TooSlow(Died):
    """Readers ended before the kill: on this machine the answers must be longer."""


@dataclass(frozen=True, slots=True)
class RecoverySize:
    """How much is running when the kill comes."""

    jobs: int
    tokens: int
    step_ms: float
    readers: int
    reader_tokens: int
    reader_step_ms: float


FULL = RecoverySize(jobs=256, tokens=1_000, step_ms=40, readers=2_000, reader_tokens=60, reader_step_ms=500)
QUICK = RecoverySize(jobs=8, tokens=500, step_ms=20, readers=16, reader_tokens=30, reader_step_ms=100)


async def worker_killed(folder: Path, size: RecoverySize) -> RecoverySample:
    """All jobs run on one worker; another one is there and idle when it dies in the middle. Raises Died."""
    settings = {"redis.lease_ms": int(1000 * LEASE_S), "sim.step_ms": size.step_ms, "sim.slots": size.jobs}
    with Penstock(folder, workers=0, settings=settings) as penstock, _beside(penstock, "doomed") as doomed:
        await asyncio.to_thread(_started, doomed, "worker-1")
        readers = [Reader(f"tell me {number}", size.tokens) for number in range(size.jobs)]
        running = [asyncio.create_task(reader.chat(penstock.port)) for reader in readers]
        await wait_until(lambda: all(reader.came for reader in readers), running)
        with _beside(penstock, "heir") as heir:
            await asyncio.to_thread(_started, heir, "worker-2")
            await wait_until(lambda: all(len(reader.came) >= size.tokens // 2 for reader in readers), running)
            killed = _kill(doomed, "worker-1", readers)
            await _all(running)
    return of_worker(readers, killed, LEASE_S)


async def api_killed(folder: Path, size: RecoverySize) -> RecoverySample:
    """All readers listen to one API process; when it dies they ask another one at once. Raises Died."""
    settings = {
        "redis.lease_ms": int(1000 * LEASE_S),
        "sim.step_ms": size.reader_step_ms,
        "sim.slots": size.readers,
        "redis.lane_limit": 10 * size.readers,
    }
    with Penstock(folder, settings=settings) as penstock, _beside(penstock, "doomed") as doomed:
        port = start_api(doomed, "api-doomed")
        doomed.wait_ready()
        readers = [Reader(f"tell me {number}", size.reader_tokens) for number in range(size.readers)]
        gate = asyncio.Semaphore(AT_ONCE)

        async def read(reader: Reader) -> None:
            async with gate:
                await reader.put(penstock.port)
            await _follow(reader, port, penstock.port)

        running = [asyncio.create_task(read(reader)) for reader in readers]
        await wait_until(lambda: all(len(reader.came) >= size.reader_tokens // 10 for reader in readers), running)
        killed = _kill(doomed, "api-doomed", readers)
        await _all(running)
    return of_api(readers, killed)


async def _follow(reader: Reader, first: int, last: int) -> None:
    """To its end: at the first port until that is gone, then at the last."""
    port = first
    while not reader.ended:
        try:
            await reader.follow(port)
        except RequestRefused:
            await asyncio.sleep(RETRY_DELAY_S)
        except OSError:
            pass
        port = last


def _beside(penstock: Penstock, name: str) -> Processes:
    """Processes that may die without spoiling the measurement."""
    folder = penstock.folder / name
    folder.mkdir()
    (folder / "penstock.toml").write_text((penstock.folder / "penstock.toml").read_text())
    return Processes(folder, penstock.processes.environ)


def _started(processes: Processes, worker: str) -> None:
    start_worker(processes, worker)
    processes.wait_ready()


def _kill(processes: Processes, name: str, readers: Sequence[Reader]) -> float:
    """At once, and when (monotonic). Raises TooSlow where some readers were done before: nothing would be
    shown."""
    if done := sum(bool(reader.ended) for reader in readers):
        raise TooSlow(
            f"{done} of {len(readers)} readers had ended before the kill: this machine is too slow for the size"
        )
    os.kill(processes.pids()[name], signal.SIGKILL)
    return time.monotonic()


async def _all(running: Sequence[asyncio.Task[None]]) -> None:
    """Wait for their ends. Raises TimeoutError, and what a reader raised."""
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        await asyncio.gather(*running)


async def wait_until(condition: Callable[[], bool], running: Sequence[asyncio.Task[None]]) -> None:
    """Poll. Raises TimeoutError, and what a reader raised."""
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while not condition():
            for task in running:
                if task.done():
                    task.result()
            await asyncio.sleep(0.02)
