"""Turns of conversations: adds the items of a response that has ended to its conversation, exactly once.

Nobody has to be there when a response ends. Whoever reads the conversation next adds the items, which follow from the
response's job; of several at once, the store takes the change of one. A reader that cannot add them, because the store
is full, sees them nevertheless. The job is kept at least as long as the conversation, unless it is forgotten early:
that adds its items first.
"""

from __future__ import annotations

from typing import Any

import msgspec

from api.openai import errors
from api.openai.job_errors import from_failure
from api.openai.rendering import to_json
from api.openai.responses.answer_items import given_up
from api.openai.responses.object import ended_response
from api.responses.facts import facts_of, own_items
from api.services import Services
from streaming.errors import ConversationChanged, DecodeError, Unavailable, UnknownConversation, UnknownJob
from streaming.jobs.conversations import Conversation, ConversationItem
from streaming.jobs.records import NEWER, JobRecord

MAX_READS = 8
"""Readers that end the same turn at once read again; more changes than this at once are refused."""


async def current(services: Services, tenant: str, conversation_id: str, *, kept: bool = False) -> Conversation:
    """Read a conversation with the items of each response that has ended. `kept`: only as the store keeps it.

    Raises ApiError (404, 500, 503), Unavailable.
    """
    for _ in range(MAX_READS):
        try:
            conversation = await services.conversations.read(conversation_id, tenant)
        except UnknownConversation:
            raise errors.conversation_not_found() from None
        except DecodeError:
            raise errors.conversation_unreadable() from None
        if not conversation.turn or (items := await _ended(services, conversation)) is None:
            return conversation
        try:
            await services.conversations.end_turn(conversation, items)
        except (ConversationChanged, UnknownConversation):
            continue
        except Unavailable:  # the store is full: the next reader that finds room adds the same items
            if kept:
                raise
            return msgspec.structs.replace(conversation, turn="", items=(*conversation.items, *items))
    raise errors.conversation_locked()


async def _ended(services: Services, conversation: Conversation) -> list[ConversationItem] | None:
    """Return what the conversation's turn adds if its response has ended; None if it has not."""
    try:
        record = await services.job_reader.outline(conversation.turn, conversation.tenant)
    except UnknownJob:  # the store was emptied of it by hand
        return []
    return await _items(services, record) if record.state.final else None


async def _items(services: Services, record: JobRecord) -> list[ConversationItem]:
    """Return what a response that has ended adds: its input and its answer, or nothing if it has none. Raises ApiError
    (503, 500) if its record cannot be read here."""
    if record.newer or (record.completed and record.is_newer_body):
        raise from_failure(NEWER)
    if not record.completed:
        return []
    if record.fault:
        raise errors.conversation_unreadable()
    record = await services.job_reader.with_rows(record)
    terminal, job = record.terminal, record.job
    assert terminal is not None
    work = ended_response(facts_of(record), terminal, terminal.rows, given_up(job, record.drafts))
    answer = (await services.store_client.turns.run(work, len(terminal.rows)))["output"]
    items = [_stored(item, "") for item in own_items(record)]
    return items + [_stored(_without_logprobs(item), job.id) for item in answer]


def _stored(item: dict[str, Any], answer: str) -> ConversationItem:
    return ConversationItem(item["id"], msgspec.Raw(to_json(item)), answer)


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    parts = [part | {"logprobs": []} if "logprobs" in part else part for part in item.get("content", ())]
    return item | {"content": parts} if parts else item


async def add_turn(services: Services, tenant: str, conversation_id: str) -> None:
    """Add the items of a response that is to be forgotten. Raises ApiError (500, 503), Unavailable."""
    try:
        await current(services, tenant, conversation_id, kept=True)
    except errors.ApiError as error:
        if error.status != 404:
            raise
