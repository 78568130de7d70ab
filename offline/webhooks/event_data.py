"""Event data: what the message of a webhook says about the job, response or batch that ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from api.openai.rendering import Facts, JobView, job_object, to_json
from api.openai.responses.ids import response_id
from api.openai.responses.object import outcome
from streaming.batches.store import Batches
from streaming.errors import UnknownBatch
from streaming.events.outbox import Event
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord

PREFIX = "response."
BY_STATE = {"expired": "failed"}
"""How a response ended whose record is gone, where the state of its job is no status of a response."""
SHOWN = (
    *("id", "status", "endpoint", "model", "priority", "created_at", "completed_at", "attempts", "usage", "error"),
    *("cancelled_by", "metadata"),
)
"""Fields of the job object that messages have."""


async def with_data(events: Sequence[Event], reader: JobReader, batches: Batches) -> list[tuple[Event, str]]:
    """Return the events with the data of their messages. That of a record that is gone has only id and status.

    A response's event gets its id and its final status: the job's state alone does not say whether a token limit ended
    the text. Raises Unavailable.
    """
    jobs = list({event.subject for event in events if event.subject.startswith("job_")})
    records = dict(zip(jobs, await reader.records(jobs, resultless=jobs), strict=True))
    told = []
    for event in events:
        if event.subject.startswith("batch_"):
            told.append((event, _encoded(await _of_batch(event, batches))))
            continue
        record = records.get(event.subject)
        told.append(_of_job(event, record if record is not None and record.job.tenant == event.tenant else None))
    return told


def _of_job(event: Event, record: JobRecord | None) -> tuple[Event, str]:
    state = event.type.rpartition(".")[2]
    data: dict[str, Any] = {}
    if record is not None and record.terminal is not None:
        shown = job_object(JobView.of(record, Facts.of(record.job, record.created_ms)))
        data = {name: shown[name] for name in SHOWN}
        if data["error"]:
            del data["error"]["message"]  # a server may quote the prompt in it
        data["result_url"] = f"/v1/jobs/{event.subject}/result" if record.completed else None
    if record is not None and not event.recipients:  # written by a process of an older version
        event = replace(event, recipients=record.job.events, webhook=record.job.webhook)
    if event.type.startswith(PREFIX):
        status: str = BY_STATE.get(state, state)
        if record is not None and record.terminal is not None:
            status = outcome(record.terminal).status
        name = response_id(event.subject)
        if data.get("result_url"):
            data["result_url"] = f"/v1/responses/{name}"
        event, state = replace(event, type=PREFIX + status, subject=name), status
    return event, _encoded(data | {"id": event.subject, "status": state})


async def _of_batch(event: Event, batches: Batches) -> dict[str, Any]:
    data: dict[str, Any] = {"id": event.subject, "status": event.type.rpartition(".")[2]}
    try:
        record = await batches.get(event.subject, event.tenant)
    except UnknownBatch:
        return data
    progress = record.progress
    return data | {
        "metadata": dict(record.batch.metadata),
        "request_counts": {"total": progress.total, "completed": progress.completed, "failed": progress.failed},
        "output_file_id": progress.output_file or None,
        "error_file_id": progress.error_file or None,
    }


def _encoded(data: dict[str, Any]) -> str:
    return to_json(data).decode()
