"""Recorded spans: the spans of sampled traces, which a thread of OpenTelemetry's SDK sends to a collector in batches.

`start_tracing` imports this where a collector is configured, and nothing else does: the SDK takes 60 ms to import. A
trace is sampled as a whole, where it enters the deployment; its context carries the decision to every other process.
"""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

EXPORT_TIMEOUT_S = 5
"""For one batch including retries; a batch that the collector has not accepted by then is dropped."""
CLOSE_TIMEOUT_S = 3.0
"""How long a process that exits waits until its last spans are sent."""


class RecordedSpan(Span):
    """A span that is sent to the collector when it has ended."""

    __slots__ = ("_span",)

    def __init__(self, span: trace.Span) -> None:
        context = span.get_span_context()
        carrier = {TRACEPARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
        if context.trace_state:
            carrier[TRACESTATE] = context.trace_state.to_header()
        super().__init__(carrier)
        self._span = span

    @property
    def recorded(self) -> bool:
        return True

    def add_event(self, name: str, at_ns: int | None = None, attributes: Attributes | None = None) -> None:
        self._span.add_event(name, clean(attributes), at_ns)

    def end(
        self,
        end_ns: int | None = None,
        error: str | BaseException | None = None,
        attributes: Attributes | None = None,
        name: str | None = None,
    ) -> None:
        if not self._span.is_recording():
            return
        if name is not None:
            self._span.update_name(name)
        if attributes:
            self._span.set_attributes(clean(attributes))
        if error is not None:
            self._fail(error)
        self._span.end(end_ns)

    def _fail(self, error: str | BaseException) -> None:
        from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 - see the module's docstring

        if isinstance(error, BaseException):
            shown = {"message": str(error), "stacktrace": "".join(traceback.format_exception(error))}
            self._span.record_exception(error, {f"exception.{name}": redact(text) for name, text in shown.items()})
        self._span.set_status(Status(StatusCode.ERROR, redact(str(error))))


class RecordedTracing(Tracing):
    """Records the spans of sampled traces; in any thread."""

    recording = True

    def __init__(self, service: str, endpoint: str, ratio: float = 1.0) -> None:
        self._ratio = ratio
        self._next = threading.local()
        """`span_id`: of the span that this thread begins next; 0: a random one."""
        self._provider = self._make_provider(service, endpoint)
        self._tracer = self._provider.get_tracer("penstock")

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
        return self._begin(name, carried, kind, None, attributes, links)

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
        self._next.span_id = int(span_id, 16) if span_id else 0
        return self._begin(name, extract(parent), kind, start_ns, attributes, links)

    def _begin(
        self,
        name: str,
        parent: Mapping[str, str],
        kind: Kind,
        start_ns: int | None,
        attributes: Attributes | None,
        links: Sequence[Mapping[str, str]],
    ) -> Span:
        from opentelemetry import trace  # noqa: PLC0415 - see the module's docstring

        context = trace.set_span_in_context(trace.NonRecordingSpan(_context(parent))) if parent else None
        linked = [trace.Link(_context(each)) for each in links if trace_id_of(each)]
        return RecordedSpan(
            self._tracer.start_span(
                name,
                context=context,
                kind=trace.SpanKind[kind.upper()],
                attributes=clean(attributes),
                links=linked or None,
                start_time=start_ns,
            )
        )

    def close(self) -> None:
        # The SDK waits up to 30 s for a collector that is down; a draining process must not.
        sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(CLOSE_TIMEOUT_S)

    def _make_provider(self, service: str, endpoint: str) -> TracerProvider:
        """Raises MissingExporterError."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise MissingExporterError(
                f"telemetry.otlp_endpoint is set to {endpoint!r}, but the OTLP exporter is not installed: "
                "run pip install 'penstock[otlp]', or unset it"
            ) from error
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - as above
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator  # noqa: PLC0415
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON  # noqa: PLC0415

        following = self._next

        class SpanIds(RandomIdGenerator):
            """Random ids, but for the spans whose id is given."""

            def generate_span_id(self) -> int:
                given: int = getattr(following, "span_id", 0)
                following.span_id = 0
                return given or super().generate_span_id()

        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S)
        resource = Resource.create({"service.name": service, "service.namespace": "penstock"})
        # `enter` and the context decide what is sampled, so the SDK takes whatever it is given.
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False, id_generator=SpanIds())
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return provider


def _context(carried: Mapping[str, str]) -> trace.SpanContext:
    """OpenTelemetry's form of a context that `extract` has checked."""
    from opentelemetry import trace  # noqa: PLC0415 - see the module's docstring

    _, trace_id, span_id, flags = carried[TRACEPARENT].split("-")[:4]
    return trace.SpanContext(
        trace_id=int(trace_id, 16),
        span_id=int(span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(int(flags, 16)),
        trace_state=trace.TraceState.from_header([carried.get(TRACESTATE, "")]),
    )
