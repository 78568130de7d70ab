"""Supervised processes: real ones, in Python, that speak on the lifeline or die of something."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable
from itertools import groupby
from pathlib import Path

import pytest
from house import eventually

from cli import instance
from cli.instance import ProcessEntry
from cli.supervisor import Child, Program, Supervisor, backoff_s

pytestmark = pytest.mark.slow

READY = "from penstock.process import Lifeline; line = Lifeline.from_environ(); line.say('ready', 'at last')"
SERVE = f"{READY}; import time; time.sleep(600)"
IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
STUBBORN = f"{IGNORE}; {SERVE}"
FAILS = (
    "from penstock.process import Lifeline; Lifeline.from_environ().say('failed', 'no weights'); raise SystemExit(75)"
)
CRASHES = "print('first'); raise SystemExit('out of memory')"

WAIT_S = 30.0


class Room:
    """A supervisor, and every status its children went through."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[tuple[str, ProcessEntry]] = []
        self.supervisor = Supervisor(lambda child: self.seen.append((child.program.id, child.status)))

    def start(self, code: str, name: str = "worker-1", *, role: str = "worker", grace_s: float = 20.0) -> Child:
        argv, log = (sys.executable, "-c", code), self.folder / f"{name}.log"
        program = Program(role=role, id=name, argv=argv, log=log, env=dict(os.environ), grace_s=grace_s)
        return self.supervisor.start(program)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.supervisor.until(condition)

    async def ready(self, child: Child) -> int:
        """Wait until it is; its process id."""
        await self.until(lambda: child.status.state == "ready")
        return child.status.pid

    async def stop(self, *roles: str, seconds: float = WAIT_S) -> None:
        async with asyncio.timeout(seconds):
            await self.supervisor.stop(*(roles or ("worker",)))


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    room = Room(tmp_path)
    yield room
    room.supervisor.kill("worker", "api", "redis")
    await room.supervisor.stop("worker", "api", "redis")


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and is not yet waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "\nState:\tZ" not in status.read_text()


def gone(*pids: int) -> None:
    """Wait until none of them lives."""
    eventually(lambda: not any(map(alive, pids)), FileNotFoundError)


async def test_state_comes_over_the_lifeline(room: Room) -> None:
    """Starting, then what the process says of itself; one that is killed is started again under the same name and
    counted; a stopped child is forgotten and its process gone."""
    child = room.start(SERVE)
    killed = await room.ready(child)
    assert child.status.detail == "at last"
    os.kill(killed, signal.SIGKILL)
    await room.until(lambda: child.status.restarts == 1)
    pid = await room.ready(child)
    assert pid != killed and child.status.cause == "killed by SIGKILL"
    await room.stop()
    assert room.supervisor.children == {}
    states = [state for state, _ in groupby(status.state for _, status in room.seen)]
    assert [state for state in states if state != "starting"] == [
        "ready", "restarting", "ready", "draining", "stopped"
    ]  # fmt: skip
    assert states[0] == "starting"
    gone(pid)


async def test_a_line_that_is_too_long_ends_its_process_alone(room: Room) -> None:
    child = room.start(f"{READY}; line.say('ready', 'x' * (1 << 17)); import time; time.sleep(600)")
    await room.until(lambda: child.status.restarts == 1)
    assert "says a line too long to be a state" in [status.detail for _, status in room.seen]
    assert await room.ready(room.start(SERVE, "worker-2"))


AWAY = (
    "import time; from penstock.process import Lifeline; line = Lifeline.from_environ(); line.say('ready', 'lease')\n"
    "for why in ('', 'a (gone)', 'a (gone)', 'a (slow)', ''): line.note_away(why)\n"
    "time.sleep(600)"
)


WRITES = (
    "import sys; from penstock.process import Lifeline; line = Lifeline.from_environ(); line.say('ready')\n"
    "for number in range(10**9): sys.stderr.write(f'{number}\\n')"
)


async def test_a_long_log_is_put_aside_while_its_process_writes(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, and no line is lost: what was put aside is continued in the new file, for its owner only."""
    monkeypatch.setattr(instance, "MAX_LOG_BYTES", 20_000)
    child, log = room.start(WRITES), room.folder / "worker-1.log"
    await room.ready(child)
    for _ in range(3):
        while True:
            assert child.status.state == "ready"
            before = log.stat().st_ino if log.exists() else 0
            child.rotate_log()
            await asyncio.sleep(0.01)
            if before and log.exists() and log.stat().st_ino != before:
                break
    os.kill(child.status.pid or 0, signal.SIGKILL)
    await room.stop()
    written = (log.with_suffix(".log.1").read_text() + log.read_text()).split("\n")
    numbers = [int(line) for line in written[:-1]]
    assert numbers[0] > 0 and numbers == list(range(numbers[0], numbers[-1] + 1)), "the first ones were dropped"
    assert {stat.S_IMODE(path.stat().st_mode) for path in room.folder.glob("*.log*")} == {0o600}


async def test_servers_that_are_away_come_over_the_lifeline(room: Room) -> None:
    """Each change once, and the time of the first; what the process said before stays."""
    child = room.start(AWAY)
    await room.ready(child)
    await room.until(lambda: [s.away for _, s in room.seen if s.away][-1:] == ["a (slow)"] and not child.status.away)
    found = [status for _, status in room.seen if status.away]
    assert [status.away for status in found] == ["a (gone)", "a (slow)"]
    assert {status.detail for status in found} == {"lease"}
    assert found[0].away_since == found[1].away_since > 0 == child.status.away_since


ABORTS = "import os, sys; print({line!r}, file=sys.stderr, flush=True); os.abort()"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (FAILS, "no weights"),
        (CRASHES, "exit 1: out of memory"),
        (ABORTS.format(line="GGML_ASSERT(n > 0) failed"), "killed by SIGABRT: GGML_ASSERT(n > 0) failed"),
        (ABORTS.format(line='{"message": "jobs claimed"}'), "killed by SIGABRT"),
    ],
)
async def test_what_a_process_said_last_is_the_cause_of_its_end(code: str, cause: str, room: Room) -> None:
    """On the lifeline, else in its log; but not what it had logged before a library aborted."""
    child = room.start(code)
    await room.until(lambda: child.status.failures == 1)
    assert child.status.cause == cause


async def test_failed_starts_are_counted_anew_once_it_was_ready(room: Room) -> None:
    """What the doctor reads: how often in a row it has not started, and of what; none while it is ready."""
    switch = room.folder / "ready"
    code = (
        f"import pathlib\nif not pathlib.Path({str(switch)!r}).exists():\n    raise SystemExit('no weights')\n{SERVE}"
    )
    child = room.start(code)
    await room.until(lambda: child.status.failed_starts == 2)
    assert child.status.trouble == "does not start: exit 1: no weights"
    switch.touch()
    pid = await room.ready(child)
    assert (child.status.failed_starts, child.status.trouble) == (0, "")
    os.kill(pid, signal.SIGKILL)
    await room.until(lambda: child.status.cause == "killed by SIGKILL")
    assert child.status.trouble == "", "it started"
    pid = await room.ready(child)
    switch.unlink()
    os.kill(pid, signal.SIGKILL)
    await room.until(lambda: child.status.cause == "exit 1: no weights")
    assert child.status.failed_starts == 1


@pytest.mark.parametrize("line", ['{"logger": "workers.claimer", "jobs": {"a": 1}}', "[" * 5000])
async def test_a_child_is_started_again_whatever_its_log_holds(line: str, room: Room) -> None:
    child = room.start(f"print({line!r}); raise SystemExit(3)")
    await room.until(lambda: child.status.restarts == 1)
    assert child.status.cause.startswith("exit 3: ")


async def test_grace_period_ends_in_a_kill(room: Room) -> None:
    """A process that ignores SIGTERM does not hold up the way down."""
    pid = await room.ready(room.start(STUBBORN, grace_s=0.2))
    await room.stop()
    gone(pid)


async def test_nothing_to_finish_before_it_is_ready(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is still loading is not given the time that running jobs are."""
    monkeypatch.setattr("cli.supervisor.STARTING_GRACE_S", 0.1)
    loading = room.folder / "loading"
    code = f"{IGNORE}; import pathlib; pathlib.Path({str(loading)!r}).touch(); import time; time.sleep(600)"
    room.start(code, grace_s=600)
    await asyncio.to_thread(eventually, loading.exists)
    await room.stop()


async def test_kill_does_not_wait(room: Room) -> None:
    """The second Ctrl-C ends a draining process at once, long before its grace period."""
    child = room.start(STUBBORN, grace_s=600)
    pid = await room.ready(child)
    stopping = asyncio.create_task(room.supervisor.stop("worker"))
    await room.until(lambda: child.status.state == "draining")
    room.supervisor.kill("worker")
    async with asyncio.timeout(WAIT_S):
        await stopping
    gone(pid)


async def test_stop_while_it_waits_to_restart(room: Room) -> None:
    """Backing off does not delay the way down."""
    child = room.start(CRASHES)
    await room.until(lambda: child.status.failures == 4)
    await room.stop(seconds=backoff_s(4))


async def test_stop_before_it_runs(room: Room) -> None:
    """A child stopped in the moment of its start does not stay."""
    room.start(SERVE)
    await room.stop()
    assert room.supervisor.children == {}


async def test_grandchildren_end_with_a_process(room: Room, tmp_path: Path) -> None:
    """What a process leaves in its group when it dies is ended."""
    note = tmp_path / "grandchild"
    code = (
        f"{READY}; import subprocess, sys, time, pathlib;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(note)!r}).write_text(str(p.pid)); time.sleep(600)"
    )
    pid = await room.ready(room.start(code))
    grandchild = int(str(await asyncio.to_thread(eventually, lambda: note.exists() and note.read_text())))
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(gone, grandchild)


async def test_error_in_the_supervisor_is_not_silent(room: Room) -> None:
    """A watched task that breaks is raised to whoever waits."""

    async def broken() -> None:
        raise RuntimeError("boom")

    room.supervisor.guard(asyncio.create_task(broken()))
    with pytest.raises(RuntimeError, match="boom"):
        await room.until(lambda: False)
