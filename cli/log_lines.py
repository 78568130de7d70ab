"""One line of a process's log: reads it, and says what it says.

Penstock's processes write JSON lines; Redis, and a program that crashes, write text."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

REDIS_LINE = re.compile(r"[0-9]+:[A-Z] ([0-9]{1,2} [A-Z][a-z]{2} [0-9]{4} [0-9:]{8}\.[0-9]{3}) ([.*#-]) (.*)")
REDIS_LEVELS = {".": "debug", "-": "debug", "*": "info", "#": "warning"}
HEAD = ("time", "level", "service", "pid", "logger", "message", "process", "exception", "stack", "trace_ids", "span_id")
"""Fields of a record that `pretty` does not show as `name=value`."""
ANY_ID = re.compile(r"(?:[a-z]{2,12}[-_])?[0-9a-f]{12,}")
"""Of a job, a request, a trace, a lease or anything else that gets a random id."""

FIRST_ERROR = 400
"""HTTP status."""
POLLED = frozenset(
    {
        *("/admin/overview", "/admin/jobs", "/admin/jobs/{job_id}", "/admin/dlq", "/admin/pools", "/admin/keys"),
        *("/admin/tenants", "/admin/usage", "/v1/batches", "/v1/batches/{batch_id}", "/v1/jobs/{job_id}"),
    }
)
"""Routes that are read again and again to see what has changed."""
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


def is_poll(line: LogLine) -> bool:
    """Whether a line is a request that was answered and that an open page of the console, `penstock top` or a program
    that waits for a job repeats by itself."""
    fields = line.fields
    status, route = fields.get("status"), str(fields.get("route"))
    if fields.get("logger") != "api.access" or fields.get("method") != "GET" or not isinstance(status, int):
        return False
    return status < FIRST_ERROR and (route in POLLED or route.startswith("/console/assets/"))


def _of_text(line: str, before: str) -> dict[str, Any]:
    """The record of a line that is not JSON: of Redis, or a text. A line of Redis with a time that no clock shows is a
    text, too."""
    if match := REDIS_LINE.fullmatch(line):
        with contextlib.suppress(ValueError, OverflowError):
            local = datetime.strptime(match[1], "%d %b %Y %H:%M:%S.%f").astimezone(UTC)
            time = local.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            return {"time": time, "level": REDIS_LEVELS[match[2]], "message": match[3]}
    return {"time": before, "level": "info", "message": line}


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
    shown = [said]
    for name, value in fields.items():
        is_id = isinstance(value, str) and ANY_ID.fullmatch(value)
        if value != line.process and (ids or not is_id) and _adds(name, value, said, fields):
            brief = len(value) if isinstance(value, list) and not ids else value
            shown.append(f"{name}={_value(brief, name)}")
    traces = ["\n" + str(fields[name]).rstrip() for name in ("exception", "stack") if fields.get(name)]
    text = "  ".join(part for part in (" ".join(shown), *traces) if part)
    level = str(fields.get("level", ""))
    text = f"{level}: {text}" if level in ("warning", "error", "critical") else text
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
