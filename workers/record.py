"""What a worker tells the outside about its jobs: metrics, and the queue and generate spans of each trace."""

from __future__ import annotations

import time

from streaming.messages import State, Terminal
from telemetry import tracing
from telemetry.metrics import Metrics
from telemetry.tracing import Attributes, Span, Tracing
from workers.attempt import Attempt
from workers.tally import Tally

MANY_ATTEMPTS = 10
"""Later ones are counted together: a job that is handed back may have any number."""


class Recorder:
    """One per worker process."""

    def __init__(self, model: str, metrics: Metrics, tracer: Tracing, tally: Tally | None = None) -> None:
        self._model, self.metrics, self._tracer = model, metrics, tracer
        self._tally = tally or Tally()
        self._spans: dict[str, Span] = {}
        self._cancelled: dict[str, float] = {}

    def claimed(self, attempt: Attempt) -> None:
        """A job was taken from its lane."""
        job, claim = attempt.job, attempt.claim
        waited_s = max(0, claim.claimed_ms - claim.created_ms) / 1000
        self.metrics.claims.labels(self._model, job.priority).inc()
        number = str(claim.attempt) if claim.attempt < MANY_ATTEMPTS else f"{MANY_ATTEMPTS}+"
        self.metrics.attempts.labels(self._model, number).inc()
        if claim.attempt == 1:
            self.metrics.queue_time.labels(self._model, job.priority).observe(waited_s)
        now_ns = time.time_ns()
        queue = self._tracer.span(
            "queue",
            job.trace or None,
            "consumer",
            now_ns - int(waited_s * 1e9),
            {tracing.JOB_ID: job.id, tracing.PRIORITY: str(job.priority), tracing.ATTEMPT: claim.attempt},
        )
        queue.end(now_ns)
        attributes: Attributes = {
            tracing.JOB_ID: job.id,
            tracing.REQUEST_MODEL: self._model,
            tracing.ATTEMPT: claim.attempt,
        }
        self._spans[job.id] = self._tracer.span("generate", queue.carrier(), "internal", now_ns, attributes)

    def cancelled(self, job_id: str) -> None:
        """A cancel was heard."""
        self._cancelled.setdefault(job_id, time.monotonic())

    def ended(self, attempt: Attempt, end: Terminal) -> None:
        """A job reached its end here."""
        metrics = self.metrics
        self._tally.ended(attempt.job.priority.value, end)
        metrics.jobs.labels(self._model, end.state).inc()
        for kind, count in (
            ("prompt", end.usage.prompt),
            ("completion", end.usage.completion),
            ("cached", end.usage.cached),
        ):
            metrics.tokens.labels(self._model, kind).inc(count)
        if (heard := self._cancelled.pop(end.job, None)) is not None:
            metrics.cancel_to_abort.labels(self._model).observe(time.monotonic() - heard)
        if end.state is State.EXPIRED:
            metrics.deadline_misses.labels("running").inc()
        if end.failure is not None:
            metrics.errors.labels(end.failure.code).inc()
        if span := self._spans.pop(attempt.job.id, None):
            span.end(
                error=end.failure.code if end.failure else None,
                attributes={
                    tracing.JOB_STATE: str(end.state),
                    tracing.INPUT_TOKENS: end.usage.prompt,
                    tracing.OUTPUT_TOKENS: end.usage.completion,
                },
            )

    def released(self, job_id: str) -> None:
        """A job was handed back unfinished."""
        self._cancelled.pop(job_id, None)
        if span := self._spans.pop(job_id, None):
            span.end(attributes={tracing.JOB_STATE: "released"})

    def load(self, slots: int, running: int, reserved: int = 0) -> None:
        """How full the engine is."""
        self.metrics.worker_slots.labels(self._model).set(slots)
        self.metrics.worker_running.labels(self._model).set(running)
        self.metrics.worker_reserved.labels(self._model).set(reserved)
