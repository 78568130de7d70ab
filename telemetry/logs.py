"""JSON log formatter: writes each log record as one JSON line on stderr, with trace ids and with secrets redacted.

Modules use the standard library's `logging` as usual; a process's `__main__` calls `setup` once. Files and rotation are
the business of whatever starts the process and owns its stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from types import TracebackType
from typing import Any, TextIO

import msgspec

from penstock.config import hide_environment
from telemetry.redaction import clean, redact
from telemetry.tracing import current

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes of every record; all others came from `extra`."""

_NOT_ESCAPED_BY_JSON = re.compile("[\x7f-\x9f\u2028\u2029]")
"""Legal inside a JSON string, but a terminal may interpret them and a line reader may break lines at them."""


def setup(service: str, level: str, stream: TextIO | None = None) -> None:
    """Write every log record of this process from `level` up to `stream` (default stderr) as JSON lines.

    `level` is debug, info, warning or error. Replaces existing handlers; captures Python's warnings too.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(service))
    hide_environment(os.environ)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request of this process at info
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda end: _uncaught(end.exc_type, end.exc_value, end.exc_traceback)


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Log an uncaught exception of the process or a thread like any other record, because Python's own traceback would
    not redact secrets."""
    if error is not None and issubclass(kind, Exception):
        name = threading.current_thread().name
        logging.getLogger("uncaught").critical("an error ends thread %s", name, exc_info=(kind, error, trace))
    elif error is not None and kind is not SystemExit:
        sys.__excepthook__(kind, error, trace)


class JsonLines(logging.Formatter):
    """Formats a record as a JSON line: time, level, service, pid, logger, message, trace ids, extras, exception."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service, self._pid = service, os.getpid()
        self._encoder = msgspec.json.Encoder(enc_hook=lambda value: redact(str(value)))

    def format(self, record: logging.LogRecord) -> str:
        """The line without its newline. A value that cannot be encoded becomes text, so that no record is lost."""
        event = clean(self._event(record))
        try:
            line = self._encoder.encode(event)
        except Exception:  # noqa: BLE001 - an extra's own __str__, a lone surrogate, an integer of 65 bits may raise
            line = self._encoder.encode({key: _plain(value) for key, value in event.items()})
        return _NOT_ESCAPED_BY_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", line.decode())

    def event_line(self, logger: str, message: str, fields: Mapping[str, object]) -> str:
        """The line of an EventLog's record, with its newline."""
        now = time.time()
        event = {
            "time": f"{_to_the_second(int(now))}{int(now % 1 * 1000):03d}Z",
            "level": "info",
            "service": self._service,
            "pid": self._pid,
            "logger": logger,
            "message": message,
            **fields,
        }
        return self._encoder.encode(event).decode() + "\n"

    def _event(self, record: logging.LogRecord) -> dict[str, Any]:
        event: dict[str, Any] = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            "service": self._service,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        span = current()
        if span is not None:
            event |= {"trace_id": span.trace_id, "span_id": span.span_id}
        for key, value in vars(record).items():
            if key not in _STANDARD:
                event.setdefault(key, value)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            event["stack"] = record.stack_info
        return event


class EventLog:
    """Writes records at level info that come once for each job or request, at a tenth of the cost of others.

    It does not search them for secrets: the message is constant, and no field may hold foreign text.
    """

    def __init__(self, name: str, *, at_once: bool = True) -> None:
        """`at_once`: write each record before `write` returns, for what follows may end this process. Otherwise the
        records of one iteration of the event loop are written together: a write costs a system call."""
        self._logger, self._at_once = logging.getLogger(name), at_once
        self._lines: list[str] = []

    def write(self, message: str, **fields: object) -> None:
        """Write one record with these fields."""
        if not self._logger.isEnabledFor(logging.INFO):
            return
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and isinstance(handler.formatter, JsonLines):
                self._lines.append(handler.formatter.event_line(self._logger.name, message, fields))
                if self._at_once:
                    self._flush(handler)
                elif len(self._lines) == 1:
                    asyncio.get_running_loop().call_soon(self._flush, handler)
                return
        self._logger.info(message, extra=fields)

    def _flush(self, handler: logging.StreamHandler[TextIO]) -> None:
        lines, self._lines = self._lines, []
        try:
            with handler.lock or contextlib.nullcontext():
                handler.stream.write("".join(lines))
                handler.flush()
        except Exception:  # noqa: BLE001 - a log that cannot be written ends no work, as in logging.Handler
            handler.handleError(logging.makeLogRecord({"name": self._logger.name, "msg": "events are lost"}))


@lru_cache(maxsize=2)
def _to_the_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.")


def rfc3339(seconds: float) -> str:
    """A Unix time as RFC 3339 in UTC, with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: Any) -> str:
    try:
        text = redact(str(value))
    except Exception as error:  # noqa: BLE001 - the value's own __str__ raised; log its type
        text = f"<{type(value).__name__} cannot be shown: {type(error).__name__}>"
    return text.encode("utf-8", "backslashreplace").decode()
