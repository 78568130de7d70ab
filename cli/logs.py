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

from cli.log_lines import LogLine, is_poll, parse_line, pretty
from cli.options import Where, command
from cli.output import Exit, Problem, fitted, print_json, shorten_ids, styled, visible
from cli.processes import ORDER

FOLLOW_INTERVAL_S = 0.2
COLOURS = {"warning": 33, "error": 31, "critical": 31}
BLOCK_BYTES = 1 << 20
INDENT = len("11-24 02:12:13.123 ")


@dataclass(slots=True)
class Filters:
    """Which lines to show; "": any. A line is of a job or trace if it names it anywhere."""

    job: str = ""
    trace: str = ""
    role: str = ""
    process: str = ""
    polls: bool = True

    def passes(self, line: LogLine, raw: str) -> bool:
        return (
            self.job in raw
            and (not self.trace or f'"{self.trace}' in raw)
            and self.role in ("", line.role)
            and self.process in ("", line.process)
            and (self.polls or not is_poll(line))
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

    @property
    def process(self) -> str:
        return process_of(self.path)

    def lines(self, filters: Filters) -> Iterator[LogLine]:
        """Yield the lines that pass, from where the last call ended."""
        older = self.path.with_name(f"{self.process}.log.1")
        if self.inode:
            with contextlib.suppress(FileNotFoundError):
                older = older if older.stat().st_ino == self.inode else self.path  # its rest, if it was put aside
        for path in dict.fromkeys((older, self.path)):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                yield from self._of(file, filters)

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
@click.option("-v", "--verbose", is_flag=True, help="On a terminal, show ids too.")
@click.option(
    "--polls", is_flag=True, help="For people, too: what the console, `top` and waiting programs ask again and again."
)
@click.option("--pretty", "for_people", is_flag=True, help="Lines for people, also into a pipe.")
def logs(
    follow: bool,
    job: str,
    trace: str,
    role: str | None,
    process: str,
    count: int | None,
    where: Where,
    for_people: bool,
    verbose: bool,
    polls: bool,
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
    as_json = as_json or not (for_people or sys.stdout.isatty())
    named = process.removesuffix(f"@{socket.gethostname()}")
    filters = Filters(job, trace.lower(), role or "", named, polls=polls or as_json)
    show = partial(_show, as_json=as_json, ids=verbose)
    if not any(folder.glob("*.log*")):
        what = f"there are no logs in {folder}"
        raise Problem(what, next_step="penstock up, or name another folder with --data-dir", code="no_logs")
    try:
        found: Iterable[LogLine] = merged(folder, files, filters)
        shown = show(found if count is None else deque(found, count))
        if not (shown or follow or count == 0):
            cause = "there are logs of " + ", ".join(sorted(map(process_of, files)))
            next_step = "penstock jobs ls" if job else "penstock ps"
            raise Problem(f"no such line is in {folder}", cause=cause, next_step=next_step, code="no_lines")
        while follow:
            time.sleep(FOLLOW_INTERVAL_S)
            show(merged(folder, files, filters))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    return Exit.DONE


def merged(folder: Path, files: dict[Path, LogFile], filters: Filters) -> Iterator[LogLine]:
    """Merge what is new in all files, by time. Each file is in that order already, nearly."""
    for name in sorted({process_of(path) for path in folder.glob("*.log*")}):
        path = folder / f"{name}.log"
        files.setdefault(path, LogFile(path))
    return heapq.merge(*(file.lines(filters) for file in files.values()), key=attrgetter("time"))


def _show(found: Iterable[LogLine], *, as_json: bool, ids: bool) -> int:
    """Returns how many lines it showed."""
    colour, shown = styled(sys.stdout, os.environ), 0
    for line in found:
        shown += 1
        if as_json:
            print_json(line.fields)
            continue
        text = fitted(sys.stdout, shorten_ids(visible(pretty(line, ids=ids))), INDENT)
        code = COLOURS.get(str(line.fields.get("level"))) if colour else None
        sys.stdout.write(f"\x1b[{code}m{text}\x1b[0m\n" if code else f"{text}\n")
    sys.stdout.flush()
    return shown
