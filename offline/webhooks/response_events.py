"""Response events: what webhooks are told of the end of a response, from the end of its job."""

from __future__ import annotations

from dataclasses import replace

from api.openai.responses.ids import response_id
from api.openai.responses.object import outcome
from streaming.errors import UnknownJob
from streaming.events.outbox import Event
from streaming.jobs.reader import JobReader

PREFIX = "response."
BY_STATE = {"expired": "failed"}
"""How a response ended whose record is gone, where the state of its job is no status of a response."""


async def as_told(event: Event, reader: JobReader) -> Event:
    """Return the event with the id and the final status of the response; any other event as it is.

    The job's state alone does not say whether a token limit ended the text. Raises Unavailable.
    """
    if not event.type.startswith(PREFIX):
        return event
    state = event.type.removeprefix(PREFIX)
    status: str = BY_STATE.get(state, state)
    try:
        record = await reader.outline(event.subject, event.tenant)
    except UnknownJob:  # deleted since
        pass
    else:
        status = outcome(record.terminal).status if record.terminal is not None else status
    return replace(event, type=PREFIX + status, subject=response_id(event.subject))
