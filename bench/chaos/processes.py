"""Processes under test, each restarted when it ends, and Redis-compatible servers among them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import isawaitable
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from bench.chaos.http import HOST
from bench.penstock import SERVER_SETTINGS, find_server
from bench.ports import free_port


async def becomes(condition: Callable[[], object | Awaitable[object]], seconds: float, every_s: float = 0.02) -> bool:
    """Whether it came true in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    try:
        async with asyncio.timeout(seconds):
            while not await _value(condition()):
                if loop.time() > deadline:  # on Python 3.11, redis-py may swallow the cancellation
                    return False
                await asyncio.sleep(every_s)
    except TimeoutError:
        return False
    return True


async def until(condition: Callable[[], object | Awaitable[object]], seconds: float, every_s: float = 0.02) -> None:
    """The same, where anything else ends the row. Raises TimeoutError."""
    if not await becomes(condition, seconds, every_s):
        raise TimeoutError(f"{getattr(condition, '__qualname__', condition)} did not come true in {seconds:g} s")


async def _value(answer: object | Awaitable[object]) -> object:
    return await answer if isawaitable(answer) else answer


RESTART_DELAY_S = 0.05
GRACE_S = 40.0
LEASE = re.compile(rb'"lease": ?"([0-9a-f]+)"')


class ManagedProcess:
    """One process at a time under one name; its output is kept in a file beside the data."""

    def __init__(self, name: str, argv: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        self.name, self.argv, self.environ, self.folder = name, list(argv), dict(environ), folder
        self.kept = True
        """Started again when it ends."""
        self.exits: list[int] = []
        """How each of its lives ended: exit code, or minus the signal."""
        self.patient = asyncio.Event()
        """Cleared: a life that ended is not followed by another until it is set."""
        self.patient.set()
        self._process: asyncio.subprocess.Process | None = None
        self._born = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        """Of the present life, or of the last one."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Until it has a first life."""
        self._task = asyncio.create_task(self._keep())
        await self._born.wait()

    def send(self, number: int) -> None:
        """Signal the present life, if there is one."""
        if self.alive:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send(signal.SIGKILL)

    async def exited(self, lives: int) -> None:
        """Until so many lives have ended."""
        await until(lambda: len(self.exits) >= lives, GRACE_S, 0.01)

    async def end(self) -> None:
        """For good: SIGTERM, and after the grace time SIGKILL."""
        self.kept = False
        self.patient.set()
        if self._task is None:
            return
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(GRACE_S):
                await asyncio.shield(self._task)
        except TimeoutError:
            self.kill()
            await self._task

    def lease(self) -> str:
        """The lease of a worker's present life, as it wrote into its log."""
        found = LEASE.findall(self.log.read_bytes())
        return found[-1].decode() if found else ""

    async def _keep(self) -> None:
        while True:
            with self.log.open("ab") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *self.argv,
                    env=self.environ,
                    cwd=self.folder,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    # A write beyond RLIMIT_FSIZE is then an error for the process, not its death.
                    restore_signals=False,
                )
            self._born.set()
            self.exits.append(await self._process.wait())
            await self.patient.wait()
            if not self.kept:
                return
            await asyncio.sleep(RESTART_DELAY_S)


APPENDED = "appendonlydir"
SETTINGS = f"""
{SERVER_SETTINGS}
repl-diskless-sync-delay 0
client-output-buffer-limit pubsub 8mb 2mb 10
"""


async def command(port: int, *words: str | int | bytes, host: str = HOST) -> Any:
    """One command on a connection of its own. Raises RedisError, OSError."""
    async with Redis(host=host, port=port, socket_timeout=2, socket_connect_timeout=2, protocol=2) as client:
        return await client.execute_command(*words)  # type: ignore[no-untyped-call]


class RedisServer:
    """One server with a folder of its own, and its append-only file in it. `options` are lines of its configuration,
    a file that others may have it rewrite."""

    host = HOST

    def __init__(
        self, folder: Path, name: str = "redis", *options: str, environ: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.folder = folder / name
        self.folder.mkdir()
        config = self.folder / "server.conf"
        config.write_text("\n".join([f"port {self.port}", f"dir {self.folder}", SETTINGS, *options, ""]))
        self.child = ManagedProcess(name, [find_server(), str(config)], {**os.environ, **(environ or {})}, folder)

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    async def start(self) -> None:
        """Until it answers."""
        await self.child.start()
        await self.answers()

    async def answers(self, seconds: float = 30.0) -> None:
        """Until it serves commands. Raises TimeoutError."""
        await until(self._pings, seconds)

    async def _pings(self) -> bool:
        try:
            return bool(await self.command("PING"))
        except (RedisError, OSError):
            return False

    async def command(self, *words: str | int | bytes) -> Any:
        """One command on a connection of its own. Raises RedisError, OSError."""
        return await command(self.port, *words, host=self.host)

    async def down(self, seconds: float) -> None:
        """kill -9, and a restart from the file after so many seconds."""
        await self.kill()
        await asyncio.sleep(seconds)
        await self.back()

    async def kill(self) -> None:
        """kill -9, and no restart before `back`."""
        lives = len(self.child.exits)
        self.child.patient.clear()
        self.child.kill()
        await self.child.exited(lives + 1)

    async def back(self) -> None:
        """Start again from the file."""
        self.child.patient.set()
        await self.answers()

    async def copy_file(self) -> Path:
        """Copy the append-only folder as it is now, with everything that was answered before."""
        await until(self._has_written, 5, 0.005)
        target = self.folder.parent / f"{self.folder.name}-copy"
        shutil.rmtree(target, ignore_errors=True)
        await asyncio.to_thread(shutil.copytree, self.folder / APPENDED, target)
        return target

    async def _has_written(self) -> bool:
        """Whether the server holds no write back from its file: it does so while a sync is slow."""
        return int((await self.command("INFO", "persistence"))["aof_buffer_length"]) == 0

    def put_back(self, copy: Path) -> None:
        """Replace the append-only folder of a server that is down."""
        shutil.rmtree(self.folder / APPENDED)
        shutil.copytree(copy, self.folder / APPENDED)
