"""A delay shows in exactly the part that it was put into: of a job's timing and of its trace."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from statistics import median
from typing import Any

import pytest
from house import House, eventually
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SentSpan
from otlp_collector import Collector, attributes_of, collector
from slow_parts import SLOW_PARTS, ask, working

from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from telemetry.metrics import Metrics
from telemetry.process import start_tracing
from telemetry.tracing import FIRST_SENT
from workers.record import Recorder

__all__ = ["collector"]  # a fixture

pytestmark = pytest.mark.slow

DELAY_S = 0.1
TOKENS = 40
"""Decode takes longer than the delay, or a late first chunk would be a late last one too."""
ALLOWED = 0.5
"""Of the delay: by so much a part may be off."""
ROUNDS = 5
"""The medians of so many are judged, once: what a busy machine adds to a part hits the requests with a delay and those
without alike."""
PATIENCE_S = 120.0
"""A starved machine writes late; a lease is as patient, because no worker dies here."""

Parts = dict[str, float]
"""Milliseconds by part."""
Samples = dict[str, dict[str, list[float]]]
"""Those of each delayed part."""


async def test_a_delay_shows_in_exactly_one_part(
    empty_house: House, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delay before the body, the claim, the submit, the engine's run, in prefill, in decode, before the first write
    and before the last: each lengthens its own part and no other, by medians, beside the same request without a delay
    in the same round. And the parts are what the client waits."""
    often = "OTEL_BSP_SCHEDULE_DELAY", "100"  # the exporter's own: ms between two batches of spans
    monkeypatch.setenv(*often)
    empty_house.environ |= dict(
        [often, ("PENSTOCK_TELEMETRY_OTLP_ENDPOINT", collector.url), ("PENSTOCK_REDIS_LEASE_MS", "60000")]
    )
    empty_house.start_api()
    timed, traced = (defaultdict[str, Any](lambda: defaultdict(list)) for _ in range(2))
    tracing = start_tracing("worker", collector.url)
    recorder = Recorder("sim", Metrics.start("", "worker"), tracing)
    wire = RedisClient.open(RedisSettings(url=empty_house.redis_url, lease_ms=60_000))
    try:
        for slow in ("", *SLOW_PARTS) * ROUNDS:
            async with working(wire, recorder, slow, DELAY_S):
                job_id, spent_s = await ask(empty_house.port, TOKENS, slow, DELAY_S)
                timing = await asyncio.to_thread(_timing, empty_house, job_id)
                spans = await asyncio.to_thread(_traced, collector, job_id)
            assert abs(timing["sum_ms"] - timing["end_to_end_ms"]) <= 1.0
            outside = spent_s * 1000 - timing["end_to_end_ms"]
            for part, spent_ms in {**timing["parts_ms"], "outside": outside}.items():
                timed[slow][part].append(spent_ms)
            for part, spent_ms in spans.items():
                traced[slow][part].append(spent_ms)
    finally:
        await wire.close()
        tracing.close()
    assert _misplaced(timed) + _misplaced(traced) == []


def _timing(house: House, job_id: str) -> dict[str, Any]:
    """Once its delivery is noted, a moment after the answer."""

    def noted() -> dict[str, Any] | None:
        found: dict[str, Any] = json.loads(house.get(f"/v1/jobs/{job_id}/timing")[1])
        return found if found["until"] == "last_sent" else None

    timing = eventually(noted, seconds=PATIENCE_S)
    assert isinstance(timing, dict)
    return timing


def _traced(collector: Collector, job_id: str) -> Parts:
    """The parts as the spans of the job's trace have them."""

    def whole() -> dict[str, SentSpan] | None:
        sent = list(collector.sent)
        own = {span.trace_id for span in sent if attributes_of(span).get("penstock.job.id") == job_id}
        found = {span.name: span for span in sent if span.trace_id in own}
        return found if {"POST /v1/chat/completions", "chat sim", "engine", "finish"} <= found.keys() else None

    spans = eventually(whole, seconds=PATIENCE_S)
    assert isinstance(spans, dict)
    begin = {name: span.start_time_unix_nano / 1e6 for name, span in spans.items()}
    end = {name: span.end_time_unix_nano / 1e6 for name, span in spans.items()}
    request = "POST /v1/chat/completions"
    at = {event.name: event.time_unix_nano / 1e6 for name in (request, "engine") for event in spans[name].events}
    return {
        "ingress": end["enqueue"] - begin[request],
        "queue": end["queue"] - begin["queue"],
        "gate": begin["engine"] - begin["chat sim"],
        "engine_wait": at["scheduled"] - begin["engine"],
        "prefill": at["first token"] - at["scheduled"],
        "decode": end["engine"] - at["first token"],
        "egress_tail": end[request] - end["engine"],
        "egress_first": at[FIRST_SENT] - at["first token"],
    }


def _misplaced(samples: Samples) -> list[str]:
    """What grew that should not have, or did not grow by the delay; and time of the client's that is in no part."""
    wrong, delay_ms, control = [], DELAY_S * 1000, samples[""]
    for slow, parts in samples.items():
        wrong += [f"there is no {slow}"] if slow and slow not in parts else []
        for part, times in parts.items():
            grown, wanted = median(times) - median(control[part]), delay_ms if part == slow else 0.0
            if abs(grown - wanted) > ALLOWED * delay_ms:
                wrong.append(f"{slow or 'nothing'} late by {delay_ms:g} ms: {part} by {grown:.1f} ms")
    if median(control.get("outside", [0.0])) > delay_ms:
        wrong.append(f"the client waited {median(control['outside']):.1f} ms longer than the parts say")
    return wrong
