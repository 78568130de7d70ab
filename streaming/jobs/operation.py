"""Operation of a job: its name in spans and in the metrics of its answer."""

from __future__ import annotations

from streaming.jobs.job import Chat, Job
from telemetry.tracing import operation_name


def operation_of(job: Job) -> str:
    """One of telemetry.tracing.OPERATIONS."""
    return operation_name(job.task.kind if job.task is not None else None, is_chat=isinstance(job.prompt, Chat))
