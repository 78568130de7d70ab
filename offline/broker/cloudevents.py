"""CloudEvents encoder: an event of a job or batch as a CloudEvent 1.0, structured mode, JSON."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from api.openai.rendering import Facts, JobView, job_object, to_json
from api.openai.results import result
from streaming.events.outbox import Event
from streaming.jobs.records import JobRecord

CONTENT_TYPE = "application/cloudevents+json"
SHOWN = ("model", "priority", "metadata")
"""Fields of the job object that never change."""


def cloud_event(event: Event, record: JobRecord | None, source: str, *, results: bool) -> bytes:
    """Encode the event. `record` is the job's; None for a batch or an expired job: then only the id is sent."""
    data: dict[str, Any] = {"id": event.subject, "tenant": event.tenant}
    if record is not None:
        view = JobView.of(record, Facts.of(record.job, record.created_ms))
        shown = job_object(view, _result(record) if results else None)
        data |= shown if _over(event) else {name: shown[name] for name in SHOWN}
    return to_json(
        {
            "specversion": "1.0",
            "id": event.id,
            "source": source,
            "type": f"penstock.{event.type}",
            "subject": event.subject,
            "time": datetime.fromtimestamp(event.at_ms / 1000, UTC).isoformat(timespec="milliseconds"),
            "datacontenttype": "application/json",
            "data": data,
        }
    )


def _over(event: Event) -> bool:
    return event.type not in ("job.accepted", "job.started")


def _result(record: JobRecord) -> dict[str, Any] | None:
    """Return the answer of a completed job, else None."""
    if record.terminal is None or not record.completed:
        return None
    return result(record)
