"""Attempt traces: the spans of each attempt at a job, in the trace of the request that put it into the queue.

An attempt has up to four spans: `queue`, from the acceptance (or from the end of the attempt before) to the claim; the
attempt itself, from the claim until the store has its end, named as the GenAI conventions ask; in it `engine`, from the
hand-over to the last token; and `finish`, the write of its end. The span of an attempt links to that of the attempt
before it, whichever worker had that one (streaming/jobs/attempt_spans.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from streaming.jobs.attempt_spans import attempt_id, link_before, own_attempts, requested, span_name, write_lost
from streaming.jobs.terminal import Terminal
from telemetry import tracing as names
from telemetry.tracing import TRACEPARENT, Attributes, Span, Tracing, extract, is_sampled
from workers.attempt import Attempt


@dataclass(slots=True)
class _Open:
    """What is open of one attempt."""

    attempt: Attempt
    span: Span
    finish: Span | None = None
    end: tuple[str | None, Attributes] = (None, {})
    """Error and attributes of its end."""


@runtime_checkable
class CallTracer(Protocol):
    """An engine that records its calls to other servers as spans under `Request.trace`."""

    def trace_calls(self, tracing: Tracing) -> None:
        """Called once, before the engine starts."""


class AttemptTraces:
    """One per worker process. Jobs whose trace is not sampled cost one look at their context."""

    def __init__(self, tracing: Tracing, worker: str = "") -> None:
        """`worker`: its name in `penstock ps`."""
        self.tracing, self._worker = tracing, worker
        self._open: dict[str, _Open] = {}
        """By job."""

    def claimed(self, attempt: Attempt, ago_us: int = 0) -> None:
        """Write the span of the wait that has ended, and begin that of the attempt. `ago_us`: since the claim."""
        job, claim = attempt.job, attempt.claim
        attempt.trace = extract(job.trace).get(TRACEPARENT, "")
        if not (self.tracing.recording and is_sampled(job.trace)):
            return
        claimed_ns, earlier = time.time_ns() - 1000 * max(0, ago_us), own_attempts(job, claim.earlier)
        # The store's clock measured the wait; this process's clock places it.
        waits_since_ms = earlier[-1].ended_ms if earlier else claim.created_ms
        about: Attributes = {names.JOB_ID: job.id, names.PRIORITY: str(job.priority), names.ATTEMPT: claim.attempt}
        began_ns = claimed_ns - max(0, claim.claimed_ms - waits_since_ms) * 1_000_000
        self.tracing.span("queue", job.trace, "consumer", began_ns, about).end(claimed_ns)
        span = self.tracing.span(
            span_name(job),
            job.trace,
            "internal",
            claimed_ns,
            {**about, **requested(job), names.TENANT: job.tenant, names.WORKER: self._worker},
            link_before(job, earlier),
            attempt_id(job, claim.claimed_ms),
        )
        attempt.trace = span.carrier()[TRACEPARENT]
        self._open[job.id] = _Open(attempt, span)

    def put_back(self, job_id: str, outcome: str) -> None:
        """End an attempt whose job another worker continues. `outcome`: handed_back, preempted or returned."""
        if (found := self._open.pop(job_id, None)) is not None:
            self._write_engine_span(found)
            found.span.add_event(outcome)
            found.span.end(attributes={names.JOB_STATE: outcome, **_continued(found.attempt)})

    def forget(self, job_id: str) -> None:
        """Drop an attempt that is no longer this worker's: the job's record says what became of it, and so does the
        process that ends the job."""
        self._open.pop(job_id, None)

    def over(self, attempt: Attempt, end: Terminal) -> None:
        """The engine is done with a job, whose end is written now."""
        if (found := self._open.get(end.job)) is None:
            return
        self._write_engine_span(found)
        error = end.failure.code if end.failure else None
        found.end = error, {**answered(attempt, end), **_continued(attempt)}
        found.finish = self.tracing.span("finish", found.span.carrier(), attributes={names.JOB_STATE: end.state})

    def written(self, ends: Iterable[Terminal]) -> None:
        """The store has these ends."""
        for end in ends:
            if (found := self._open.pop(end.job, None)) is not None:
                if found.finish is not None:
                    found.finish.end()
                error, attributes = found.end
                found.span.end(error=error, attributes=attributes)
                claim = found.attempt.claim
                write_lost(self.tracing, claim.job, claim.earlier, claim.attempt)

    def _write_engine_span(self, found: _Open) -> None:
        stamps = found.attempt.stamps
        if not stamps.released:
            return
        since_ns = time.time_ns() - time.monotonic_ns()

        def at_ns(seconds: float) -> int:
            return since_ns + int(seconds * 1e9)

        span = self.tracing.span("engine", found.span.carrier(), "internal", at_ns(stamps.released))
        if stamps.scheduled:
            span.add_event("scheduled", at_ns(stamps.scheduled))
        if stamps.first:
            span.add_event("next token" if found.attempt.shown_ms else "first token", at_ns(stamps.first))
        span.end(at_ns(stamps.last) if stamps.last else None)


def answered(attempt: Attempt, end: Terminal) -> dict[str, str | int | float | bool | Sequence[str]]:
    """What the answer has."""
    found: dict[str, str | int | float | bool | Sequence[str]] = {
        names.JOB_STATE: str(end.state),
        names.RESPONSE_ID: end.job,
        names.RESPONSE_MODEL: end.served_by[0] if end.served_by else attempt.job.model,
        names.INPUT_TOKENS: end.usage.prompt,
        names.CACHED_TOKENS: end.usage.cached,
        names.OUTPUT_TOKENS: end.usage.completion,
    }
    if end.failure is not None:
        found[names.ERROR_TYPE] = end.failure.code
    if reasons := [reason for reason in end.finishes if reason]:
        found[names.FINISH_REASONS] = reasons
    stamps = attempt.stamps
    if attempt.job.stream and stamps.first and stamps.released and not attempt.is_continued:
        found[names.FIRST_CHUNK] = round(stamps.first - stamps.released, 6)
    return found


def _continued(attempt: Attempt) -> dict[str, int]:
    count = sum(attempt.past_tokens)
    return {names.CONTINUED_TOKENS: count} if count else {}
