"""The kills, with real processes: a worker with all its jobs running, and an API process with all its readers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.http import HOST, RequestRefused
from bench.penstock import Penstock
from bench.processes import Died, Processes
from bench.recovery.probe import Probe
from bench.recovery.readers import Reader, RecoverySample, Stall, of_api, of_worker

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
        await asyncio.to_thread(_start_worker, doomed, "worker-1")
        readers = [Reader(f"tell me {number}", size.tokens) for number in range(size.jobs)]
        with _probed(penstock) as probe:
            running = [asyncio.create_task(reader.chat(penstock.port)) for reader in readers]
            await _until(lambda: all(reader.came for reader in readers), running)
            with _beside(penstock, "heir") as heir:
                await asyncio.to_thread(_start_worker, heir, "worker-2")
                await _until(lambda: all(len(reader.came) >= size.tokens // 2 for reader in readers), running)
                before = await asyncio.to_thread(probe.longest_waits)
                killed = _kill(doomed, "worker-1", readers)
                await _until(lambda: all(reader.came[-1] > killed + LEASE_S / 2 for reader in readers), running)
                during = await asyncio.to_thread(probe.longest_waits)
                await _all(running)
    return of_worker(readers, killed, LEASE_S, Stall(*during, *before))


async def api_killed(folder: Path, size: RecoverySize) -> RecoverySample:
    """All readers listen to one API process; when it dies they ask another one at once. Raises Died."""
    settings = {
        "redis.lease_ms": int(1000 * LEASE_S),
        "sim.step_ms": size.reader_step_ms,
        "sim.slots": size.readers,
        "redis.lane_limit": 10 * size.readers,
    }
    with Penstock(folder, settings=settings) as penstock, _beside(penstock, "doomed") as doomed:
        port = _start_api(doomed, "api-doomed")
        readers = [Reader(f"tell me {number}", size.reader_tokens) for number in range(size.readers)]
        gate = asyncio.Semaphore(AT_ONCE)

        async def read(reader: Reader) -> None:
            async with gate:
                await reader.put(penstock.port)
            await _follow(reader, port, penstock.port)

        with _probed(penstock) as probe:
            running = [asyncio.create_task(read(reader)) for reader in readers]
            await _until(lambda: all(len(reader.came) >= size.reader_tokens // 10 for reader in readers), running)
            before = await asyncio.to_thread(probe.longest_waits)
            killed = _kill(doomed, "api-doomed", readers)
            await _until(lambda: all(reader.came[-1] > killed for reader in readers), running)
            during = await asyncio.to_thread(probe.longest_waits)
            await _all(running)
    return of_api(readers, killed, Stall(*during, *before))


async def _follow(reader: Reader, *ports: int) -> None:
    """To its end: at the first port until that is gone, then at the last."""
    first, last = ports[0], ports[-1]
    port = first
    while not reader.ended:
        try:
            await reader.follow(port)
        except RequestRefused:
            await asyncio.sleep(RETRY_DELAY_S)
        except OSError:
            pass
        port = last


def _probed(penstock: Penstock) -> Probe:
    """Asks the API process, and a bare server beside it."""
    return Probe(penstock.port, penstock.processes.serve("control", "bench.bare_server"))


def _beside(penstock: Penstock, name: str) -> Processes:
    """Processes that may die without spoiling the measurement."""
    folder = penstock.folder / name
    folder.mkdir()
    (folder / "penstock.toml").write_text((penstock.folder / "penstock.toml").read_text())
    return Processes(folder, penstock.processes.environ)


def _start_worker(processes: Processes, name: str) -> None:
    argv = [sys.executable, "-m", "workers", "--id", name, "--data-dir", str(processes.folder / "data")]
    processes.start_role(name, argv)
    processes.wait_ready()


def _start_api(processes: Processes, name: str) -> int:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, 0))
        listener.listen(2048)
        argv = [sys.executable, "-m", "api", "--id", name, "--listen-fd", str(listener.fileno())]
        processes.start_role(name, argv, fds=[listener.fileno()])
        processes.wait_ready()
        return int(listener.getsockname()[1])


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


async def _until(condition: Callable[[], bool], running: Sequence[asyncio.Task[None]]) -> None:
    """Poll. Raises TimeoutError, and what a reader raised."""
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while not condition():
            for task in running:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)
