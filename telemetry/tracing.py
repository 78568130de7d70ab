"""Distributed tracing: the spans of one trace per request, and the W3C context that carries it between processes.

If a collector is configured, OpenTelemetry sends it the spans of a share of the requests.
Otherwise nothing is recorded or sent, but every request still has a trace id, which links the log lines of all
processes about it. This module knows neither HTTP nor jobs: it converts plain `traceparent` dicts into spans and back.
"""

from __future__ import annotations

import hashlib
import random
import re
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

from penstock.engine import TaskKind
from telemetry.redaction import clean, redact

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
    if not tracestate or not _TRACESTATE.fullmatch(tracestate):
        return {TRACEPARENT: traceparent}
    return {TRACEPARENT: traceparent, TRACESTATE: tracestate}


class Span:
    """One operation in a trace. Any callback may end it; it ends once, and later calls do nothing.

    This class records nothing: a process without a collector uses it. With a parent it passes on the parent's context
    unchanged, so that a trace which other processes record is not interrupted.
    """

    __slots__ = ("_carrier", "_token")
    recorded = False
    """Whether the collector gets it."""

    def __init__(self, carrier: dict[str, str]) -> None:
        self._carrier = carrier

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
            state = {TRACESTATE: carried[TRACESTATE]} if TRACESTATE in carried else {}
            return Span(new_context(trace_id_of(carried)) | state)
        return RecordedSpan(self._sender, name, carried, kind, None, attributes, links)

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
        if self._sender is None or not parent or not is_sampled(parent):
            return Span(dict(parent) if parent else new_context())
        return RecordedSpan(self._sender, name, extract(parent), kind, start_ns, attributes, links, span_id)

    def close(self) -> None:
        """Send the recorded spans and stop; bounded in time."""
        if self._sender is None:
            return
        # The SDK waits up to 30 s for a collector that is down; a draining process must not.
        sending = threading.Thread(target=self._sender.close, name="last spans", daemon=True)
        sending.start()
        sending.join(CLOSE_TIMEOUT_S)


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


EXPORT_TIMEOUT_S = 5
"""For one batch including retries; a batch that the collector has not accepted by then is dropped."""
CLOSE_TIMEOUT_S = 3.0
"""How long a process that exits waits until its last spans are sent."""


class RecordedSpan(Span):
    """A span that is sent to the collector when it has ended. Its fields are for the sender.

    It becomes one of the SDK's only when it ends. The SDK's own spans take a lock and copy and check every attribute at
    each change, which costs as much as all the rest of a span.
    """

    __slots__ = ("attributes", "ended", "events", "kind", "links", "name", "parent", "sender", "start_ns")
    recorded = True

    def __init__(
        self,
        sender: SpanSender,
        name: str,
        parent: Mapping[str, str],
        kind: Kind,
        start_ns: int | None,
        attributes: Attributes | None,
        links: Sequence[Mapping[str, str]],
        span_id: str = "",
    ) -> None:
        """`parent`: as `extract` gave it."""
        carrier = new_context(trace_id_of(parent), span_id, sampled=True)
        if TRACESTATE in parent:
            carrier[TRACESTATE] = parent[TRACESTATE]
        super().__init__(carrier)
        self.sender, self.name, self.parent, self.kind, self.links = sender, name, parent, kind, links
        self.start_ns = start_ns or time.time_ns()
        self.attributes: dict[str, Any] = clean(attributes) if attributes else {}
        self.events: list[tuple[str, Mapping[str, Any], int]] = []
        """Name, attributes and time of each."""
        self.ended = False

    def add_event(self, name: str, at_ns: int | None = None, attributes: Attributes | None = None) -> None:
        self.events.append((name, clean(attributes) if attributes else {}, at_ns or time.time_ns()))

    def end(
        self,
        end_ns: int | None = None,
        error: str | BaseException | None = None,
        attributes: Attributes | None = None,
        name: str | None = None,
    ) -> None:
        if self.ended:
            return
        self.ended = True
        if name is not None:
            self.name = name
        if attributes:
            self.attributes |= clean(attributes)
        if isinstance(error, BaseException):
            self.add_event("exception", attributes=_exception(error))
        self.sender.send(self, end_ns or time.time_ns(), None if error is None else redact(str(error)))


def _exception(error: BaseException) -> dict[str, str]:
    """The attributes of an exception, by the names of the conventions."""
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return {
        "exception.type": f"{module}{kind.__qualname__}",
        "exception.message": str(error),
        "exception.stacktrace": "".join(traceback.format_exception(error)),
    }


class SpanSender:
    """Makes the SDK's spans of those that have ended, and gives them to its thread that sends batches."""

    def __init__(self, service: str, endpoint: str) -> None:
        """Raises MissingExporterError."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise MissingExporterError(
                f"telemetry.otlp_endpoint is set to {endpoint!r}, but the OTLP exporter is not installed: "
                "run pip install 'penstock[otlp]', or unset it"
            ) from error
        from opentelemetry import trace  # noqa: PLC0415 - the SDK takes 60 ms to import
        from opentelemetry.sdk import trace as sdk  # noqa: PLC0415 - as above
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415

        class OwnResource(Resource):
            """The resource of this process: the exporter groups spans by resource, and the SDK's hash is that of all
            its attributes as JSON, for every span."""

            __hash__ = object.__hash__

            def __eq__(self, other: object) -> bool:
                return self is other

        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S)
        about = Resource.create({"service.name": service, "service.namespace": "penstock"})
        self._trace, self._sdk = trace, sdk
        self._resource = OwnResource(about.attributes, about.schema_url)
        self._scope = InstrumentationScope("penstock")
        self._well = trace.Status()
        self._processor = BatchSpanProcessor(exporter)

    def send(self, span: RecordedSpan, end_ns: int, error: str | None) -> None:
        """Queue a span; it is dropped if too many wait. `error`: why it failed."""
        trace, sdk = self._trace, self._sdk
        self._processor.on_end(
            sdk.ReadableSpan(
                span.name,
                self._context(span.carrier(), is_remote=False),
                self._context(span.parent) if span.parent else None,
                self._resource,
                span.attributes,
                [sdk.Event(name, about, at_ns) for name, about, at_ns in span.events],
                [trace.Link(self._context(each)) for each in span.links if trace_id_of(each)],
                trace.SpanKind[span.kind.upper()],
                status=self._well if error is None else trace.Status(trace.StatusCode.ERROR, error),
                start_time=span.start_ns,
                end_time=end_ns,
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Send the last spans, and end the thread."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def _context(self, carried: Mapping[str, str], *, is_remote: bool = True) -> Any:
        """OpenTelemetry's form of a context that `extract` has checked."""
        trace, text = self._trace, carried[TRACEPARENT]
        state = carried.get(TRACESTATE)
        return trace.SpanContext(
            int(text[3:35], 16),
            int(text[36:52], 16),
            is_remote,
            trace.TraceFlags(int(text[53:55], 16)),
            trace.TraceState.from_header([state]) if state else None,
        )


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


CHAT, TEXT_COMPLETION = "chat", "text_completion"
TASK_OPERATIONS: Mapping[TaskKind, str] = {
    "embed": "embeddings",
    "rerank": "rerank",
    "tokenize": "tokenize",
    "detokenize": "detokenize",
}
OPERATIONS = (CHAT, TEXT_COMPLETION, *TASK_OPERATIONS.values())
"""All of them: the values of the label `gen_ai_operation_name`."""


def operation_name(task: TaskKind | None, *, is_chat: bool) -> str:
    """The operation of a request. `is_chat`: its prompt is a conversation, not a text or token ids."""
    if task is not None:
        return TASK_OPERATIONS[task]
    return CHAT if is_chat else TEXT_COMPLETION
