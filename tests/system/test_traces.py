"""Traces of real processes at a collector that speaks OTLP: one trace a request, whatever happens on its way."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batching import begin, client, line
from house import House, eventually, unstarted
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SentSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from otlp_collector import Collector, attributes_of, collector
from receiver import Receiver, receiving

__all__ = ["collector"]  # a fixture

pytestmark = pytest.mark.slow

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
SECRET = "a secret of the prompt"
SETTINGS = """
[models.sim]
engine = "sim"
[webhooks.hook]
url = "{url}"
secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
tenant = "local"
allow_http = true
networks = ["127.0.0.0/8"]
events = ["job.completed", "batch.completed"]
"""


@pytest.fixture
def house(tmp_path: Path, collector: Collector) -> Iterator[House]:
    with unstarted(tmp_path) as house:
        house.environ |= {
            "PENSTOCK_TELEMETRY_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",  # the exporter's own: ms between two batches of spans
            "PENSTOCK_SIM_SLOTS": "2",
            "PENSTOCK_SIM_STEP_MS": "10",
            "PENSTOCK_FILES_DIR": str(tmp_path / "files"),
        }
        yield house


def chat(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "sim", "max_tokens": tokens, "messages": [{"role": "user", "content": SECRET}], **more}


def of_trace(collector: Collector, trace_id: str) -> list[SentSpan]:
    return [span for span in collector.sent if span.trace_id.hex() == trace_id]


def named(spans: list[SentSpan], name: str) -> list[SentSpan]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_time_unix_nano)


def trace_of(collector: Collector, job_id: str) -> str:
    """The trace that has a span about this job."""

    def found() -> str:
        return next(
            (span.trace_id.hex() for span in collector.sent if attributes_of(span).get("penstock.job.id") == job_id), ""
        )

    return str(eventually(found))


def begun(connection: http.client.HTTPConnection, body: dict[str, Any], tokens: int) -> http.client.HTTPResponse:
    """Begin a chat that streams, and read some of it."""
    headers = {"Content-Type": "application/json", **UNSAMPLED}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    while tokens:
        tokens -= answer.readline().startswith(b"data: ")
    return answer


def test_a_killed_worker_and_its_heir_are_linked_in_one_trace(house: House, collector: Collector) -> None:
    """kill -9 in mid-stream: the trace has both attempts, the second links to the first, and the first says how it
    ended, although its worker could send nothing. The caller's trace id is kept; its decision not to sample is not."""
    house.start_api()
    workers = {name: house.start("workers", "--id", name) for name in ("worker-1", "worker-2")}
    house.wait_ready()
    connection = http.client.HTTPConnection("127.0.0.1", house.port, timeout=60)
    answer = begun(connection, chat(300, stream=True), 20)
    job_id = answer.headers["x-job-id"]
    victim = json.loads(house.get(f"/v1/jobs/{job_id}")[1])["attempt_log"][0]["worker"]
    workers[victim].kill()
    assert b"[DONE]" in answer.read()
    connection.close()
    eventually(lambda: {"POST /v1/chat/completions", "finish"} <= {span.name for span in of_trace(collector, TRACE)})
    eventually(lambda: len(named(of_trace(collector, TRACE), "chat sim")) == 2)
    spans = of_trace(collector, TRACE)
    (server,) = named(spans, "POST /v1/chat/completions")
    assert server.parent_span_id.hex() == PARENT
    first, second = named(spans, "chat sim")
    assert [link.span_id for link in second.links] == [first.span_id] and not first.links
    assert {span.parent_span_id for span in (first, second)} == {server.span_id}
    lost, done = attributes_of(first), attributes_of(second)
    assert (lost["penstock.worker"].partition("@")[0], lost["penstock.job.state"]) == (victim, "lost")
    assert lost["error.type"] == "worker_lost"
    assert first.status.code == Status.STATUS_CODE_ERROR
    assert done["penstock.worker"].partition("@")[0] != victim and done["penstock.job.state"] == "completed"
    assert (lost["penstock.job.attempt"], done["penstock.job.attempt"]) == (1, 2)
    assert first.end_time_unix_nano <= second.start_time_unix_nano + 1_000_000_000
    assert done["gen_ai.usage.output_tokens"] == 300 > done["penstock.job.continued_tokens"] > 0
    queues, (engine,), (finish,) = named(spans, "queue"), named(spans, "engine"), named(spans, "finish")
    assert len(queues) == 2 and engine.parent_span_id == second.span_id == finish.parent_span_id
    assert SECRET.encode() not in b"".join(collector.received)


def test_spans_have_the_names_of_the_conventions(house: House, collector: Collector) -> None:
    """Of GenAI, where they exist; the span of the request names the tenant of its key, whatever its client sends. A job
    that expires in the queue has its last span from the process that records its end."""
    house.start_api()
    status, _, answer = house.post("/v1/jobs", chat(5, queue={"max_queue_ms": 50}))
    assert status == 202
    trace = trace_of(collector, json.loads(answer)["id"])
    eventually(lambda: named(of_trace(collector, trace), "ended"))
    (end,) = named(of_trace(collector, trace), "ended")
    assert attributes_of(end)["penstock.job.state"] == "expired" and end.status.code == Status.STATUS_CODE_ERROR
    house.start("workers")
    house.wait_ready()
    body = chat(5, temperature=0.5, n=2, metadata={"tenant": "another"})
    _, headers, _ = house.post("/v1/chat/completions", body, {"tracestate": "tenant=another"})
    trace = trace_of(collector, headers["x-job-id"])
    eventually(lambda: named(of_trace(collector, trace), "POST /v1/chat/completions"))
    eventually(lambda: named(of_trace(collector, trace), "chat sim"))
    spans = of_trace(collector, trace)
    found = attributes_of(named(spans, "chat sim")[0])
    assert {name: value for name, value in found.items() if name.startswith(("gen_ai", "penstock.tenant"))} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "sim",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": headers["x-job-id"],
        "gen_ai.response.model": "sim",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": found["gen_ai.usage.input_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 10,
        "penstock.tenant": "local",
    }
    (server,), (put,) = named(spans, "POST /v1/chat/completions"), named(spans, "enqueue")
    assert attributes_of(server)["penstock.tenant"] == "local" and put.kind == SentSpan.SPAN_KIND_PRODUCER
    log = [json.loads(line) for line in house.log("api").splitlines() if line.startswith("{")]
    assert trace in {line.get("trace_id") for line in log if line["message"] == "request"}
    ended = [json.loads(line) for line in house.log("workers").splitlines() if "jobs completed" in line]
    assert [trace] in [line["trace_ids"] for line in ended]


def test_batches_and_webhooks_are_in_traces(house: House, collector: Collector) -> None:
    """Each line has a trace of its own that links to the request for the batch; a webhook is in the trace of what it
    tells of, and carries it on."""
    with receiving(Receiver()) as receiver:
        (house.folder / "penstock.toml").write_text(SETTINGS.format(url=receiver.url))
        house.start_all("workers", "offline")
        begin(client(house), [line(number) for number in range(3)], extra_headers=UNSAMPLED)
        eventually(lambda: named(of_trace(collector, TRACE), "webhook batch.completed"), seconds=60)
        eventually(lambda: len(named(collector.sent, "chat sim")) == 3)
        eventually(lambda: named(of_trace(collector, TRACE), "POST /v1/batches"))
        spans = of_trace(collector, TRACE)
        (created,), turns = named(spans, "POST /v1/batches"), named(spans, "batch turn")
        assert turns and {turn.parent_span_id for turn in turns} == {created.span_id}
        roots = named(collector.sent, "batch line")
        assert len(roots) == 3 == len({root.trace_id for root in roots} - {bytes.fromhex(TRACE)})
        assert {link.span_id for root in roots for link in root.links} == {created.span_id}
        assert {attributes_of(root)["penstock.batch.line"] for root in roots} == {1, 2, 3}
        (hook,) = named(spans, "webhook batch.completed")
        sent = next(headers for headers, body in receiver.got if json.loads(body)["type"] == "batch.completed")
        assert sent["traceparent"] == f"00-{TRACE}-{hook.span_id.hex()}-01"
        assert attributes_of(hook)["http.response.status_code"] == 204
