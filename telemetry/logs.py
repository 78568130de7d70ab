"""One JSON line per event, on stderr: what happened, where, in which trace, and never a secret.

Everything goes through the standard library's `logging`; modules ask for their logger as usual and this module is
called once, in a process's `__main__`. It does not know files or rotation: who starts the process owns its stderr.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from telemetry.tracing import current

HIDDEN = "***"

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; the rest came as `extra`."""

_SECRET_KEY = re.compile(r"(?i)(proxy[-_])?authorization|(.*[-_])?(password|passwd|secret|api[-_]?key)")

_SECRETS = (
    (re.compile(r"(?i)(\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)[^\s/]*@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9._~+/=-]{4,}"), rf"\1 {HIDDEN}"),
    (
        re.compile(
            r"(?i)\b(authorization|password|passwd|secret|api[-_]?key)([\"']?\s*[:=]\s*[\"']?)(?!bearer|basic)[^\s\"',;&}]+"
        ),
        rf"\1\2{HIDDEN}",
    ),
)
"""The password of a URL, credentials after their scheme, and values named as secrets inside free text."""

_NOT_ESCAPED_BY_JSON = re.compile("[\x7f-\x9f\u2028\u2029]")
"""Legal inside a JSON string, yet a terminal obeys some of them and a line reader may break at others."""


def setup(service: str, level: str, stream: TextIO | None = None) -> None:
    """Send every log record of this process to `stream` (stderr) as JSON lines, from `level` up.

    `level` is debug, info, warning or error. Handlers set before are replaced; Python's warnings come along.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(service))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time, level, service, pid, logger, message, ids of the trace, extras, exception."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service
        self._encoder = msgspec.json.Encoder(enc_hook=lambda value: redact(str(value)))

    def format(self, record: logging.LogRecord) -> str:
        """The line without its newline. A value that cannot be encoded is shown as text: no event is lost to it."""
        event = clean(self._event(record))
        try:
            line = self._encoder.encode(event)
        except Exception:  # noqa: BLE001 - an extra's own __str__, a lone surrogate, an integer of 65 bits may raise
            line = self._encoder.encode({key: _plain(value) for key, value in event.items()})
        return _NOT_ESCAPED_BY_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", line.decode())

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


def rfc3339(seconds: float) -> str:
    """A Unix time as RFC 3339 in UTC, with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def redact(text: str) -> str:
    """The text without the secrets one can tell by their shape."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def clean(value: Any) -> Any:
    """The value with secrets replaced, also inside mappings and sequences; they show by key or by shape."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: HIDDEN if _is_secret(key) else clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def _is_secret(key: Any) -> bool:
    return isinstance(key, str) and _SECRET_KEY.fullmatch(key) is not None


def _plain(value: Any) -> str:
    try:
        text = redact(str(value))
    except Exception as error:  # noqa: BLE001 - the value's own code; its type is still worth telling
        text = f"<{type(value).__name__} cannot be shown: {type(error).__name__}>"
    return text.encode("utf-8", "backslashreplace").decode()
