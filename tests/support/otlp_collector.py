"""A collector of traces: an OTLP receiver that a test starts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from http_serving import QuietHandler, serving_http
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SentSpan


class Collector(ThreadingHTTPServer):
    """An OTLP/HTTP receiver that keeps what it received, and every span by name with the service it came from."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receive)
        self.spans: dict[str, tuple[str, SentSpan]] = {}
        self.sent: list[SentSpan] = []
        self.paths: list[str] = []
        self.received: list[bytes] = []
        self.answers = threading.Event()
        self.answers.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Receive(QuietHandler):
    server: Collector

    def do_POST(self) -> None:  # noqa: N802 - the name http.server looks for
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.paths.append(self.path)
        self.server.received.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.server.spans[span.name] = (names["service.name"], span)
                    self.server.sent.append(span)
        self.server.answers.wait()
        self.send_response(200)
        self.end_headers()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with serving_http(Collector()) as server:
        yield server


def attributes_of(span: SentSpan) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in span.attributes}


def _value(value: AnyValue) -> Any:
    found = getattr(value, str(value.WhichOneof("value")))
    return [_value(each) for each in found.values] if isinstance(found, ArrayValue) else found
