"""Terminal output of `penstock up`: the current phase, process failures, logs, and the ready block."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import stat
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from cli.instance import MIN_DEATHS, Instance, Suspicion
from cli.log_lines import text_of
from cli.logs import Filters, from_now, merged
from cli.options import completed, own_command, short_path
from cli.output import ERROR_INDENT, Problem, error_block, terminal_width, wrapped
from cli.progress import ProgressLine
from cli.settings import UpSettings
from cli.supervisor import Child
from penstock.text import counted

MIN_CRASHES = MIN_DEATHS
"""Consecutive failures after which a process counts as crash-looping."""
FIGURES = re.compile(r"0x[0-9a-f]+|[0-9]+")
TAIL_INTERVAL_S = 0.2
INDENT = " " * len("  Console  ")
QUESTION = "What is a penstock?"

log = logging.getLogger(__name__)


class Screen:
    """Prints the lines of one `up`, and logs every event, repeated ones included."""

    def __init__(self, progress: ProgressLine) -> None:
        self._progress = progress
        self._looping: dict[str, set[str]] = {}
        """The causes reported of each process that is crash-looping, as `_kind` has them."""
        self._lost_at: dict[str, float] = {}
        """Since when (monotonic) each process is not there, or what it waits for."""

    def phase(self, text: str) -> None:
        """Show the current phase; "" for none."""
        self._progress.phase(text)

    def say(self, text: str, indent: int = 0) -> None:
        """Print permanent lines."""
        self._progress.say(text, indent)

    def complain(self, problem: Problem) -> None:
        """Print the error block of a problem that does not end `up`."""
        problem.next_step = completed(problem.next_step)
        self.say("\n".join(error_block(problem)), ERROR_INDENT)

    def ready(self, instance: Instance, console_path: str, *, keyed: bool) -> None:
        """Print the ready block to stdout."""
        self._progress.phase("")
        show_ready(instance, console_path, keyed=keyed)

    def noticed(self, child: Child, *, starting: bool, releasing: bool = False) -> str:
        """Report a process that exited by itself, and once that it keeps doing so; and a worker whose servers are away.
        Returns what to report of its recovery, "" if it has not recovered now.

        While everything is `starting`, a crash loop is not reported here: it may end `up`, which then reports it.
        `releasing`: `released` follows, which reports a crash loop when it is known what the worker ran.
        """
        status, name = child.status, child.program.id
        if status.state == "restarting" and status.pid is None:
            log.warning("%s ended (%s), failure %d", name, status.cause, status.failures)
            self._lost_at.setdefault(name, time.monotonic())
            if status.alike == 1 or (status.was_ready and not looping(child)):
                self.say_when(f"{name} ended ({status.cause}); starting it again")
            elif not (starting or releasing):
                self._complain_once(child)
        elif status.state == "ready":
            self._looping.pop(name, None)
            self.waits(f"the server of {name}", status.away)
            if name in self._lost_at:
                return f"{name} is ready again after {self._away_s(name)}"
        return ""

    def waits(self, what: str, why: str) -> None:
        """Report that something which processes wait for is away, and that it is back (`why`: "")."""
        if why and what not in self._lost_at:
            self._lost_at[what] = time.monotonic()
            log.warning("%s is away: %s", what, why)
            self.say_when(f"{what} is away ({why}); accepted jobs wait")
        elif not why and what in self._lost_at:
            words = f"{what} is back after {self._away_s(what)}"
            log.info("%s", words)
            self.say_when(words)

    def _away_s(self, what: str) -> str:
        return f"{time.monotonic() - self._lost_at.pop(what):.1f} s"

    def released(self, child: Child, suspicion: Suspicion | None, *, starting: bool) -> None:
        """Report the death of a worker of whose jobs it is known what became of them: each one that a job is suspected
        of, else a crash loop."""
        if suspicion is not None:
            name = child.program.id
            log.warning("%s", suspicion.sentence, extra={"jobs": list(suspicion.jobs)})
            self._looping.setdefault(name, set()).add(_kind(child))
            self._complain_when(fatal_job(child, suspicion))
        elif not starting:
            self._complain_once(child)

    def _complain_once(self, child: Child) -> None:
        reported = self._looping.get(child.program.id, set())
        if looping(child) and _kind(child) not in reported:
            self._looping[child.program.id] = reported | {_kind(child)}
            self._complain_when(crash_loop(child))

    def _complain_when(self, problem: Problem) -> None:
        """Print an error block with the time."""
        problem.cause = f"{problem.cause} ({time.strftime('%H:%M:%S')})"
        self.complain(problem)

    def say_when(self, text: str) -> None:
        """Print a line with the time."""
        self.say(f"{time.strftime('%H:%M:%S')} {text}")

    async def tail(self, folder: Path) -> None:
        """Print new log lines of all processes, each with its process's name."""
        files = from_now(folder)  # earlier runs wrote what is there
        while True:
            for line in merged(folder, files, Filters()):
                self.say(f"{line.process}: {text_of(line.fields)}")
            await asyncio.sleep(TAIL_INTERVAL_S)


def looping(child: Child) -> bool:
    """Whether a process is crash-looping."""
    return child.status.alike >= MIN_CRASHES


def crash_loop(child: Child) -> Problem:
    """The error for a crash-looping process."""
    program, status = child.program, child.status
    times = counted(status.alike, "time")
    if status.was_ready:
        times += ", each soon after its start"
    return Problem(
        f"{program.id} ended {times}" if status.was_ready else f"{program.id} did not start {times} in a row",
        cause=status.cause,
        next_step=f"penstock doctor; its log is {program.log}",
        code="crash_loop",
    )


def _kind(child: Child) -> str:
    """What distinguishes the causes to report: the words without figures, which may differ each time."""
    return FIGURES.sub("0", f"{child.status.was_ready} {child.status.cause}")


def fatal_job(child: Child, suspicion: Suspicion) -> Problem:
    """The error for a worker that has died of a job, as it seems."""
    job = suspicion.jobs[0]
    after = (
        f"penstock dlq show {job}"
        if suspicion.given_up
        else f"penstock logs --job {job}, or end it: penstock jobs cancel {job}"
    )
    return Problem(
        f"{suspicion.sentence}{'; it is a dead letter now' if suspicion.given_up else ''}",
        cause=child.status.cause,
        next_step=f"{after}; its log is {child.program.log}",
        code="crash_loop",
    )


def show_ready(instance: Instance, console_path: str, *, detached: bool = False, keyed: bool = False) -> None:
    """Print the ready block to stdout. `console_path`: at which the console logs its reader in; "": none."""
    width = terminal_width(sys.stdout) if sys.stdout.isatty() else None
    if not (
        sys.stdout.isatty() or stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
    ):  # a log, which others may read
        console_path = ""
    command = own_command(sys.argv[0])
    lines = ready_block(instance, console_path, detached=detached, keyed=keyed, command=command, width=width)
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def ready_block(
    instance: Instance,
    console_path: str = "",
    *,
    detached: bool = False,
    keyed: bool = False,
    command: str = "penstock",
    width: int | None = None,
) -> list[str]:
    """The lines printed when everything is ready, with the next commands last.

    Args:
        command: what the shell of the user finds this program by.
        width: columns of the terminal. What is to be copied starts at the first column where it has no room behind its
            label; a link stays one line, which the terminal continues in the next row, and curl has several.
    """
    workers = sum(entry.role == "worker" for entry in instance.processes)
    here = Path(instance.data_dir)
    option = "" if here == UpSettings().data_dir.absolute() else f" --data-dir {shlex.quote(short_path(here))}"
    opened = f"{command} console{option}"
    link = instance.url + (console_path or "/console")
    hint = f"logs you in once, within an hour; later: {opened}" if console_path else f"logged in: {opened}"
    stop = f"{command} down{option}" if detached else "Ctrl-C (finishes running jobs, again to stop now)"
    lines = [
        f"ready in {instance.ready_s:.1f} s   engine {instance.engine}   model {', '.join(instance.models)}   "
        f"{counted(workers, 'worker')}{'' if workers else ': nothing answers until one starts'}",
        f"  API      {instance.url}/v1",
        *([f"  API      {instance.outside_url}/v1 (other machines)"] if instance.outside_url else []),
        *_copied("  Console  ", link, width),
        f"{INDENT}({hint})",
        f"  Kept     {_kept(instance)}",
        f"  Log      {short_path(here / 'logs')}",
        "",
        *_copied("  Try      ", _curl(instance, keyed=keyed), width, _curl(instance, keyed=keyed, end=" \\\n  ")),
        f'{INDENT}{command} chat{option} "{QUESTION}"',
        f"  Stop     {stop}",
    ]
    return lines if width is None else [part for line in lines for part in _fitted(line, width)]


def _fitted(line: str, width: int) -> list[str]:
    """The lines of one line of the ready block; what is to be copied stays in one."""
    return [line] if line.startswith(("http", "curl ", "  -", '  "')) else wrapped(line, width, len(INDENT))


def _copied(label: str, text: str, width: int | None, lines: str = "") -> list[str]:
    """The label and what is to be copied; `lines`: the same in several, for a terminal that is too narrow."""
    if width is None or len(label + text) <= width:
        return [label + text]
    return [label.rstrip(), *(lines or text).split("\n")]


def draining(jobs: int | None) -> str:
    """The message after the first Ctrl-C; `jobs` is None if the number is unknown."""
    return f"draining{' ' + counted(jobs, 'job') if jobs else ''}, Ctrl-C again to stop now"


def phase_of(children: list[Child]) -> str:
    """What `up` waits for, or "": a process that reports a phase, else the first that is not ready."""
    waiting = [child for child in children if child.status.state in ("starting", "restarting")]
    if not waiting:
        return ""
    child = next((child for child in waiting if child.status.detail), waiting[0])
    if child.status.state == "restarting":
        return f"{child.program.id}: waiting to start it again"
    return f"{child.program.id}: {child.status.detail or 'starting'}"


def _kept(instance: Instance) -> str:
    here = Path(instance.data_dir)
    if any(entry.role == "redis" for entry in instance.processes):
        return f"{short_path(here)}  (queue and results survive a restart)"
    return f"in Redis at {place(instance.redis_url)}"


def place(redis_url: str) -> str:
    """The address of a Redis URL (it may name several hosts), without its password."""
    parts = urlsplit(redis_url)
    return parts.netloc.rpartition("@")[2] or parts.path


def _curl(instance: Instance, *, keyed: bool, end: str = " ") -> str:
    """A request to try; `end` is written between its arguments, and the line break of it before the messages."""
    body = {"model": instance.models[0], "stream": True, "messages": [{"role": "user", "content": QUESTION}]}
    key = ['-H "Authorization: Bearer $PENSTOCK_API_KEY"'] if keyed else []
    data = json.dumps(body, separators=(",", ":")).replace(',"m', "," + end.lstrip(" \\") + '"m')
    url = f"{instance.url}/v1/chat/completions"
    return end.join([f"curl -N {url}", "-H 'Content-Type: application/json'", *key, f"-d {shlex.quote(data)}"])
