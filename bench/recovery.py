"""`python -m bench.recovery`: kill the only worker of `penstock up` at default settings, and compare with a bare start.

Each round is a new `penstock up` with the simulated engine, and three measurements: the start of a worker on another
server with nothing to do, the silence of a stream whose worker is killed, and what becomes of a job whose worker is
stopped (SIGSTOP) for half a lease, which is no death.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.http import RequestRefused, answer_to, fetch, request
from bench.penstock import MODEL, PenstockUp, own_environ, start_redis, start_worker, variables
from bench.processes import Died, Processes
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed, count
from bench.report import Column, Ratio
from penstock.engine import ChatTurn
from streaming.redis.settings import RedisSettings
from workers.engines.sim.answers import prompt_text, token_text

TOKENS = 400
BEFORE = 20
"""Tokens that have come when the worker is killed or stopped."""
STOPPED_S = RedisSettings().lease_ms / 2000
WAIT_TIMEOUT_S = 300.0
COLUMNS = (Column("show", "what was killed"), Column("what", "figure"), Column("value", "value", 1))
NOTE = (
    "A bare start is that of a worker process with the simulated engine, from its creation until it is ready, on a "
    "server of its own with nothing else beside it."
)


@dataclass(slots=True)
class Reader:
    """One request and what its reader has."""

    prompt: str
    tokens: int
    job: str = ""
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
        """The job's events, to its end. Raises RequestRefused, OSError."""
        name = ""
        async with answer_to(port, request("GET", f"/v1/jobs/{self.job}/events")) as (reader, _):
            while line := await reader.readline():
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
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


@dataclass(frozen=True, slots=True)
class RecoveryRound:
    """What one round found."""

    start_s: float
    """From the creation of a worker process until it is ready."""
    silence_s: float | None
    """Of the stream whose worker was killed; None if nothing came after."""
    killed: Reader
    stopped: Reader
    attempts: int
    """Of the stopped worker's job."""
    restarts: int
    """Of the worker, by the time that the stopped one's job had ended."""


SHOW = "the only worker"


def of_rounds(rounds: Sequence[RecoveryRound]) -> tuple[list[dict[str, Any]], list[Ratio]]:
    """The figures, and the goals that they are held against: no reader may have lost anything either."""
    starts, readers = [each.start_s for each in rounds], [by for each in rounds for by in (each.killed, each.stopped)]
    heard = [each.silence_s for each in rounds if each.silence_s is not None]
    whole = len(heard) == len(rounds)
    beyond = [silence - start for silence, start in zip(heard, starts, strict=True)] if whole else []
    figures = {
        "silence of its stream, p50, s": median(heard) if whole else None,
        "shortest, s": min(heard, default=None),
        "longest, s": max(heard, default=None),
        "bare start of a worker, p50, s": median(starts),
    }
    wrong = {
        "readers told to begin anew": sum(reader.resets for reader in readers),
        "answers that did not complete": sum(reader.ended != "completed" for reader in readers),
        "readers without every token once": sum(not reader.is_exact for reader in readers),
        "jobs taken from a stopped worker": sum(each.attempts != 1 for each in rounds),
        "restarts other than that of the killed worker": sum(abs(each.restarts - 1) for each in rounds),
    }
    what = f"{SHOW}: silence beyond a bare start, p50, s"
    goal = Ratio.held("recovery.restart", what, median(beyond) if beyond else None, rounds=beyond)
    rows = [{"show": SHOW, "what": what, "value": value} for what, value in figures.items()]
    return rows, [goal, *(Ratio.none(f"{SHOW}: {what}", count) for what, count in wrong.items())]


async def one_round(folder: Path) -> RecoveryRound:
    """Raises Died, TimeoutError, RequestRefused, OSError."""
    start_s = await asyncio.to_thread(_bare_start, folder)
    with PenstockUp(folder, "--engine", "sim", "--model", MODEL) as up:
        port = up.port
        killed = Reader("tell me of a kill", TOKENS)
        reading = asyncio.create_task(killed.chat(port))
        await _until(lambda: len(killed.came) >= BEFORE, reading)
        at = time.monotonic()
        os.kill(up.worker()["pid"], signal.SIGKILL)
        await _until(lambda: bool(killed.ended), reading)
        stopped = Reader("tell me of a stop", TOKENS)
        await stopped.put(port)
        reading = asyncio.create_task(stopped.follow(port))
        await _until(lambda: len(stopped.came) >= BEFORE, reading)
        pid = up.worker()["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        await _until(lambda: bool(stopped.ended), reading)
        _, _, job = await asyncio.to_thread(fetch, port, "GET", f"/v1/jobs/{stopped.job}")
        attempts = json.loads(job)["attempts"]
        return RecoveryRound(start_s, killed.silence_s(at), killed, stopped, attempts, up.worker()["restarts"])


def _bare_start(folder: Path) -> float:
    """Seconds that a worker takes from nothing to ready, beside nothing else. Raises Died."""
    with Processes(folder, own_environ()) as processes:
        url = start_redis(processes)
        (folder / "penstock.toml").write_text(f'[models.{MODEL}]\nengine = "sim"\n')
        processes.environ |= variables({"redis.url": url})
        began = time.monotonic()
        start_worker(processes, "bare")
        processes.wait_ready()
        took = time.monotonic() - began
    (folder / "penstock.toml").unlink()
    return took


async def _until(condition: Callable[[], bool], reading: asyncio.Task[None]) -> None:
    """Poll. Raises TimeoutError, and what the reader raised."""
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while not condition():
            if reading.done():
                reading.result()
            await asyncio.sleep(0.02)


def _run(run: ProgramRun) -> int:
    rounds = []
    with Testbed(run.console, "starting", run.args.rounds) as stage:
        for number in range(run.args.rounds):
            stage.say("the only worker killed")
            rounds.append(asyncio.run(one_round(stage.room("up", number))))
            stage.done()
    rows, goals = of_rounds(rounds)
    settings = {"rounds": run.args.rounds, "tokens": TOKENS, "stopped_s": STOPPED_S}
    title = "What readers notice of a kill of the only worker"
    return run.keep(run.result("recovery-up", title, COLUMNS, rows, goals, [NOTE], **settings))


main = BenchProgram("penstock bench recovery", __doc__, _run, Died, RequestRefused, OSError, TimeoutError).taking(
    Option("--rounds", type=count, default=8, help="each is a `penstock up` of its own (default 8)"), OUT
)

if __name__ == "__main__":
    main.exit()
