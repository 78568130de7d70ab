"""A kill of the only worker of `penstock up` at default settings: how long its stream is silent, beside a bare start.

Each round is a new `penstock up` with the simulated engine, and three measurements: the start of a worker on another
server with nothing to do, the silence of a stream whose worker is killed, and what becomes of a job whose worker is
stopped (SIGSTOP) for half a lease, which is no death.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.http import fetch
from bench.penstock import MODEL, PenstockUp, own_environ, start_redis, start_worker, variables
from bench.processes import Processes
from bench.recovery.reader import Reader
from bench.report import Ratio
from streaming.redis.settings import RedisSettings

TOKENS = 400
BEFORE = 20
"""Tokens that have come when the worker is killed or stopped."""
STOPPED_S = RedisSettings().lease_ms / 2000
WAIT_TIMEOUT_S = 300.0


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
