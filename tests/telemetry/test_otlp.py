"""OTLP: what is sent is what OpenTelemetry's own classes read, and the collector gets it in spite of short outages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from house import eventually
from http_serving import QuietHandler, serving_http
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status
from otlp_collector import attributes_of

from telemetry.otlp import Kind, SpanSender, encode_span

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=600)
VALUES = st.one_of(
    TEXTS,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(TEXTS, min_size=1, max_size=3),
)
ATTRIBUTES = st.dictionaries(TEXTS.map("a.{}".format), VALUES, max_size=4)
TIMES = st.integers(0, 2**64 - 1)
CONTEXTS = st.builds(
    "00-{:032x}-{:016x}-{:02x}".format, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 3)
)
KINDS: Mapping[Kind, int] = {
    "internal": Span.SPAN_KIND_INTERNAL,
    "server": Span.SPAN_KIND_SERVER,
    "client": Span.SPAN_KIND_CLIENT,
    "producer": Span.SPAN_KIND_PRODUCER,
    "consumer": Span.SPAN_KIND_CONSUMER,
}


@given(
    own=CONTEXTS,
    parent=st.one_of(st.just(""), CONTEXTS),
    state=TEXTS,
    name=TEXTS,
    kind=st.sampled_from(sorted(KINDS)),
    times=st.tuples(TIMES, TIMES),
    attributes=ATTRIBUTES,
    events=st.lists(st.tuples(TEXTS, ATTRIBUTES, TIMES), max_size=2),
    links=st.lists(CONTEXTS, max_size=2),
    error=st.one_of(st.none(), TEXTS),
)
def test_any_span_is_read_as_it_was_written(
    own: str,
    parent: str,
    state: str,
    name: str,
    kind: Kind,
    times: tuple[int, int],
    attributes: dict[str, Any],
    events: Sequence[tuple[str, dict[str, Any], int]],
    links: Sequence[str],
    error: str | None,
) -> None:
    carrier, above = {"traceparent": own, "tracestate": state}, {"traceparent": parent} if parent else {}
    encoded = encode_span(carrier, above, name, kind, times, attributes, events, links, error)
    (span,) = ScopeSpans.FromString(encoded).spans
    assert (span.trace_id.hex(), span.span_id.hex(), span.flags & 0xFF) == (own[3:35], own[36:52], int(own[53:], 16))
    assert (span.parent_span_id.hex(), span.trace_state, span.name) == (parent[36:52], state, name)
    assert (span.kind, span.start_time_unix_nano, span.end_time_unix_nano) == (KINDS[kind], *times)
    assert attributes_of(span) == attributes
    read = [(event.name, attributes_of(event), event.time_unix_nano) for event in span.events]
    assert read == list(events)
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in span.links] == [(x[3:35], x[36:52]) for x in links]
    code = Status.STATUS_CODE_UNSET if error is None else Status.STATUS_CODE_ERROR
    assert (span.status.code, span.status.message) == (code, error or "")


class Moody(ThreadingHTTPServer):
    """A collector that answers with these statuses in turn, and then with 200."""

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.statuses = list(statuses)
        self.headers: list[Mapping[str, str]] = []
        self.names: list[str] = []
        self.more: dict[str, str] = {}
        self.about: dict[str, Any] = {}
        self.answers = threading.Event()
        self.answers.set()


class Answer(QuietHandler):
    server: Moody

    def do_POST(self) -> None:  # noqa: N802 - the name http.server looks for
        body = self.rfile.read(int(self.headers["content-length"]))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        if status == 200:
            (sent,) = ExportTraceServiceRequest.FromString(body).resource_spans
            self.server.about = attributes_of(sent.resource)
            self.server.names += [span.name for scope in sent.scope_spans for span in scope.spans]
        self.server.answers.wait()
        self.send_response(status)
        for name, value in self.server.more.items():
            self.send_header(name, value)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


def _span(name: str) -> bytes:
    carrier = {"traceparent": f"00-{1:032x}-{2:016x}-01"}
    return encode_span(carrier, {}, name, "internal", (1, 2), {}, (), (), None)


def _send(server: Moody, names: Sequence[str]) -> None:
    sender = SpanSender("api", f"http://127.0.0.1:{server.server_port}/")
    for name in names:
        sender.send(_span(name))
    sender.close(60)


def test_a_short_outage_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "telemetry")
    with serving_http(Moody(503, 429)) as server:
        _send(server, ["a", "b"])
    assert server.names == ["a", "b"] and not caplog.messages


def test_a_refused_batch_is_told_and_the_next_one_is_sent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    caplog.set_level(logging.WARNING, "telemetry")
    with serving_http(Moody(400)) as server:
        _send(server, ["a", "b", "c"])
    assert server.names == ["c"]
    assert any("HTTP 400" in message for message in caplog.messages)


def test_an_answer_that_cannot_be_read_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    with serving_http(Moody()) as server:
        server.more = {"content-encoding": "gzip"}
        _send(server, ["a", "b"])
    assert server.names == ["a", "b"]


def test_an_address_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="otlp_endpoint"):
        SpanSender("api", "http://collector:port")


def test_more_spans_than_may_wait_are_dropped_and_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "3")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    caplog.set_level(logging.WARNING, "telemetry")
    with serving_http(Moody()) as server:
        server.answers.clear()
        sender = SpanSender("api", f"http://127.0.0.1:{server.server_port}")
        sender.send(_span("a"))
        eventually(lambda: server.names)  # it is being sent, and waits for its answer
        for name in "bcdef":
            sender.send(_span(name))
        server.answers.set()
        sender.close(60)
    assert server.names == ["a", "b", "c", "d"]
    assert any("OTEL_BSP_MAX_QUEUE_SIZE" in message for message in caplog.messages)


def test_the_standard_variables_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=a%20b, x-other = c")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.name=other")
    with serving_http(Moody()) as server:
        _send(server, ["a"])
    (headers,) = server.headers
    assert (headers["x-team"], headers["x-other"]) == ("a b", "c")
    assert headers["content-type"] == "application/x-protobuf"
    named = {"service.name": "api", "service.namespace": "penstock", "deployment.environment.name": "test"}
    assert server.about == named


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_BSP_MAX_QUEUE_SIZE", "0"), ("OTEL_EXPORTER_OTLP_HEADERS", "x-team: a"), ("OTEL_RESOURCE_ATTRIBUTES", "a")],
)
def test_a_malformed_variable_is_named_and_not_shown(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        SpanSender("api", "http://127.0.0.1:1")
