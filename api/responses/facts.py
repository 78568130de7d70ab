"""Facts of a stored response: reads them, and the input of its request, from the job of the response."""

from __future__ import annotations

from api.openai.responses.items import input_items
from api.openai.responses.object import ResponseFacts
from penstock.engine import ChatTurn
from streaming.jobs.job import Chat, ResponseForm
from streaming.jobs.records import JobRecord


def form_of(record: JobRecord) -> ResponseForm:
    return record.job.response or ResponseForm()


def facts_of(record: JobRecord) -> ResponseFacts:
    return ResponseFacts(record.job, record.created_ms)


def own_turns(record: JobRecord) -> tuple[ChatTurn, ...]:
    """Return the turns of a response's own input."""
    turns = record.job.prompt.turns if isinstance(record.job.prompt, Chat) else ()
    return turns[len(turns) - form_of(record).own_turns :]


def own_items(record: JobRecord) -> list[dict[str, object]]:
    """Render the items of a response's own input, oldest first."""
    return input_items(record.job.id, own_turns(record), form_of(record).developer)
