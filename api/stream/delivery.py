"""Delivery timestamps: when an answer's first and last tokens arrived from the worker and went to the network."""

from __future__ import annotations

import time

from api.admission import Admitted
from api.services import Services
from streaming.jobs.codec import Terminal
from streaming.jobs.job import JobState
from streaming.jobs.records import Delivered
from telemetry.latency import EGRESS_FIRST, PARTS
from telemetry.metrics import Metrics
from telemetry.records.schema import DeliveryRecord
from telemetry.tracing import FIRST_SENT, current


class Delivery:
    """The four timestamps of one reply, each set by a call at its moment; `note` adds them to the job's timing."""

    __slots__ = ("_first_received", "_first_sent", "_last_received", "_last_sent")

    def __init__(self) -> None:
        self._first_received = self._first_sent = self._last_received = self._last_sent = 0.0

    def first_got(self) -> None:
        """The first token arrived."""
        self._first_received = time.monotonic()

    def first_sent(self) -> None:
        """The first token was written to the connection. Idempotent."""
        self._first_sent = self._first_sent or time.monotonic()

    def last_got(self) -> None:
        """The job's end arrived."""
        self._last_received = time.monotonic()

    def last_sent(self) -> None:
        """The end of the answer was written to the connection."""
        self._last_sent = time.monotonic()

    def note(self, services: Services, admitted: Admitted, end: Terminal | None) -> None:
        """Record the timestamps, for the job's timing, in its trace, in the metrics and on the local disk, unless
        another request created the job (same idempotency key). `end`: of the job, if this process has it."""
        if admitted.accepted.joined or not (self._first_received or self._last_received):
            return
        clock, partition, whole = services.clock, admitted.partition, not admitted.request.streams
        delivered = Delivered(
            first_got=0 if whole else clock.at(self._first_received, partition),
            first_sent=0 if whole else clock.at(self._first_sent, partition),
            last_got=clock.at(self._last_received, partition),
            last_sent=clock.at(self._last_sent, partition),
            clock_us=clock.error_us(partition),
            whole=whole,
        )
        services.deliveries.note(admitted.job.id, delivered)
        services.records.write(_record(admitted.job.id, services.name, delivered))
        self._mark_trace()
        if end is not None and end.state is JobState.COMPLETED:
            count_parts(services.metrics, admitted.job.model, delivered, end)

    def _mark_trace(self) -> None:
        """Add the moment of the first token to the span of the request, if its trace is recorded."""
        span = current()
        if span is not None and span.recorded and self._first_sent:
            span.add_event(FIRST_SENT, time.time_ns() - int((time.monotonic() - self._first_sent) * 1e9))


def count_parts(metrics: Metrics, model: str, delivered: Delivered, end: Terminal) -> None:
    """Count how long the answer of a completed job was on its way from the engine to the client."""
    ways = ((PARTS[-1], end.last_ms, delivered.last_sent), (EGRESS_FIRST, end.first_ms, delivered.first_sent))
    for part, made_ms, sent_us in ways:
        if made_ms and sent_us:
            metrics.parts.labels(model, part.name).observe(max(0, sent_us - 1000 * made_ms) / 1_000_000)


def _record(job_id: str, process: str, delivered: Delivered) -> DeliveryRecord:
    return DeliveryRecord(
        id=job_id,
        by=process,
        first_got_us=delivered.first_got,
        first_sent_us=delivered.first_sent,
        last_got_us=delivered.last_got,
        last_sent_us=delivered.last_sent,
        clock_us=delivered.clock_us,
        whole=delivered.whole,
    )
