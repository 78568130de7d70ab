"""Distributed tracing: the spans of one trace per request, and the W3C context that carries it between processes.

If a collector is configured, OpenTelemetry sends it the spans of a share of the requests (telemetry/recorded_spans.py).
Otherwise nothing is recorded or sent, but every request still has a trace id, which links the log lines of all
processes about it. This module knows neither HTTP nor jobs: it converts plain `traceparent` dicts into spans and back.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["internal", "server", "client", "producer", "consumer"]
Attributes: TypeAlias = Mapping[str, str | int | float | bool | Sequence[str]]

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
TRACESTATE_LIMIT = 512

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE = re.compile(rf"[\x20-\x7e]{{1,{TRACESTATE_LIMIT}}}")

_current: ContextVar[Span | None] = ContextVar("span", default=None)


def current() -> Span | None:
    """The current span of this task or callback, if any."""
    return _current.get()


def extract(headers: Mapping[str, str]) -> dict[str, str]:
    """The valid trace context in `headers` (lower-case names, or a case-insensitive mapping); {} if there is none."""
    traceparent = headers.get(TRACEPARENT, "")
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or (match[1] == "00" and match[5]):
        return {}
    tracestate = headers.get(TRACESTATE, "")
    if not _TRACESTATE.fullmatch(tracestate):
        return {TRACEPARENT: traceparent}
    return {TRACEPARENT: traceparent, TRACESTATE: tracestate}


class Span:
    """One operation in a trace. Any callback may end it; it ends once, and later calls do nothing.

    This class records nothing: a process without a collector uses it. With a parent it passes on the parent's context
    unchanged, so that a trace which other processes record is not interrupted.
    """

    __slots__ = ("_carrier",)

    def __init__(self, carrier: dict[str, str]) -> None:
        self._carrier = carrier

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        return self._carrier[TRACEPARENT][3:35]

    @property
    def span_id(self) -> str:
        """16 hex digits."""
        return self._carrier[TRACEPARENT][36:52]

    def carrier(self) -> dict[str, str]:
        """The context for child spans, also in other processes: `traceparent`, and `tracestate` if there is one."""
        return self._carrier

    def active(self) -> Active:
        """Within the block, log lines of this task (and of tasks it starts) carry this span's ids."""
        return Active(self)

    @property
    def recorded(self) -> bool:
        """Whether the collector gets it."""
        return False

    def add_event(self, name: str, at_ns: int | None = None, attributes: Attributes | None = None) -> None:
        """Note something that happens within the span, now or at `at_ns` (Unix nanoseconds)."""

    def end(
        self,
        end_ns: int | None = None,
        error: str | BaseException | None = None,
        attributes: Attributes | None = None,
        name: str | None = None,
    ) -> None:
        """End the span, now or at `end_ns` (Unix nanoseconds).

        Args:
            error: why the operation failed.
            name: replaces the name that the span began with.
        """


class Active:
    """A context manager that makes a span the current one."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> Span:
        self._token = _current.set(self._span)
        return self._span

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


class Tracing:
    """Creates spans that record nothing; `start_tracing` (telemetry/process.py) makes the one instance of a process."""

    recording = False
    """Whether spans can reach a collector."""

    def enter(
        self,
        name: str,
        incoming: Mapping[str, str] | None = None,
        kind: Kind = "server",
        attributes: Attributes | None = None,
        links: Sequence[Mapping[str, str]] = (),
    ) -> Span:
        """Begin the first span of a request in this deployment, and decide whether its trace is recorded.

        The caller's trace id is kept, so that both sides speak of one trace; the caller's own decision is not: no
        client can switch recording on or off.

        Args:
            incoming: the caller's context as `extract` gave it.
            links: contexts of spans in other traces that led to this one.
        """
        return self.span(name, incoming, kind, attributes=attributes, links=links)

    def span(
        self,
        name: str,
        parent: Mapping[str, str] | None = None,
        kind: Kind = "internal",
        start_ns: int | None = None,
        attributes: Attributes | None = None,
        links: Sequence[Mapping[str, str]] = (),
        span_id: str = "",
    ) -> Span:
        """Begin a span, now or at `start_ns` (Unix nanoseconds), under `parent` as `carrier` or `extract` gave it.

        It is recorded if its parent is; without a parent it is not, and has a trace id of its own.

        Args:
            links: contexts of other spans that it refers to.
            span_id: 16 hex digits; for a span that other processes refer to before they know it (`derived_id`).
        """
        return Span(dict(parent) if parent else new_context())

    def close(self) -> None:
        """Send the recorded spans and stop; bounded in time."""


NO_TRACING = Tracing()


class MissingExporterError(Exception):
    """Raised when a collector is configured but the exporter package is not installed."""


def new_context(trace_id: str = "", span_id: str = "", *, sampled: bool = False) -> dict[str, str]:
    """The context of a new span, in this trace or in a new one; `sampled`: of one that is recorded."""
    ids = f"{random.getrandbits(192):048x}"
    return {TRACEPARENT: f"00-{trace_id or ids[:32]}-{span_id or ids[32:]}-{'01' if sampled else '00'}"}


def is_sampled(carrier: Mapping[str, str]) -> bool:
    """Whether spans under this context are recorded; not without a context, or with one that is malformed."""
    match = _TRACEPARENT.fullmatch(carrier.get(TRACEPARENT, ""))
    return match is not None and bool(int(match[4], 16) & 1)


def trace_id_of(carrier: Mapping[str, str]) -> str:
    """The trace id of a context; "" if it has none."""
    match = _TRACEPARENT.fullmatch(carrier.get(TRACEPARENT, ""))
    return match[2] if match else ""


def derived_id(carrier: Mapping[str, str], *names: object) -> str:
    """The id of a span that follows from its trace and from its names, so that every process finds the same one."""
    text = ":".join([trace_id_of(carrier), *map(str, names)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sibling(carrier: Mapping[str, str], span_id: str) -> dict[str, str]:
    """The context of another span of the same trace, by its id; {} without a trace."""
    trace_id = trace_id_of(carrier)
    return {TRACEPARENT: f"00-{trace_id}-{span_id}-{'01' if is_sampled(carrier) else '00'}"} if trace_id else {}
