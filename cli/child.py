"""Supervised child process: starts it, tracks its state, restarts it with backoff when it exits, and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from cli.bounds import ProcessLimits, bind
from cli.instance import ProcessEntry
from cli.log_lines import message_of, ran_alone, record_of
from penstock.loops import wait
from penstock.process import ENV, LIFE
from streaming.ids import new_life

log = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
STARTING_GRACE_S = 2.0
"""From SIGTERM to SIGKILL for a process that was not ready yet, which has no jobs to finish."""
STABLE_S = 30.0
"""A process that was ready, and ran for this long, resets the counts of failures."""
PROBE_INTERVAL_S = 0.05
OUTPUT_TIMEOUT_S = 1.0
TAIL_BYTES = 8192

Probe: TypeAlias = Callable[[], Awaitable[str]]
"""Returns the state of a program that does not use the lifeline; called until it returns "ready"."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The command line of a process, with its role and id."""

    role: str
    id: str
    argv: tuple[str, ...]
    log: Path
    env: dict[str, str]
    model: str = ""
    shape: str = ""
    cwd: Path | None = None
    fds: tuple[int, ...] = ()
    """File descriptors that it inherits under the same numbers."""
    grace_s: float = 10.0
    """From SIGTERM to SIGKILL."""
    probe: Probe | None = None
    bounds: ProcessLimits = field(default_factory=ProcessLimits)


@dataclass(frozen=True, slots=True)
class Status:
    """State of a child. `failures` counts consecutive exits before it was ready or before STABLE_S."""

    state: str = "starting"
    detail: str = ""
    pid: int | None = None
    since: float = 0.0
    restarts: int = 0
    failures: int = 0
    was_ready: bool = False
    """Whether the process that last exited had been ready."""
    alike: int = 0
    """How many of `failures` are of the kind of the last one: failed starts since a process was ready, or exits of
    ready processes since a failed start."""
    cause: str = ""
    """Why it last exited."""
    completed: bool = False
    """Whether this process, a worker, has completed a job."""
    away: str = ""
    """The servers that it waits for, each with the reason; "" while one is there."""
    away_since: float = 0.0
    """Since when (Unix seconds)."""


class Child:
    """One supervised child. `run` it as a task; it calls `on_change` whenever `status` has changed."""

    def __init__(self, program: Program, on_change: Callable[[Child], None]) -> None:
        self.program = program
        self.status = Status(since=time.time())
        self._on_change = on_change
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._killer: asyncio.TimerHandle | None = None
        self._log_start = 0
        self._lives: tuple[str, ...] = ()
        self._was_ready = False
        """Whether the process that runs has been ready."""

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def entry(self) -> ProcessEntry:
        """The child's row in `penstock ps`."""
        now, program = self.status, self.program
        return ProcessEntry(
            role=program.role,
            id=program.id,
            pid=now.pid,
            state=now.state,
            since=now.since,
            restarts=now.restarts,
            failed_starts=0 if now.was_ready or self._was_ready else now.alike,
            cause=now.cause,
            model=program.model,
            shape=program.shape,
            detail=now.detail,
            away=now.away,
            away_since=now.away_since,
            lives=self._lives,
        )

    async def run(self) -> None:
        """Keep one process of the program running until `stop`."""
        while not self._stopping.is_set():
            began = time.monotonic()
            cause = await self._run_once()
            if self._stopping.is_set():
                break
            counts = counts_after(self.status, was_ready=self._was_ready, ran_s=time.monotonic() - began)
            self._set(state="restarting", detail=cause, cause=cause, pid=None, completed=False, away="", **counts)
            await wait(self._stopping, backoff_s(self.status.failures))
            self._set(state="starting", detail="", restarts=self.status.restarts + 1)
        self._set(state="stopped", detail="", pid=None)

    def stop(self) -> None:
        """Send SIGTERM, so that it drains; kill it after the grace period. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._process is not None:
            self._terminate(self._process)

    def kill(self) -> None:
        """Kill it and its descendants."""
        self._stopping.set()
        if self._process is not None:
            _kill_group(self._process.pid)

    async def _run_once(self) -> str:
        """Run one process until it exits. Returns why it exited."""
        self._was_ready, self._lives = False, (new_life(), *self._lives[:1])
        ours, theirs = socket.socketpair()
        with theirs:
            self._set(state="starting", detail="", since=time.time())
            try:
                process = await self._spawn(theirs.fileno())
            except OSError as error:
                ours.close()
                return f"cannot be started: {error}"
        self._process = process
        for refused in bind(process.pid, self.program.bounds):
            log.warning("%s is not bounded as it should be: %s", self.program.id, refused)
        self._set(pid=process.pid)
        if self._stopping.is_set():  # `stop` was called while the process was being created
            self._terminate(process)
        watching = asyncio.create_task(self._watch(ours))
        code = await process.wait()
        self._process = None
        if self._killer is not None:
            self._killer.cancel()
        _kill_group(process.pid)
        await _finish(watching)
        return self._cause(code)

    async def _spawn(self, line: int) -> Process:
        program = self.program
        with program.log.open("ab") as log:
            self._log_start = log.tell()
            return await asyncio.create_subprocess_exec(
                *program.argv,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                cwd=program.cwd,
                env={**program.env, ENV: str(line), LIFE: self._lives[0]},
                pass_fds=(line, *program.fds),
                process_group=0,  # so that Ctrl-C at the terminal reaches only the supervisor
            )

    def _terminate(self, process: Process) -> None:
        has_work = self.status.state not in ("starting", "restarting")
        grace_s = self.program.grace_s if has_work else min(self.program.grace_s, STARTING_GRACE_S)
        self._set(state="draining", detail="")
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        self._killer = asyncio.get_running_loop().call_later(grace_s, _kill_group, process.pid)

    async def _watch(self, line: socket.socket) -> None:
        """Follow the process's state through the lifeline or by probing. On exit, close the supervisor's end."""
        reader, writer = await asyncio.open_connection(sock=line)
        try:
            if self.program.probe is not None:
                await self._ask(self.program.probe)
            while message := await reader.readline():
                self._on_message(message)
        except ConnectionError:
            pass  # it exited without reporting; its exit code is reported
        except ValueError:
            self._set(detail="says a line too long to be a state")
        finally:
            writer.close()

    async def _ask(self, probe: Probe) -> None:
        while (state := await probe()) != "ready":
            self._set(state="starting", detail="" if state == "starting" else state)
            await asyncio.sleep(PROBE_INTERVAL_S)
        self._set(state="ready", detail="")

    def _on_message(self, message: bytes) -> None:
        try:
            said: dict[str, Any] = json.loads(message)
            if said.get("completed"):
                self._set(completed=True)
            elif "away" in said:
                self._note_away(str(said["away"]))
            else:
                self._set(state=str(said["state"]), detail=str(said.get("detail", "")))
        except (ValueError, KeyError, TypeError, RecursionError):
            self._set(detail=f"says what nobody understands: {message[:80]!r}")

    def _note_away(self, why: str) -> None:
        since = self.status.away_since if self.status.away else time.time()
        self._set(away=why, away_since=since if why else 0.0)

    def _cause(self, code: int) -> str:
        cause = self._ending(code)
        job = ran_alone(_tail(self.program.log, self._log_start)) if code else ""
        return f"{cause}, running only {job}: penstock dlq show {job}" if job else cause

    def _ending(self, code: int) -> str:
        if self.status.state == "failed" and self.status.detail:
            return self.status.detail
        ending = f"killed by {signal_name(-code)}" if code < 0 else f"exit {code}"
        records_count = code > 0  # what a process logged does not explain a signal; what a library wrote may
        words = "" if code == -signal.SIGKILL else last_words(self.program.log, self._log_start, records=records_count)
        return f"{ending}: {words}" if words else ending

    def _set(self, **changes: Any) -> None:
        changed = replace(self.status, **changes)
        self._was_ready = self._was_ready or changed.state == "ready"
        if changed != self.status:
            self.status = changed
            self._on_change(self)


def counts_after(before: Status, *, was_ready: bool, ran_s: float) -> dict[str, Any]:
    """The counts of a child after an exit: its fields of Status.

    Args:
        was_ready: whether the process had been ready.
    """
    if was_ready and ran_s >= STABLE_S:
        return {"failures": 1, "alike": 1, "was_ready": True}
    alike = before.alike + 1 if was_ready == before.was_ready else 1
    return {"failures": before.failures + 1, "alike": alike, "was_ready": was_ready}


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL; its number if it has none (real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def backoff_s(failures: int) -> float:
    """Seconds to wait after this many consecutive failures: none after the first."""
    return min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(failures - 2, 16)) if failures > 1 else 0.0


def last_words(log: Path, start: int = 0, *, records: bool = True) -> str:
    """The last line of a log after byte `start`; of a JSON record its message. "" for a record without `records`, and
    for one that says what went well: it explains no end."""
    line = _tail(log, start)[-1]
    record = record_of(line)
    if record is not None and (not records or record.get("level") in ("debug", "info")):
        return ""
    return message_of(line)[:200]


def _tail(log: Path, start: int) -> list[str]:
    """The last lines of a log after byte `start`, at least one."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").strip().split("\n")
    except OSError:
        return [""]


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: macOS, for a group that is gone
        os.killpg(pid, signal.SIGKILL)


async def _finish(watching: asyncio.Task[None]) -> None:
    """Read the process's last output, then stop reading."""
    done, _ = await asyncio.wait({watching}, timeout=OUTPUT_TIMEOUT_S)
    if not done:
        watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
