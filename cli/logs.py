"""`penstock logs`: the log files of a data folder's processes, merged in the order of time, as JSON or for people.

Penstock's processes write JSON lines; Redis, and a program that crashes, write text."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import click

from cli.options import Command, Where, json_option, where_options
from cli.output import DONE, INTERRUPTED, Problem, fitted, print_json, shorten_ids, styled, visible
from cli.processes import ORDER

REDIS_LINE = re.compile(r"[0-9]+:[A-Z] ([0-9]{1,2} [A-Z][a-z]{2} [0-9]{4} [0-9:]{8}\.[0-9]{3}) ([.*#-]) (.*)")
REDIS_LEVELS = {".": "debug", "-": "debug", "*": "info", "#": "warning"}
START = "penstock %s starts"
"""The first record of each run of `penstock up` in its own log."""
STARTER = "cli.up"
"""The logger that writes START."""
HEAD = ("time", "level", "service", "pid", "logger", "message", "process", "exception", "stack", "trace_ids", "span_id")
"""Fields of a record that `pretty` does not show as `name=value`."""
FIRST_ERROR = 400
"""HTTP status."""
POLLED = frozenset(
    {
        *("/admin/overview", "/admin/jobs", "/admin/jobs/{job_id}", "/admin/dlq", "/admin/pools", "/admin/keys"),
        *("/admin/tenants", "/v1/batches", "/v1/batches/{batch_id}", "/v1/jobs/{job_id}"),
    }
)
"""Routes that are read again and again to see what has changed."""


ANY_ID = re.compile(r"(?:[a-z]{2,12}[-_])?[0-9a-f]{12,}")
"""Of a job, a request, a trace, a lease or anything else that gets a random id."""

SHORT_TRACE = 8


@dataclass(frozen=True, slots=True)
class LogLine:
    """One record of a process's log, in the form of its JSON."""

    time: str
    """RFC 3339 in UTC, by which lines are ordered."""
    process: str
    """The process's name in `penstock ps`."""
    role: str
    fields: dict[str, Any]


def record_of(line: str) -> dict[str, Any] | None:
    """The record of a JSON line; None for a text, and for JSON that is no record or nested too deeply to be read."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def message_of(line: str) -> str:
    """What a log line says, which always can be written as UTF-8; the line itself if it says nothing else."""
    record = record_of(line)
    said = text_of(record) if record else ""
    return (said or line.strip()).encode("utf-8", "backslashreplace").decode()


def parse_line(process: str, line: str, before: str) -> LogLine:
    """Parse a line. `before`: the time of the line before it, which counts for a text without a time."""
    fields = record_of(line) or _of_text(line, before)
    time = str(fields.get("time") or before)
    role = str(fields.get("service") or process.partition("-")[0])
    return LogLine(time, process, role, {"process": process, **fields})


def _of_text(line: str, before: str) -> dict[str, Any]:
    """The record of a line that is not JSON: of Redis, or a text. A line of Redis with a time that no clock shows is a
    text, too."""
    if match := REDIS_LINE.fullmatch(line):
        with contextlib.suppress(ValueError, OverflowError):
            local = datetime.strptime(match[1], "%d %b %Y %H:%M:%S.%f").astimezone(UTC)
            time = local.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            return {"time": time, "level": REDIS_LEVELS[match[2]], "message": match[3]}
    return {"time": before, "level": "info", "message": line}


def is_of_trace(line: LogLine, trace: str) -> bool:
    """Whether a line names a trace whose id begins so."""
    several = line.fields.get("trace_ids")
    named = [line.fields.get("trace_id"), *(several if isinstance(several, list) else ())]
    return any(isinstance(each, str) and each.startswith(trace) for each in named)


def is_poll(line: LogLine) -> bool:
    """Whether a line is a request that was answered and that an open page of the console, `penstock top`, `jobs watch`
    or a program that waits for a job repeats by itself."""
    fields = line.fields
    status, route = fields.get("status"), str(fields.get("route"))
    if fields.get("logger") != "api.access" or fields.get("method") != "GET" or not isinstance(status, int):
        return False
    return status < FIRST_ERROR and (route in POLLED or route.startswith("/console/assets/"))


def starts_run(line: LogLine) -> bool:
    """Whether a run of `penstock up` begins with this line."""
    before, after = START.split("%s")
    said = str(line.fields.get("message"))
    return line.fields.get("logger") == STARTER and said.startswith(before) and said.endswith(after)


def text_of(fields: dict[str, Any]) -> str:
    """What a record says, in one line: its message, or of a request what was asked and answered."""
    if fields.get("logger") == "api.access" and "status" in fields:
        asked = fields.get("route") or f"{fields.get('path') or ''} (no route)".strip()
        return f"{fields.get('method')} {asked} {fields['status']} {fields.get('ms')} ms"
    return str(fields.get("message", ""))


def pretty(line: LogLine, *, ids: bool = True) -> str:
    """Format a line for a terminal: local time, process, message, and the fields that these do not contain. Without
    `ids`, leave ids out; of a list of ids, give the number."""
    fields, said = line.fields, text_of(line.fields)
    added = (
        (name, value) for name, value in fields.items() if value != line.process and _adds(name, value, said, fields)
    )
    if not ids:
        named = ((name, value) for name, value in added if not (isinstance(value, str) and ANY_ID.fullmatch(value)))
        added = ((name, len(value) if isinstance(value, list) else value) for name, value in named)
    traces = ["\n" + str(fields[name]).rstrip() for name in ("exception", "stack") if fields.get(name)]
    shown = [said, *(f"{name}={_value(value, name)}" for name, value in added)]
    text = "  ".join(part for part in (" ".join(shown), *traces) if part)
    level = str(fields.get("level", ""))
    if level in ("warning", "error", "critical"):
        text = f"{level}: {text}"
    return f"{_clock(line.time)} {line.process:<12} {text}"


def _adds(name: str, value: Any, said: str, fields: dict[str, Any]) -> bool:
    """Whether a field says something that the message does not."""
    if fields.get("logger") == "api.access" and name in ("method", "route", "path", "status", "ms"):
        return False
    if value is False:  # a fact that is not so, such as `alone` of a claim
        return False
    return name not in HEAD and value not in (None, "", [], {}) and _value(value) not in said


def _value(value: Any, name: str = "") -> str:
    """`trace_id` as short as an id in a table."""
    if name == "trace_id":
        return str(value)[:SHORT_TRACE]
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _clock(time: str) -> str:
    """A time as this machine's clock shows it."""
    try:
        return datetime.fromisoformat(time).astimezone().strftime("%m-%d %H:%M:%S.%f")[:-3]
    except (ValueError, OverflowError):
        return "-" * len("11-24 02:12:13.123")


FOLLOW_INTERVAL_S = 0.2
MIN_RUNS = 2
"""Runs in the logs, of which one is the previous one."""
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


@click.command(cls=Command)
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines, until Ctrl-C.")
@click.option("--job", default="", help="Only lines that name this job.")
@click.option("--trace", default="", help="Only lines that name this trace, by its id or the beginning of it.")
@click.option("--role", type=click.Choice((*ORDER, "up")), default=None, help="Only processes of this role.")
@click.option("--process", default="", help="Only this process, as `penstock ps` names it.")
@click.option("-n", "--lines", "count", type=click.IntRange(0), help="Only the newest N lines [all].")
@click.option("--previous", is_flag=True, help="Only the run of `penstock up` before the newest one.")
@where_options(url=False, redis=False)
@click.option("-v", "--verbose", is_flag=True, help="On a terminal, show ids too.")
@click.option("--pretty", "for_people", is_flag=True, help="Lines for people, also into a pipe.")
@click.option(
    "--polls",
    is_flag=True,
    help="For people, too: what the console, `top`, `jobs watch` and waiting programs ask again and again.",
)
@json_option
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
