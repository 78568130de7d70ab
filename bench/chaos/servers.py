"""Real Redis-compatible servers on loopback: one alone, a primary with replica and Sentinels, a cluster."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from bench.chaos.processes import ManagedProcess
from bench.chaos.waiting import until
from bench.penstock import SERVER_SETTINGS, find_server
from bench.ports import free_port

APPENDED = "appendonlydir"
SETTINGS = f"""
{SERVER_SETTINGS}
repl-diskless-sync-delay 0
client-output-buffer-limit pubsub 8mb 2mb 10
"""


class RedisServer:
    """One server with a folder of its own, and its append-only file in it. `options` are lines of its configuration,
    a file that others may have it rewrite."""

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
        return f"redis://127.0.0.1:{self.port}/0"

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
        async with Redis(port=self.port, socket_timeout=2, protocol=2) as client:
            return await client.execute_command(*words)  # type: ignore[no-untyped-call]

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
