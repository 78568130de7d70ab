"""Spans of a job's attempts: their names, ids and attributes, and those that no worker could end.

A worker writes the spans of the attempts that it ends (workers/record.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from streaming.jobs.job import Job, PastAttempt, operation_of
from streaming.jobs.records import JobRecord
from telemetry import tracing as names
from telemetry.otlp import Attributes
from telemetry.tracing import Tracing, derived_id, is_sampled, sibling

LOST = "lost"
NS_PER_MS = 1_000_000


def span_name(job: Job) -> str:
    """The name of an attempt's span, as the GenAI conventions ask."""
    return f"{operation_of(job)} {job.model}"


def attempt_id(job: Job, claimed_ms: int) -> str:
    """The id of the span of the attempt that was claimed then (Redis time). Any process can compute it: the next
    attempt links to that span, and the process that sees the end of the job writes it for a worker that was killed."""
    return derived_id(job.trace, job.id, claimed_ms)


def own_attempts(job: Job, attempts: Sequence[PastAttempt]) -> list[PastAttempt]:
    """Those of this job, without those of the job of which it is a replay."""
    return [each for each in attempts if each not in job.past]


def requested(job: Job) -> dict[str, str | int | float | bool]:
    """What was asked for; nothing that a client wrote."""
    sampling = job.sampling
    known = {
        names.MAX_TOKENS: sampling.max_tokens,
        names.TEMPERATURE: sampling.temperature,
        names.TOP_P: sampling.top_p,
        names.SEED: sampling.seed,
        names.CHOICES: job.choices if job.choices > 1 else None,
    }
    return {
        names.OPERATION: operation_of(job),
        names.PROVIDER: names.PROVIDER_NAME,
        names.REQUEST_MODEL: job.model,
        names.STREAM: job.stream,
        **{name: value for name, value in known.items() if value is not None},
    }


def link_before(job: Job, attempts: Sequence[PastAttempt]) -> list[dict[str, str]]:
    """The link of an attempt to the newest of those before it."""
    return [sibling(job.trace, attempt_id(job, each.started_ms)) for each in attempts[-1:]]


def write_lost(tracing: Tracing, job: Job, earlier: Sequence[PastAttempt], attempt: int) -> None:
    """Write the spans of lost attempts: their workers ended before they could.

    Args:
        earlier: the attempts before the last, oldest first.
        attempt: the number of the attempt after them.
    """
    own = own_attempts(job, earlier)
    for index, past in enumerate(own):
        if past.outcome != LOST:
            continue
        attributes: dict[str, str | int | float | bool] = {
            names.JOB_ID: job.id,
            names.ATTEMPT: attempt - len(own) + index,
            names.PRIORITY: str(job.priority),
            names.TENANT: job.tenant,
            names.WORKER: past.worker,
            names.JOB_STATE: past.outcome,
            names.ERROR_TYPE: "worker_lost",
            **requested(job),
        }
        if past.tokens is not None:
            attributes[names.OUTPUT_TOKENS] = past.tokens
        name, began_ns, links = span_name(job), past.started_ms * NS_PER_MS, link_before(job, own[:index])
        own_id = attempt_id(job, past.started_ms)
        span = tracing.span(name, job.trace, "internal", began_ns, attributes, links, own_id)
        span.end(past.ended_ms * NS_PER_MS, "the worker was lost")


def write_end(tracing: Tracing, record: JobRecord) -> None:
    """Write the spans of a job that no worker ended: expired or cancelled in the queue, or given up. The record was
    read with its body, which holds the context."""
    job = record.job
    if not is_sampled(job.trace):
        return
    write_lost(tracing, job, record.attempts, record.attempt + 1)
    done_ns = record.done_ms * NS_PER_MS
    error = record.terminal.failure.code if record.terminal is not None and record.terminal.failure else ""
    about: Attributes = {names.JOB_ID: job.id, names.JOB_STATE: str(record.state), names.ERROR_TYPE: error}
    tracing.span("ended", job.trace, "internal", done_ns, about).end(done_ns, error or None)
