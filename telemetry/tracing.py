"""Distributed tracing: the spans of one trace per request, and the W3C context that carries it between processes.

If a collector is configured, it gets the spans of a share of the requests (telemetry/otlp.py).
Otherwise nothing is recorded or sent, but every request still has a trace id, which links the log lines of all
processes about it. This module knows neither HTTP nor jobs: it converts plain `traceparent` dicts into spans and back.
"""

from __future__ import annotations

import hashlib
import random
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from contextvars import ContextVar

from penstock.engine import MEDIA_KINDS, TaskKind
from telemetry.otlp import Attributes, Kind, SpanSender, Value, encode_span
from telemetry.redaction import redact

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
TRACESTATE_LIMIT = 512
SAMPLED = "01"
"""The flags of a context whose spans are recorded."""

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
    if not tracestate or not _TRACESTATE.fullmatch(tracestate):
        return {TRACEPARENT: traceparent}
    return {TRACEPARENT: traceparent, TRACESTATE: tracestate}


class Span:
    """One operation in a trace. Any callback may end it; it ends once, and later calls do nothing.

    A span without a sender records nothing: all are so in a process without a collector. With a parent it passes on the
    parent's context unchanged, so that a trace which other processes record is not interrupted.
    """

    __slots__ = (
        *("_attributes", "_carrier", "_events", "_kind", "_links", "_name", "_parent", "_sender", "_start_ns"),
        *("_token", "recorded"),
    )

    def __init__(
        self,
        carrier: dict[str, str],
        sender: SpanSender | None = None,
        name: str = "",
        parent: Mapping[str, str] = {},
        kind: Kind = "internal",
        start_ns: int | None = None,
        attributes: Attributes | None = None,
        links: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """`parent`: as `extract` gave it; {}: none."""
        self._carrier, self._sender = carrier, sender
        self.recorded = sender is not None
        """Whether the collector gets it when it has ended."""
        if sender is None:
            return
        self._name, self._parent, self._kind, self._links = name, parent, kind, links
        self._start_ns = start_ns or time.time_ns()
        self._attributes: dict[str, Value] = dict(attributes) if attributes else {}
        self._events: list[tuple[str, Attributes, int]] = []
        """Name, attributes and time of each."""

    def __enter__(self) -> Span:
        """Within the block, log lines of this task (and of tasks it starts) carry this span's ids. One block at a time;
        its end does not end the span."""
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)

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

    def add_event(self, name: str, at_ns: int | None = None, attributes: Attributes | None = None) -> None:
        """Note something that happens within the span, now or at `at_ns` (Unix nanoseconds)."""
        if self._sender is not None:
            self._events.append((name, attributes or {}, at_ns or time.time_ns()))

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
        if self._sender is None:
            return
        if isinstance(error, BaseException):
            self.add_event("exception", attributes=_exception(error))
        sender, self._sender = self._sender, None
        times, own = (self._start_ns, end_ns or time.time_ns()), self._attributes | dict(attributes or {})
        links = [each[TRACEPARENT] for each in self._links if trace_id_of(each)]
        about = self._kind, times, own, self._events, links, None if error is None else redact(str(error))
        sender.send(encode_span(self._carrier, self._parent, name or self._name, *about))


class Tracing:
    """Creates spans, in any thread; `start_tracing` (telemetry/process.py) makes the one instance of a process.

    A trace is sampled as a whole, where it enters the deployment; its context carries the decision to other processes.
    """

    def __init__(self, sender: SpanSender | None = None, ratio: float = 1.0) -> None:
        """`sender`: of recorded spans; None: nothing is recorded. `ratio`: share of the traces that begin here which
        are."""
        self._sender, self._ratio = sender, ratio
        self.recording = sender is not None
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
        if self._sender is None:
            return Span(dict(incoming) if incoming else new_context())
        carried = extract(incoming) if incoming else {}
        # Not by the trace id: a client chooses it.
        if random.random() >= self._ratio:  # noqa: S311 - a sample, not a secret
            return Span(new_context(carried))
        return Span(new_context(carried, flags=SAMPLED), self._sender, name, carried, kind, None, attributes, links)

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
        checked = extract(parent) if parent and self._sender is not None else {}
        if self._sender is None or not checked or not int(checked[TRACEPARENT][53:55], 16) & 1:
            return Span(dict(parent) if parent else new_context())
        carrier = new_context(checked, span_id, SAMPLED)
        return Span(carrier, self._sender, name, checked, kind, start_ns, attributes, links)

    def close(self) -> None:
        """Send the recorded spans and stop; bounded in time."""
        if self._sender is not None:
            self._sender.close(CLOSE_TIMEOUT_S)


NO_TRACING = Tracing()


def new_context(parent: Mapping[str, str] = {}, span_id: str = "", flags: str = "00") -> dict[str, str]:
    """The context of a new span, in the trace of `parent`, as `extract` gave it, or in a new one."""
    ids = f"{random.getrandbits(192):048x}"
    trace_id = parent[TRACEPARENT][3:35] if parent else ids[:32]
    state = {TRACESTATE: parent[TRACESTATE]} if TRACESTATE in parent else {}
    return {TRACEPARENT: f"00-{trace_id}-{span_id or ids[32:]}-{flags}"} | state


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
    return {TRACEPARENT: f"00-{trace_id}-{span_id}-{SAMPLED if is_sampled(carrier) else '00'}"} if trace_id else {}


CLOSE_TIMEOUT_S = 3.0
"""How long a process that exits waits until its last spans are sent."""


def _exception(error: BaseException) -> dict[str, str]:
    """The attributes of an exception, by the names of the conventions."""
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return {
        "exception.type": f"{module}{kind.__qualname__}",
        "exception.message": str(error),
        "exception.stacktrace": "".join(traceback.format_exception(error)),
    }


# Names of attributes. OpenTelemetry's GenAI conventions are still in development: a later version may change them.


OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
SEED = "gen_ai.request.seed"
CHOICES = "gen_ai.request.choice.count"
STREAM = "gen_ai.request.stream"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

FIRST_SENT = "first token sent"
"""Event of a request's span: the first token was written to the connection."""

PROVIDER_NAME = "penstock"
"""Value of PROVIDER: the conventions ask for the system that a client sees."""

METHOD = "http.request.method"
STATUS_CODE = "http.response.status_code"
ROUTE = "http.route"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"

JOB_ID = "penstock.job.id"
JOB_STATE = "penstock.job.state"
"""The state in which an attempt left its job; or what became of the attempt: lost, handed_back, returned, preempted."""
ATTEMPT = "penstock.job.attempt"
PRIORITY = "penstock.job.priority"
TENANT = "penstock.tenant"
"""From the caller's key, never from a request."""
WORKER = "penstock.worker"
CONTINUED_TOKENS = "penstock.job.continued_tokens"
"""Tokens of earlier attempts, which this one continues."""
BATCH_ID = "penstock.batch.id"
BATCH_LINE = "penstock.batch.line"
ENDPOINT = "penstock.webhook.endpoint"
EVENT_TYPE = "penstock.event.type"
TRY = "penstock.webhook.attempt"


# The GenAI conventions know `chat` (which a request of the Responses API is too), `text_completion` and `embeddings`.
# The conventions have no name for the other tasks, and allow own ones.


CHAT, TEXT_COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"
OPERATIONS = (CHAT, TEXT_COMPLETION, EMBEDDINGS, "rerank", "tokenize", "detokenize", *MEDIA_KINDS)
"""All of them: the values of the label `gen_ai_operation_name`."""


def operation_name(task: TaskKind | None, *, is_chat: bool) -> str:
    """The operation of a request. `is_chat`: its prompt is a conversation, not a text or token ids."""
    if task is not None:
        return EMBEDDINGS if task == "embed" else task
    return CHAT if is_chat else TEXT_COMPLETION
