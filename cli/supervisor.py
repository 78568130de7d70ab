"""Process supervisor: keeps all child processes of one machine running until they are stopped, and as many workers as
the leading scheduler's plan says.

Several machines with the same settings may follow one plan: Redis gives each its share (streaming/lua/fleet.lua). Each
action is first recorded in Redis under the plan's epoch. If Redis refuses, because a newer leader exists, the action is
dropped: the newer leader's plan applies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any, TypeAlias

from msgspec.structs import replace

from cli.instance import ProcessEntry, put_aside
from cli.log_lines import message_of, record_of
from penstock.files import open_private
from penstock.loops import spawn, wait
from penstock.process import ENV, LIFE
from penstock.text import counted
from streaming.errors import Unavailable
from streaming.fleet.plans import Action, ActionKind, Plan, Plans, pool_name
from streaming.fleet.processes import Fleet
from streaming.fleet.settings import ModelSettings, Resources
from streaming.ids import new_life
from streaming.jobs.reaper import Reaper

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of one process; None or 0: unlimited. The supervisor sets them once the process is started, by system
    calls that need no privileges. Shares of a CPU and limits of the page cache need containers."""

    cpus: frozenset[int] | None = None
    memory_mib: int = 0
    """Limit of its data: heap, stacks, buffers. Mapped files (weights) do not count."""
    nice: int = 0

    @classmethod
    def of(cls, wanted: Resources, others: Iterable[ProcessLimits]) -> ProcessLimits:
        """Limits for a new worker, on the CPUs that the fewest of the `others` use."""
        taken = Counter(cpu for each in others for cpu in each.cpus or ())
        least = sorted(allowed(), key=lambda cpu: (taken[cpu], cpu))[: wanted.cpus]
        return cls(frozenset(least) if wanted.cpus else None, wanted.memory_mib, wanted.nice)


def allowed() -> frozenset[int]:
    """CPUs that this process may run on."""
    return frozenset(os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1))


def bind(pid: int, bounds: ProcessLimits) -> list[str]:
    """Apply the limits to a process that was just started. Returns an error text for each the system refuses."""
    size = bounds.memory_mib * MIB
    steps: dict[str, tuple[object, Callable[[], object]]] = {
        "nice": (bounds.nice, lambda: os.setpriority(os.PRIO_PROCESS, pid, bounds.nice)),
        "cpus": (bounds.cpus, lambda: os.sched_setaffinity(pid, bounds.cpus or ())),
        "memory_mib": (size, lambda: resource.prlimit(pid, resource.RLIMIT_DATA, (size, size))),
    }
    refused = []
    for name, (limit, step) in steps.items():
        try:
            if limit:
                step()
        except ProcessLookupError:
            break  # it has ended already; its exit code is reported
        except (OSError, ValueError, AttributeError) as error:  # AttributeError: only Linux has this call
            refused.append(f"resources.{name}: {error}")
    return refused


log = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
STARTING_GRACE_S = 2.0
"""From SIGTERM to SIGKILL for a process that was not ready yet, which has no jobs to finish."""
STABLE_S = 30.0
"""A process that was ready, and ran for this long, resets the counts of failures."""
PROBE_INTERVAL_S = 0.05
OUTPUT_TIMEOUT_S = 1.0
ROTATE_INTERVAL_S = 10.0
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


class Child:
    """One supervised child. `run` it as a task; it calls `on_change` whenever `status` has changed."""

    def __init__(self, program: Program, on_change: Callable[[Child], None]) -> None:
        self.program = program
        self.status = ProcessEntry(
            role=program.role,
            id=program.id,
            pid=None,
            state="starting",
            since=time.time(),
            model=program.model,
            shape=program.shape,
        )
        self._on_change = on_change
        self._process: Process | None = None
        self.stopping = asyncio.Event()
        self._killer: asyncio.TimerHandle | None = None
        self._log_start = 0
        self._line: asyncio.StreamWriter | None = None
        """To the process that runs, unless it does not use the lifeline."""
        self._was_ready = False
        """Whether the process that runs has been ready."""

    async def run(self) -> None:
        """Keep one process of the program running until `stop`."""
        while not self.stopping.is_set():
            began = time.monotonic()
            cause = await self._run_once()
            if self.stopping.is_set():
                break
            counts = counts_after(self.status, was_ready=self._was_ready, ran_s=time.monotonic() - began)
            self._set(state="restarting", detail=cause, cause=cause, pid=None, away="", **counts)
            await wait(self.stopping, backoff_s(self.status.failures))
            self._set(state="starting", detail="", restarts=self.status.restarts + 1)
        self._set(state="stopped", detail="", pid=None)

    def stop(self) -> None:
        """Send SIGTERM, so that it drains; kill it after the grace period. Idempotent."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        if self._process is not None:
            self._terminate(self._process)

    def kill(self) -> None:
        """Kill it and its descendants."""
        self.stopping.set()
        if self._process is not None:
            _kill_group(self._process.pid)

    def rotate_log(self) -> None:
        """Put a log aside that has grown long; the process goes on in a new one, and loses no line."""
        with contextlib.suppress(OSError):  # it has not opened the new one yet, or the disk is gone
            if self._line is not None and put_aside(self.program.log):
                self._line.write(os.fsencode(self.program.log) + b"\n")
                self._log_start = 0

    async def _run_once(self) -> str:
        """Run one process until it exits. Returns why it exited."""
        self._was_ready = False
        ours, theirs = socket.socketpair()
        with theirs:
            lives = (new_life(), *self.status.lives[:1])
            self._set(state="starting", detail="", since=time.time(), lives=lives)
            try:
                process = await self._spawn(theirs.fileno())
            except OSError as error:
                ours.close()
                return f"cannot be started: {error}"
        self._process = process
        for refused in bind(process.pid, self.program.bounds):
            log.warning("%s is not bounded as it should be: %s", self.program.id, refused)
        self._set(pid=process.pid)
        if self.stopping.is_set():  # `stop` was called while the process was being created
            self._terminate(process)
        watching = asyncio.create_task(self._watch(ours))
        code = await process.wait()
        self._process = None
        if self._killer is not None:
            self._killer.cancel()
        _kill_group(process.pid)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OUTPUT_TIMEOUT_S):  # for its last output
                await watching
        return self._cause(code)

    async def _spawn(self, line: int) -> Process:
        program = self.program
        with open_private(program.log, "ab") as log:
            self._log_start = log.tell()
            return await asyncio.create_subprocess_exec(
                *program.argv,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                cwd=program.cwd,
                env={**program.env, ENV: str(line), LIFE: self.status.lives[0]},
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
        self._line = writer if self.program.probe is None else None
        try:
            if self.program.probe is not None:
                while (state := await self.program.probe()) != "ready":
                    self._set(state="starting", detail="" if state == "starting" else state)
                    await asyncio.sleep(PROBE_INTERVAL_S)
                self._set(state="ready", detail="")
            while (message := await reader.readline()).endswith(b"\n"):  # a kill may cut the last one off
                self._on_message(json.loads(message))
        except ConnectionError:
            pass  # it exited without reporting; its exit code is reported
        except ValueError:
            self._set(detail="says a line too long to be a state")
        finally:
            self._line = None
            writer.close()

    def _on_message(self, said: dict[str, str]) -> None:
        """`said`: what penstock/process.py sends."""
        if "away" in said:
            why, now = said["away"], self.status
            since = now.away_since if now.away else time.time()
            self._set(away=why, away_since=since if why else 0.0)
        else:
            self._set(state=said["state"], detail=said["detail"])

    def _cause(self, code: int) -> str:
        if self.status.state == "failed" and self.status.detail:
            return self.status.detail
        ending = f"killed by {signal_name(-code)}" if code < 0 else f"exit {code}"
        records_count = code > 0  # what a process logged does not explain a signal; what a library wrote may
        words = "" if code == -signal.SIGKILL else last_words(self.program.log, self._log_start, records=records_count)
        return f"{ending}: {words}" if words else ending

    def _set(self, **changes: Any) -> None:
        changed = replace(self.status, **changes)
        if changed.state == "ready":
            self._was_ready, changed = True, replace(changed, failed_starts=0)
        if changed != self.status:
            self.status = changed
            self._on_change(self)


def counts_after(before: ProcessEntry, *, was_ready: bool, ran_s: float) -> dict[str, int]:
    """The counts of a child after an exit: its fields of ProcessEntry. `was_ready`: whether it had been ready."""
    failures = 1 if was_ready and ran_s >= STABLE_S else before.failures + 1
    return {"failures": failures, "failed_starts": 0 if was_ready else before.failed_starts + 1}


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
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - TAIL_BYTES))
            line = file.read().decode(errors="replace").strip().split("\n")[-1]
    except OSError:
        return ""
    record = record_of(line)
    if record is not None and (not records or record.get("level") in ("debug", "info")):
        return ""
    return message_of(line)[:200]


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: macOS, for a group that is gone
        os.killpg(pid, signal.SIGKILL)


class Supervisor:
    """Supervises children. It calls `on_change` with a child whenever its status has changed."""

    def __init__(self, on_change: Callable[[Child], None]) -> None:
        self.children: dict[str, Child] = {}
        """By id, oldest first, without stopped ones that have exited."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._broken: BaseException | None = None

    def start(self, program: Program) -> Child:
        """Keep one process of this program running until it is stopped."""
        child = Child(program, self._on_child_change)
        self.children[program.id] = child
        task = asyncio.create_task(child.run(), name=program.id)
        self._tasks[program.id] = task
        task.add_done_callback(lambda _: self._forget(program.id))
        self.guard(task)
        return child

    def guard(self, task: asyncio.Task[None]) -> None:
        """Watch a task of the supervisor's own: if it fails, `until` raises its error."""
        task.add_done_callback(self._ended)

    def of(self, *roles: str) -> list[Child]:
        """Return the child processes that run one of these roles, oldest first."""
        return [child for child in self.children.values() if child.program.role in roles]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition`, which is evaluated when a child changes or on `wake`. Raises what it raises."""
        while not condition():
            if self._broken is not None:
                raise self._broken
            await self._changed.wait()

    def wake(self) -> None:
        """Make `until` evaluate its condition again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def keep_rotating(self) -> None:
        """Keep the logs of all children from growing without end."""
        while True:
            await asyncio.sleep(ROTATE_INTERVAL_S)
            for child in self.children.values():
                child.rotate_log()

    async def stop(self, *roles: str) -> None:
        """Drain the children of these roles together, and wait until they have exited."""
        tasks = [self._tasks[child.program.id] for child in self.of(*roles)]
        for child in self.of(*roles):
            child.stop()
        if tasks:
            await asyncio.wait(tasks)

    def kill(self, *roles: str) -> None:
        """Kill the children of these roles."""
        for child in self.of(*roles):
            child.kill()

    def _on_child_change(self, child: Child) -> None:
        self._on_change(child)
        self.wake()

    def _forget(self, child_id: str) -> None:
        del self.children[child_id], self._tasks[child_id]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._broken = self._broken or (None if task.cancelled() else task.exception())
        self.wake()


PLAN_INTERVAL_S = 0.5


class PoolSupervisor:
    """One pool on this machine. `program` builds the worker with a given id; `shape` is "" for a model's only pool."""

    def __init__(
        self,
        supervisor: Supervisor,
        model: str,
        settings: ModelSettings,
        program: Callable[[str], Program],
        shape: str = "",
    ) -> None:
        self._supervisor, self._program, self._resources = supervisor, program, settings.resources
        self.model, self.shape, self.least, self.most = model, shape, settings.min_workers, settings.most_workers

    @property
    def members(self) -> list[Child]:
        """Workers that are not stopping, oldest first."""
        pool = (self.model, self.shape)
        workers = [child for child in self._supervisor.of("worker") if not child.stopping.is_set()]
        return [child for child in workers if (child.program.model, child.program.shape) == pool]

    def fill(self) -> None:
        """Start workers up to the minimum."""
        for _ in range(self.least - len(self.members)):
            self._start(self._free_id())

    async def follow(self, plan: Plan, plans: Plans, by: str) -> None:
        """Start workers, or drain the newest ones; replace cordoned ones. `by`: unique name of this machine. Raises
        Unavailable."""
        for child in self.members:
            if child.status.state == "draining":  # the scheduler has cordoned it
                log.info("%s drains and is replaced: %s", child.program.id, child.status.detail)
                child.stop()
        want = plan.pools.get(self.shape)
        if want is None:  # the plan is older than the model's shapes
            return
        total = min(max(want, self.least), self.most)
        members = self.members
        size = await plans.share(plan.epoch, pool_name(self.model, self.shape), by, len(members), total)
        if size is None:
            return
        for _ in range(size - len(members)):
            name = self._free_id()
            if not await plans.act(plan.epoch, self._action("start", name, plan, by)):
                return
            self._start(name)
        for child in reversed(members[size:]):
            if not await plans.act(plan.epoch, self._action("drain", child.program.id, plan, by)):
                return
            child.stop()

    def _action(self, kind: ActionKind, worker: str, plan: Plan, by: str) -> Action:
        log.info("%s %s of %s (%s)", kind, worker, pool_name(self.model, self.shape), plan.reason)
        return Action(model=self.model, kind=kind, worker=worker, shape=self.shape, reason=plan.reason, by=by)

    def _start(self, name: str) -> None:
        bounds = ProcessLimits.of(self._resources, [child.program.bounds for child in self._supervisor.of("worker")])
        self._supervisor.start(with_changes(self._program(name), bounds=bounds))

    def _free_id(self) -> str:
        names = (f"worker-{number}" for number in itertools.count(1))
        return next(name for name in names if name not in self._supervisor.children)


async def follow(pools: Sequence[PoolSupervisor], plans: Plans, by: str, on_store: Callable[[str], object]) -> None:
    """Keep every pool at the planned size. While Redis is unavailable, pools stay as they are.

    Args:
        on_store: told in each round why Redis is unavailable; "" while it is not.
    """
    async with contextlib.aclosing(plans.news(PLAN_INTERVAL_S)) as news:
        async for _ in news:
            why = ""
            try:
                found = await plans.read()
                for pool in pools:
                    if (plan := found.get(pool.model)) and plan.pool == "local":
                        await pool.follow(plan, plans, by)
            except Unavailable as error:
                why = str(error)
                log.warning("the plan cannot be followed, the pools stay as they are: %s", error)
            on_store(why)


class LeaseRelease:
    """Gives up the lease of each worker of one supervisor that has exited.

    It knows a lease only from the lifeline of the process that held it: the lease of a stopped (SIGSTOP) worker, of a
    successor or of another machine's worker is never touched. If Redis does not answer, the lease lapses as usual.
    """

    def __init__(self, reaper: Reaper, fleet: Fleet) -> None:
        """`fleet`: an exited worker is removed from it, so that its slots and tokens count no longer."""
        self._reaper, self._fleet = reaper, fleet
        self._leases: dict[str, str] = {}
        """Lease of each running worker process, by the worker's id."""
        self._tasks: set[asyncio.Task[None]] = set()

    def noticed(self, child: Child) -> None:
        """Call this whenever the status of a worker has changed."""
        name, status = child.program.id, child.status
        if status.state == "ready":
            self._leases[name] = status.detail
        elif status.pid is None and (lease := self._leases.pop(name, "")):
            spawn(self._release(name, lease, status.cause), self._tasks)

    async def close(self, timeout_s: float) -> None:
        """Wait for the releases that have begun, at most `timeout_s`, and drop the others."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _release(self, worker: str, lease: str, cause: str) -> None:
        """End the lease, and log with which last words its worker left which jobs."""
        try:
            swept = await self._reaper.sweep(ended=lease)
        except Unavailable as error:
            log.warning("%s: its jobs wait until lease %s lapses: %s", worker, lease, error)
        else:
            own = f"{worker}@{socket.gethostname()}"  # other machines have workers of the same id
            held = [job_id for lapse in swept.lapses if lapse.worker == own for job_id in lapse.jobs]
            said = f"{worker} has exited{f' ({cause})' if cause else ''}"
            back, jobs = counted(swept.requeued, "job"), {"jobs": held} if held else {}
            log.info("%s: lease %s ends, %s back in the queue", said, lease, back, extra=jobs)
        with contextlib.suppress(Unavailable):  # its entry expires a little later
            await self._fleet.remove(lease)
