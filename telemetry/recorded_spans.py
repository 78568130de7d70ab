"""Recorded spans: the spans of sampled traces, which a thread of OpenTelemetry's SDK sends to a collector in batches.

`start_tracing` imports this where a collector is configured, and nothing else does: the SDK takes 60 ms to import. A
trace is sampled as a whole, where it enters the deployment; its context carries the decision to every other process.

A span holds what it was given, and becomes one of the SDK's when it ends. The SDK's own spans take a lock and copy and
check every attribute at each change, which costs as much as all the rest of a span.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from telemetry.redaction import clean, redact
from telemetry.tracing import (
    TRACEPARENT,
    TRACESTATE,
    Attributes,
    Kind,
    MissingExporterError,
    Span,
    Tracing,
    extract,
    is_sampled,
    new_context,
    trace_id_of,
)

EXPORT_TIMEOUT_S = 5
"""For one batch including retries; a batch that the collector has not accepted by then is dropped."""
CLOSE_TIMEOUT_S = 3.0
"""How long a process that exits waits until its last spans are sent."""


class RecordedSpan(Span):
    """A span that is sent to the collector when it has ended. Its fields are for the sender."""

    __slots__ = ("attributes", "ended", "events", "kind", "links", "name", "parent", "sender", "start_ns")

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

    @property
    def recorded(self) -> bool:
        return True

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


class RecordedTracing(Tracing):
    """Records the spans of sampled traces; in any thread."""

    recording = True

    def __init__(self, service: str, endpoint: str, ratio: float = 1.0) -> None:
        """Raises MissingExporterError."""
        self._ratio = ratio
        self._sender = SpanSender(service, endpoint)

    def enter(
        self,
        name: str,
        incoming: Mapping[str, str] | None = None,
        kind: Kind = "server",
        attributes: Attributes | None = None,
        links: Sequence[Mapping[str, str]] = (),
    ) -> Span:
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
        if not parent or not is_sampled(parent):
            return super().span(name, parent)
        return RecordedSpan(self._sender, name, extract(parent), kind, start_ns, attributes, links, span_id)

    def close(self) -> None:
        # The SDK waits up to 30 s for a collector that is down; a draining process must not.
        sending = threading.Thread(target=self._sender.close, name="last spans", daemon=True)
        sending.start()
        sending.join(CLOSE_TIMEOUT_S)


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
        from opentelemetry import trace  # noqa: PLC0415 - see the module's docstring
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
        self._sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
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
