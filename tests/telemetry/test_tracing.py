"""Traces: the context that crosses the queue, with and without a collector."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from http.client import HTTPException
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SentSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from otlp_collector import Collector, attributes_of, collector

from telemetry import otlp, tracing
from telemetry.process import start_tracing
from telemetry.tracing import extract

__all__ = ["collector"]  # a fixture

ROOT = Path(__file__).parents[2]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
INCOMING = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


def test_one_trace_crosses_the_queue(collector: Collector) -> None:
    """Two processes' spans, joined only by the dict a job carries, are one trace with the right parents and times."""
    api, worker = start_tracing("api", collector.url), start_tracing("worker", collector.url + "/")
    accepted, claimed = 1_763_689_596_000_000_000, 1_763_689_597_500_000_000

    door = api.enter("chat", extract(INCOMING), "server", {tracing.REQUEST_MODEL: "m"})
    job = door.carrier()
    queue = worker.span("queue", job, "consumer", accepted, {tracing.PRIORITY: "standard"})
    queue.end(claimed)
    work = worker.span("generate", queue.carrier(), start_ns=claimed)
    work.end(attributes={tracing.OUTPUT_TOKENS: 7})
    door.end(attributes={tracing.JOB_ID: "j1"})
    api.close()
    worker.close()

    assert set(collector.paths) == {"/v1/traces"}
    services = {name: service for name, (service, _) in collector.spans.items()}
    assert services == {"chat": "api", "queue": "worker", "generate": "worker"}
    sent = {name: span for name, (_, span) in collector.spans.items()}
    assert {span.trace_id.hex() for span in sent.values()} == {TRACE} == {door.trace_id, queue.trace_id}
    parents = {name: span.parent_span_id.hex() for name, span in sent.items()}
    assert parents == {"chat": PARENT, "queue": door.span_id, "generate": queue.span_id}
    assert (sent["queue"].start_time_unix_nano, sent["queue"].end_time_unix_nano) == (accepted, claimed)
    assert [sent[name].kind for name in ("chat", "queue", "generate")] == [
        SentSpan.SPAN_KIND_SERVER,
        SentSpan.SPAN_KIND_CONSUMER,
        SentSpan.SPAN_KIND_INTERNAL,
    ]
    assert attributes_of(sent["chat"]) == {"gen_ai.request.model": "m", "penstock.job.id": "j1"}
    assert attributes_of(sent["generate"]) == {"gen_ai.usage.output_tokens": 7}
    assert {span.trace_state for span in sent.values()} == {"vendor=1"}


def test_a_failure_is_told_and_an_end_counts_once(collector: Collector) -> None:
    """Status and message of the first end stay; an exception is recorded as one."""
    tracer = start_tracing("worker", collector.url)
    span = tracer.enter("generate")
    span.end(error="worker_lost")
    span.end(error="never seen", attributes={"late": True})
    tracer.enter("submit").end(error=ValueError("too long"))
    tracer.enter("send").end(error=HTTPException("cut off"))
    tracer.close()
    _, sent = collector.spans["generate"]
    assert (sent.status.code, sent.status.message) == (Status.STATUS_CODE_ERROR, "worker_lost")
    assert attributes_of(sent) == {}
    for name, kind, said in (("submit", "ValueError", "too long"), ("send", "http.client.HTTPException", "cut off")):
        (event,) = collector.spans[name][1].events
        about = attributes_of(event)
        assert (event.name, about["exception.type"], about["exception.message"]) == ("exception", kind, said)
        assert about["exception.stacktrace"] == f"{kind}: {said}\n"


@pytest.mark.parametrize("flags", ["00", "01"])
def test_the_ratio_decides_and_not_the_caller(collector: Collector, flags: str) -> None:
    """At 1 a trace is recorded although its caller does not sample it, at 0 none is although the caller does. The
    caller's trace id stays, and every span below follows the decision."""
    incoming = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "vendor=1"}
    for ratio, sampled in ((1.0, "01"), (0.0, "00")):
        tracer = start_tracing("api", collector.url, ratio)
        span = tracer.enter("chat", incoming)
        assert re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-{sampled}", span.carrier()["traceparent"])
        assert span.span_id != PARENT and span.carrier()["tracestate"] == "vendor=1"
        below = tracer.span("queue", span.carrier())
        assert below.recorded is span.recorded is bool(ratio)
        below.end()
        span.end()
        tracer.close()
    assert {name: span.parent_span_id.hex() for name, (_, span) in collector.spans.items()} == {
        "chat": PARENT,
        "queue": collector.spans["chat"][1].span_id.hex(),
    }
    assert len(collector.sent) == 2


def test_a_share_of_the_traces_is_recorded_whatever_ids_clients_choose(collector: Collector) -> None:
    """A client that sends one trace id again and again is sampled like any other."""
    tracer = start_tracing("api", collector.url, 0.5)
    recorded = sum(tracer.enter("chat", INCOMING).recorded for _ in range(400))
    tracer.close()
    assert 100 < recorded < 300  # a fair coin leaves these bounds once in 10^23 runs


def test_a_span_has_the_id_and_the_links_that_it_is_given(collector: Collector) -> None:
    """The id follows from the trace and from names alone, so another process finds it; the next span has its own."""
    tracer = start_tracing("worker", collector.url)
    root = tracer.enter("chat")
    own = tracing.derived_id(root.carrier(), "job", 7)
    assert own == tracing.derived_id({"traceparent": root.carrier()["traceparent"]}, "job", "7") != root.span_id
    first = tracer.span("first", root.carrier(), span_id=own)
    second = tracer.span("second", root.carrier(), links=[tracing.sibling(root.carrier(), own), {}])
    for span in (first, second, root):
        span.end()
    tracer.close()
    sent = {name: span for name, (_, span) in collector.spans.items()}
    assert sent["first"].span_id.hex() == own != sent["second"].span_id.hex()
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in sent["second"].links] == [(root.trace_id, own)]


def test_a_context_that_is_malformed_is_not_sampled() -> None:
    """What comes out of the store is checked like what comes from a client."""
    for broken in ({}, {"traceparent": "x"}, {"traceparent": f"00-{TRACE}-{PARENT}-zz"}):
        assert not tracing.is_sampled(broken) and tracing.trace_id_of(broken) == ""
        assert tracing.sibling(broken, PARENT) == {}


def test_without_a_collector_nothing_is_imported_or_sent() -> None:
    """A request's spans without an endpoint leave the OpenTelemetry SDK, and the network, alone."""
    code = """
import socket, sys
socket.socket.connect = lambda *_: sys.exit("connected")
from telemetry.process import start_tracing
tracer = start_tracing("api", "")
door = tracer.span("chat")
queue = tracer.span("queue", door.carrier())
queue.end(), door.end(), tracer.close()
print(door.trace_id == queue.trace_id, [name for name in sys.modules if name.startswith("opentelemetry")])
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True []\n", "")


def test_without_a_collector_every_request_still_has_an_id() -> None:
    """A new trace is unsampled and unlike the last one; a caller's trace is passed on unchanged."""
    off = start_tracing("api", "")
    first, second = off.span("chat"), off.span("chat")
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00", first.carrier()["traceparent"])
    assert first.trace_id != second.trace_id
    assert extract(first.carrier()) == first.carrier()
    continued = off.span("queue", extract(INCOMING))
    assert continued.carrier() == INCOMING
    assert (continued.trace_id, continued.span_id) == (TRACE, PARENT)
    continued.end(error="ignored")


@pytest.mark.parametrize("value", [
    "", "nonsense", f"00-{TRACE}-{PARENT}", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01",
    f"ff-{TRACE}-{PARENT}-01", f"00-{TRACE.upper()}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01-more",
    f"00-{TRACE}-{PARENT}-01\n",
])  # fmt: skip
def test_a_malformed_context_is_no_context(value: str) -> None:
    """What is not a traceparent by the W3C's words is ignored, with its tracestate."""
    assert extract({"traceparent": value, "tracestate": "vendor=1"}) == {}


def test_a_later_version_and_an_odd_tracestate() -> None:
    """A version yet unknown may be longer; a tracestate too long or with control characters is left out."""
    later = f"01-{TRACE}-{PARENT}-01-more"
    assert extract({"traceparent": later}) == {"traceparent": later}
    for state in ("a" * 513, "a=1\r\nx: y"):
        assert extract({**INCOMING, "tracestate": state}) == {"traceparent": INCOMING["traceparent"]}


def test_a_collector_that_hangs_does_not_hold_up_the_end(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing gives up on the last spans after its own time, however long the exporter would go on."""
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(otlp, "EXPORT_TIMEOUT_S", 60)
    collector.answers.clear()
    tracer = start_tracing("api", collector.url)
    tracer.enter("chat").end()
    began = time.monotonic()
    tracer.close()
    assert time.monotonic() - began < 15
    collector.answers.set()
