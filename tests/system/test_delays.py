"""A delay shows in exactly the part it was put into: in the timing, the trace, the records' report and the metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from house import House, eventually, unstarted
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SentSpan
from otlp_collector import Collector, collector
from prometheus_client.parser import text_string_to_metric_families
from slow_parts import SLOW_PARTS, ask, working

from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from telemetry.latency import EGRESS_FIRST
from telemetry.metrics import Metrics
from telemetry.process import start_tracing
from telemetry.records.schema import RecordSettings
from telemetry.records.writer import RecordWriter
from telemetry.report.report import Scope, report_of
from telemetry.tracing import FIRST_SENT
from workers.record import Recorder

__all__ = ["collector"]  # a fixture

pytestmark = pytest.mark.slow

DELAY_S = 0.05
TOKENS = 24
"""Decode takes longer than the delay, or a late first chunk would be a late last one too."""
ALLOWED = 0.5
"""Of the delay: by so much a part may be off."""
ROUNDS = 9
"""The medians of so many are judged, once: what a busy machine adds to a part hits the requests with a delay and those
without alike."""

PATIENCE_S = 120.0
"""A starved machine writes late; a lease is as patient, because no worker dies here."""

Parts = dict[str, float]
"""Milliseconds by part."""


@dataclass
class Seen:
    """The places where one looks at requests, and the processes behind them."""

    house: House
    recorder: Recorder
    collector: Collector
    records: Path

    def timing(self, job_id: str) -> dict[str, Any]:
        """Once its delivery is noted, a moment after the answer."""

        def noted() -> dict[str, Any] | None:
            found: dict[str, Any] = json.loads(self.house.get(f"/v1/jobs/{job_id}/timing")[1])
            return found if found["until"] == "last_sent" else None

        return eventually(noted, seconds=PATIENCE_S)

    def traced(self, job_id: str) -> Parts:
        """The parts as the spans of the job's trace have them."""

        def spans() -> dict[str, SentSpan] | None:
            own = {span.trace_id for span in self.collector.sent if _names_job(span, job_id)}
            found = {span.name: span for span in self.collector.sent if span.trace_id in own}
            return found if {"POST /v1/chat/completions", "chat sim", "engine", "finish"} <= found.keys() else None

        found = eventually(spans, seconds=PATIENCE_S)
        request, put, wait, attempt, engine = (
            found[name] for name in ("POST /v1/chat/completions", "enqueue", "queue", "chat sim", "engine")
        )
        moments = {event.name: event.time_unix_nano for span in (request, engine) for event in span.events}
        scheduled, first = moments["scheduled"], moments["first token"]
        length = {
            "ingress": put.end_time_unix_nano - request.start_time_unix_nano,
            "queue": wait.end_time_unix_nano - wait.start_time_unix_nano,
            "gate": engine.start_time_unix_nano - attempt.start_time_unix_nano,
            "engine_wait": scheduled - engine.start_time_unix_nano,
            "prefill": first - scheduled,
            "decode": engine.end_time_unix_nano - first,
            "egress_tail": request.end_time_unix_nano - engine.end_time_unix_nano,
            "egress_first": moments[FIRST_SENT] - first,
        }
        return {part: spent / 1e6 for part, spent in length.items()}

    def counted(self) -> Parts:
        """The sums of the metric of parts, over the API's page and the worker's."""
        sums: Parts = defaultdict(float)
        for metrics in (self.house.get("/metrics")[1].decode(), self.recorder.metrics.expose().decode()):
            for family in text_string_to_metric_families(metrics):
                for sample in family.samples:
                    if sample.name == "penstock_part_seconds_sum":
                        sums[sample.labels["part"]] += 1000 * sample.value
        return sums

    def reported(self, since: float, until: float) -> Parts:
        """The parts that the report gives for a window with one request, once both of its records are there."""

        def whole() -> Parts | None:
            found = report_of(self.records, Scope(since, until), {}).figures.whole
            if found.requests != 1 or found.egress_first is None:
                return None
            return {**found.parts, EGRESS_FIRST.name: found.egress_first.mean}

        return eventually(whole, seconds=PATIENCE_S)


def _names_job(span: SentSpan, job_id: str) -> bool:
    return any(each.key == "penstock.job.id" and each.value.string_value == job_id for each in span.attributes)


@pytest.fixture
def seen(tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # the exporter's own: ms between two batches of spans
    records = tmp_path / "records"
    with ExitStack() as closing:
        house = closing.enter_context(unstarted(tmp_path))
        house.environ |= {"PENSTOCK_TELEMETRY_OTLP_ENDPOINT": collector.url, "PENSTOCK_RECORDS_DIR": str(records)}
        house.environ["PENSTOCK_REDIS_LEASE_MS"] = "60000"  # the API process keeps to its own, as the worker here does
        house.start_api()
        writer = RecordWriter(RecordSettings(dir=str(records)), "worker")
        writer.start()
        closing.callback(writer.close)
        tracing = start_tracing("worker", collector.url)
        closing.callback(tracing.close)
        metrics = Metrics.start("", "worker")
        recorder = Recorder("sim", metrics, tracing, sink=writer, process="worker-1", worker="worker-1")
        yield Seen(house, recorder, collector, records)


Samples = dict[str, dict[str, dict[str, list[float]]]]
"""Milliseconds by place, delayed part and part."""


async def test_a_delay_shows_in_exactly_one_part(seen: Seen) -> None:
    """A delay before the body, the claim, the submit, the engine's run, in prefill, in decode, before the first write
    and before the last: each lengthens its own part and no other, by medians, beside the same request without a delay
    in the same round, wherever one looks. And the parts are what the client waits."""
    samples: Samples = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    wire = RedisClient.open(RedisSettings(url=seen.house.redis_url, lease_ms=60_000))
    try:
        for slow in ("", *SLOW_PARTS) * ROUNDS:
            async with working(wire, seen.recorder, slow, DELAY_S):
                found = await _sample(seen, slow)
            for place, parts in found.items():
                for part, spent_ms in parts.items():
                    samples[place][slow][part].append(spent_ms)
    finally:
        await wire.close()
    assert {"timing", "trace", "metric", "report"} <= samples.keys()
    assert [each for place, found in samples.items() for each in _misplaced(place, found)] == []


async def _sample(seen: Seen, slow: str) -> dict[str, Parts]:
    """The parts of one request, in each place."""
    since, before = time.time(), await asyncio.to_thread(seen.counted)
    job_id, spent = await ask(seen.house.port, TOKENS, slow, DELAY_S)
    timing = await asyncio.to_thread(seen.timing, job_id)
    assert abs(timing["sum_ms"] - timing["end_to_end_ms"]) <= 1.0
    after, until = await asyncio.to_thread(seen.counted), time.time()
    return {
        "timing": {**timing["parts_ms"], "outside": spent * 1000 - timing["end_to_end_ms"]},
        "trace": await asyncio.to_thread(seen.traced, job_id),
        "metric": {part: after[part] - before.get(part, 0.0) for part in after},
        "report": await asyncio.to_thread(seen.reported, since, until),
    }


def _misplaced(place: str, samples: dict[str, dict[str, list[float]]]) -> list[str]:
    """What grew that should not have, or did not grow by the delay; and time of the client's that is in no part."""
    wrong, delay_ms = [], DELAY_S * 1000
    control = samples[""]
    for slow, parts in samples.items():
        if slow and slow not in parts:
            wrong.append(f"{place}: there is no {slow}")
        for part, times in parts.items():
            grown, wanted = median(times) - median(control[part]), delay_ms if part == slow else 0.0
            if abs(grown - wanted) > ALLOWED * delay_ms:
                wrong.append(f"{place}: {slow or 'nothing'} late by {delay_ms:g} ms: {part} by {grown:.1f} ms")
    if median(control.get("outside", [0.0])) > delay_ms:
        wrong.append(f"the client waited {median(control['outside']):.1f} ms longer than the parts say")
    return wrong
