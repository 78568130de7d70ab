"""`penstock logs`: the log files of a data folder's processes, merged in the order of time, as JSON or for people."""

from __future__ import annotations

import contextlib
import heapq
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO

import click

from cli.log_lines import LogLine, is_of_trace, is_poll, parse_line, pretty, starts_run
from cli.options import Where, command
from cli.output import DONE, INTERRUPTED, Problem, fitted, print_json, shorten_ids, styled, visible
from cli.processes import ORDER

FOLLOW_INTERVAL_S = 0.2
MIN_RUNS = 2
"""Runs that the logs must have, so that one is the previous one."""
COLOURS = {"warning": 33, "error": 31, "critical": 31}
BLOCK_BYTES = 1 << 20
INDENT = len("11-24 02:12:13.123 ")


@dataclass(slots=True)
class Filters:
    """Which lines to show; "": any. A line is of a job if it names it anywhere."""

    job: str = ""
    trace: str = ""
    role: str = ""
    process: str = ""
    since: str = ""
    until: str = ""
    """Times; a line without one passes if none is asked for."""
    polls: bool = True

    def passes(self, line: LogLine, raw: str) -> bool:
        return (
            (self.polls or not is_poll(line))
            and (self.since <= line.time and (not self.until or line.time < self.until))
            and self.job in raw
            and (not self.trace or is_of_trace(line, self.trace))
            and self.role in ("", line.role)
            and self.process in ("", line.process)
        )


@dataclass(slots=True)
class LogFile:
    """One process's log, read once from its start and then on. A file that was begun anew is read from its start; the
    older one beside it, `.log.1`, is read first, and once."""

    path: Path
    offset: int = 0
    inode: int = 0
    before: str = ""
    rest: bytes = field(default=b"", repr=False)
    """The last line, while its end is not written."""
    is_first: bool = True

    @property
    def process(self) -> str:
        return process_of(self.path)

    def lines(self, filters: Filters) -> Iterator[LogLine]:
        """Yield the lines that pass, from where the last call ended."""
        older = self.path.with_name(f"{self.process}.log.1")
        for path in (older, self.path) if self.is_first else (self.path,):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                yield from self._of(file, filters)
        self.is_first = False

    def _of(self, file: BinaryIO, filters: Filters) -> Iterator[LogLine]:
        now = os.fstat(file.fileno())
        if now.st_ino != self.inode or now.st_size < self.offset:
            self.inode, self.offset, self.rest = now.st_ino, 0, b""
        file.seek(self.offset)
        while block := file.read(BLOCK_BYTES):
            self.offset += len(block)
            *whole, self.rest = (self.rest + block).split(b"\n")
            for raw in whole:
                text = raw.decode(errors="replace")
                line = parse_line(self.process, text, self.before)
                self.before = line.time
                if text and filters.passes(line, text):
                    yield line


def process_of(path: Path) -> str:
    """The process that writes this file, as `penstock ps` names it."""
    return path.name.partition(".log")[0]


@command("logs", redis=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines, until Ctrl-C.")
@click.option("--job", default="", help="Only lines that name this job.")
@click.option("--trace", default="", help="Only lines that name this trace, by its id or the beginning of it.")
@click.option("--role", type=click.Choice((*ORDER, "up")), default=None, help="Only processes of this role.")
@click.option("--process", default="", help="Only this process, as `penstock ps` names it.")
@click.option("-n", "--lines", "count", type=click.IntRange(0), help="Only the newest N lines [all].")
@click.option("--previous", is_flag=True, help="Only the run of `penstock up` before the newest one.")
@click.option("-v", "--verbose", is_flag=True, help="On a terminal, show ids too.")
@click.option("--pretty", "for_people", is_flag=True, help="Lines for people, also into a pipe.")
@click.option(
    "--polls",
    is_flag=True,
    help="For people, too: what the console, `top`, `jobs watch` and waiting programs ask again and again.",
)
def logs(
    follow: bool,
    job: str,
    trace: str,
    role: str | None,
    process: str,
    count: int | None,
    previous: bool,
    where: Where,
    for_people: bool,
    polls: bool,
    verbose: bool,
    as_json: bool,
) -> int:
    """Show what the processes of a data folder have logged, in the order of time, also in earlier runs.

    On a terminal in the time zone of this machine; into a pipe as JSON lines, in UTC.

    \b
    Examples:
      penstock logs -f
      penstock logs --job job_0074d316
      penstock logs --role worker -n 100
      penstock logs --pretty --trace 4bf92f35
    """
    if for_people and as_json:
        raise click.UsageError("--pretty and --json exclude each other")
    folder = where.home().logs
    files: dict[Path, LogFile] = {}
    filters = Filters(job, trace.lower(), role or "", process.removesuffix(f"@{socket.gethostname()}"))
    as_json = as_json or not (for_people or sys.stdout.isatty())
    filters.polls = polls or as_json
    if not any(folder.glob("*.log*")):
        what = f"there are no logs in {folder}"
        raise Problem(what, next_step="penstock up, or name another folder with --data-dir", code="no_logs")
    if previous:
        filters.since, filters.until = _previous_run(folder)
    try:
        found: Iterable[LogLine] = merged(folder, files, filters)
        show = partial(_show, as_json=as_json, ids=verbose)
        shown = show(found if count is None else deque(found, count))
        if not (shown or follow or count == 0):
            raise _nothing(filters, folder, files)
        while follow and not previous:
            time.sleep(FOLLOW_INTERVAL_S)
            show(merged(folder, files, filters))
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE


def _previous_run(folder: Path) -> tuple[str, str]:
    """When the run of `penstock up` before the newest one began, and when that one did. Raises Problem."""
    times = [line.time for line in LogFile(folder / "up.log").lines(Filters()) if starts_run(line)]
    if len(times) < MIN_RUNS:
        raise Problem(
            f"the logs in {folder} have no run before the newest one", next_step="penstock logs", code="no_lines"
        )
    return times[-2], times[-1]


def from_now(folder: Path) -> dict[Path, LogFile]:
    """The logs of a folder, without the lines that are there."""
    files = {path: LogFile(path, is_first=False) for path in _paths(folder)}
    for path, file in files.items():
        with contextlib.suppress(FileNotFoundError):  # there is an older one alone
            now = path.stat()
            file.inode, file.offset = now.st_ino, now.st_size
    return files


def _paths(folder: Path) -> list[Path]:
    """The newest log of each process."""
    return [folder / f"{name}.log" for name in sorted({process_of(path) for path in folder.glob("*.log*")})]


def merged(folder: Path, files: dict[Path, LogFile], filters: Filters) -> Iterator[LogLine]:
    """Merge what is new in all files, by time. Each file is in that order already, nearly."""
    for path in _paths(folder):
        files.setdefault(path, LogFile(path))
    return heapq.merge(*(file.lines(filters) for file in files.values()), key=attrgetter("time"))


def _nothing(filters: Filters, folder: Path, files: Iterable[Path]) -> Problem:
    """Why no line was shown."""
    given = [("job", filters.job), ("trace", filters.trace), ("role", filters.role), ("process", filters.process)]
    wanted = ", ".join(f"{name} {value}" for name, value in given if value)
    what = f"no line of the logs in {folder} is of {wanted}" if wanted else f"the logs in {folder} are empty"
    cause = "there are logs of " + ", ".join(sorted(process_of(path) for path in files))
    return Problem(what, cause=cause, next_step="penstock jobs ls" if filters.job else "penstock ps", code="no_lines")


def _show(found: Iterable[LogLine], *, as_json: bool, ids: bool) -> int:
    """Returns how many lines it showed."""
    colour, shown = styled(sys.stdout, os.environ), 0
    for line in found:
        shown += 1
        if as_json:
            print_json(line.fields)
            continue
        lines = shorten_ids(visible(pretty(line, ids=ids))).split("\n")
        text = "\n".join(part for each in lines for part in fitted(sys.stdout, each, INDENT))
        code = COLOURS.get(str(line.fields.get("level"))) if colour else None
        sys.stdout.write(f"\x1b[{code}m{text}\x1b[0m\n" if code else f"{text}\n")
    sys.stdout.flush()
    return shown
