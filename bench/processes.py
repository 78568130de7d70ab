"""Operating system processes of a measurement, and what they cost: CPU time and memory of whole trees, out of /proc.

A process that ends by itself spoils the measurement: it is an error, and its last words are told.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec.json import decode, encode

from bench.ports import free_port
from penstock.process import ENV as LIFELINE

TICKS = os.sysconf("SC_CLK_TCK")
READY_TIMEOUT_S = 120.0
GRACE_S = 15.0
TAIL_BYTES = 2000


class Died(RuntimeError):
    """A process of the measurement ended, or never began to serve."""


T = TypeVar("T")


def answer_of(module: str, plan: object, answer: type[T], seconds: float, error: type[Exception]) -> T:
    """What `python -m module` makes of a plan: both are JSON, on its stdin and stdout. Raises `error`."""
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(command, input=encode(plan), capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as late:
        raise error(f"{module}: no end after {seconds:.0f} s") from late
    if done.returncode:
        raise error(f"{module}: {done.stderr.decode(errors='replace')[-TAIL_BYTES:]}")
    return decode(done.stdout, type=answer)


class Processes:
    """A system's processes, by name. Their output goes to `<folder>/<name>.log`. Close it, or use it as a context."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.environ = dict(os.environ if environ is None else environ)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._lines: dict[str, socket.socket] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self, name: str, argv: Sequence[str | Path], environ: Mapping[str, str] | None = None, fds: Sequence[int] = ()
    ) -> None:
        """Start it; it is not waited for. `fds` are inherited under their numbers."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [str(word) for word in argv],
                env={**self.environ, **(environ or {})},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=tuple(fds),
                start_new_session=True,  # what it starts can be ended with it
            )

    def start_role(
        self, name: str, argv: Sequence[str | Path], environ: Mapping[str, str] | None = None, fds: Sequence[int] = ()
    ) -> None:
        """The same for a process of Penstock's, on a line on which it says its state; it ends when the line breaks."""
        ours, theirs = socket.socketpair()
        with theirs:
            line = {LIFELINE: str(theirs.fileno())}
            self.start(name, argv, {**(environ or {}), **line}, (*fds, theirs.fileno()))
        self._lines[name] = ours

    def wait_ready(self, seconds: float = READY_TIMEOUT_S) -> None:
        """Until every process with a line has said that it is ready. Raises Died."""
        waiting = dict.fromkeys(self._lines, b"")
        for line in self._lines.values():
            line.setblocking(False)

        def all_ready() -> bool:
            for name in list(waiting):
                with contextlib.suppress(BlockingIOError):
                    waiting[name] += self._lines[name].recv(65536)
                states = {json.loads(said)["state"] for said in waiting[name].split(b"\n")[:-1]}
                if "failed" in states:
                    raise Died(f"{name} does not start: {self.last_words(name)}")
                if "ready" in states:
                    del waiting[name]
            return not waiting

        self.until(all_ready, f"{', '.join(self._lines)} to be ready", seconds)

    def until(self, condition: Callable[[], object], what: str, seconds: float = READY_TIMEOUT_S) -> None:
        """Poll until it is so, as long as all processes live; an error of a connection counts as "not yet". Raises
        Died."""
        deadline = time.monotonic() + seconds
        while True:
            self.check()
            with contextlib.suppress(OSError, http.client.HTTPException):
                if condition():
                    return
            if time.monotonic() > deadline:
                said = "; ".join(f"{name}: {self.last_words(name)}" for name in self._running)
                raise Died(f"waited {seconds:g} s for {what}; {said}")
            time.sleep(0.02)

    def serve(self, name: str, module: str, *words: str, seconds: float = READY_TIMEOUT_S) -> int:
        """Start a server of ours, `python -m module PORT words`; returns its port once it accepts. Raises Died."""
        port = free_port()
        self.start(name, [sys.executable, "-m", module, str(port), *words])
        self.wait_port(port, seconds)
        return port

    def wait_port(self, port: int, seconds: float = READY_TIMEOUT_S) -> None:
        """Until something accepts connections there. Raises Died."""
        self.until(lambda: _accepts(port), f"port {port}", seconds)

    def check(self) -> None:
        """All of them live. Raises Died."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise Died(f"{name} ended with {process.returncode}: {self.last_words(name)}")

    def last_words(self, name: str) -> str:
        """The end of its log."""
        text = (self.folder / f"{name}.log").read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
        return text or "(it said nothing)"

    def pids(self) -> dict[str, int]:
        """The process behind each name."""
        return {name: process.pid for name, process in self._running.items()}

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, user and system, of each process and all its descendants."""
        return {name: sum(cpu_s(pid) for pid in tree(process.pid)) for name, process in self._running.items()}

    def kill(self, name: str) -> None:
        """Kill one with all that it started; its name is free again."""
        process = self._running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if line := self._lines.pop(name, None):
            line.close()

    def close(self) -> None:
        """End all of them, the youngest first, and whatever they started. Idempotent."""
        for name in reversed(list(self._running)):
            process = self._running.pop(name)
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what it left behind
            if line := self._lines.pop(name, None):
                line.close()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, which would stop this process for up to a third of a second: it would look like a
    stall of the server, and what was due meanwhile would be asked in one burst."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def tree(pid: int) -> list[int]:
    """A process and all its living descendants."""
    parents: dict[int, list[int]] = {}
    for child, fields in _stats():
        parents.setdefault(int(fields[1]), []).append(child)
    found = [pid]
    for at in found:  # grows while it is walked
        found += parents.get(at, [])
    return found


def cpu_s(pid: int) -> float:
    """User and system time of a process (all its threads) and of its children that have ended and were waited for."""
    try:
        fields = _fields(Path(f"/proc/{pid}/stat"))
        own = time.clock_gettime(_cpu_clock(pid))
    except OSError:
        return 0.0
    return own + sum(int(field) for field in fields[13:15]) / TICKS


def _cpu_clock(pid: int) -> int:
    """The clock that counts a process's CPU time in nanoseconds (Linux's clock_getcpuclockid); /proc counts hundredths
    of a second, too coarse for one stream."""
    return (~pid << 3) | 2


def memory_mib(pid: int) -> float:
    """Proportional set size of a process; resident set size where the kernel does not say. Raises OSError."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    except OSError:
        return rss_bytes(pid) / (1 << 20)


def rss_bytes(pid: int) -> int:
    """Resident set size of a process now. Raises OSError."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _stats() -> Iterator[tuple[int, list[str]]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            yield int(path.parent.name), _fields(path)


def _fields(path: Path) -> list[str]:
    """Of /proc/<pid>/stat, behind the name: state, parent, ..."""
    return path.read_text().rpartition(")")[2].split()


def _accepts(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 1):
        return True
