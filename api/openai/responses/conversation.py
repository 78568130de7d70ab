"""Conversations of the Responses API: validates requests for them, renders them, and makes turns of their items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from pydantic import Field, field_validator

from api.openai.fields import Metadata, StrictBody, refusal
from api.openai.rendering import to_json
from api.openai.responses.items import (
    ROLES,
    Item,
    ItemReference,
    Message,
    kind_of,
    reasoned_turn,
    refused_extras,
    shown_turn,
)
from penstock.engine import ChatTurn
from penstock.loops import Sliced
from penstock.tools import ToolCall
from streaming.errors import DecodeError
from streaming.jobs.conversations import Conversation, ConversationItem

MAX_ADDED = 20
"""Items of one request."""
ITEMS_PER_SLICE = 100
"""Items that one slice makes turns of, in about half a millisecond if they are short."""


OF_CALLS = frozenset({"id", "type", "status", "call_id", "name", "arguments"})
"""Fields of a call's item that are no extras."""

NewItems: TypeAlias = Annotated[list[Item], Field(max_length=MAX_ADDED, fail_fast=True)]


def _check_references(items: list[Any] | None) -> list[Any] | None:
    if any(isinstance(item, ItemReference) for item in items or ()):
        raise refusal("cannot have an item_reference: send the item itself")
    return items


class ConversationRequest(StrictBody):
    """The body of POST /v1/conversations."""

    items: NewItems | None = None
    """Its first items, oldest first; at most 20."""
    metadata: Metadata | None = None
    """Your own labels; the conversation shows them."""

    _no_references = field_validator("items")(_check_references)


class ConversationUpdate(StrictBody):
    """The body of POST /v1/conversations/{conversation_id}."""

    metadata: Metadata | None
    """Replaces the labels. Null: none."""


class ItemsRequest(StrictBody):
    """The body of POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[NewItems, Field(min_length=1)]
    """Items, oldest first; at most 20. Reasoning is left out."""

    _no_references = field_validator("items")(_check_references)


def conversation_object(conversation: Conversation) -> dict[str, Any]:
    """Render a conversation, without its items."""
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_ms // 1000,
        "metadata": conversation.metadata,
    }


def new_items(sent: Iterable[Any], token: str) -> list[ConversationItem]:
    """Return the items of a request as a conversation keeps them, with ids of their own, which `token` makes unique."""
    found = list[ConversationItem]()
    for item in sent:
        if (turn := item.turn) is not None:
            item_id = f"{kind_of(turn)}_{token}{len(found)}"
            shown = shown_turn(item_id, turn, developer=isinstance(item, Message) and item.of_developer)
            found.append(ConversationItem(item_id, msgspec.Raw(to_json(shown))))
    return found


def turns_of(items: Sequence[ConversationItem]) -> Sliced[tuple[ChatTurn, ...]]:
    """Return the turns of a conversation as engines take them. The items of one answer are one turn. Raises
    DecodeError."""
    found, answer = list[ChatTurn](), ""
    for number, item in enumerate(items, 1):
        turn = _turn(item)
        if item.answer and item.answer == answer:
            before = found.pop()
            if before.content and turn.content:  # then it is not only a refusal
                before, turn = (msgspec.structs.replace(each, extras=_unrefused(each)) for each in (before, turn))
            turn = ChatTurn("assistant", before.content + turn.content, before.calls + turn.calls,
                            extras=before.extras | turn.extras)  # fmt: skip
        found.append(turn)
        answer = item.answer
        if not number % ITEMS_PER_SLICE:
            yield
    return tuple(found)


def _unrefused(turn: ChatTurn) -> dict[str, Any]:
    return {} if "refusal" in turn.extras else turn.extras


def _turn(item: ConversationItem) -> ChatTurn:
    """Raises DecodeError."""
    try:
        match msgspec.json.decode(item.shown):
            case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(text)} as shown:
                extras = {field: value for field, value in shown.items() if field not in OF_CALLS}
                return ChatTurn("assistant", "", (ToolCall(call_id, name, text, extras),))
            case {"type": "function_call_output", "call_id": str(call_id), "output": str(output)}:
                return ChatTurn("tool", output, call_id=call_id)
            case {"type": "message", "role": str(role), "content": list(parts)} if role in ROLES:
                return _message(ROLES[role], parts)
            case {"type": "reasoning"} as shown:
                return reasoned_turn("".join([part["text"] for part in shown.get("content", ())]))
        raise ValueError("it is no item of a conversation")
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # also for what is no UTF-8
        raise DecodeError(bytes(item.shown), error) from error


def _message(role: str, parts: list[Any]) -> ChatTurn:
    """Raises KeyError, TypeError or AttributeError for parts that are none."""
    text = "".join([part["text"] for part in parts if not part.get("refusal")])
    refused = "".join([part["refusal"] for part in parts if part.get("refusal")])
    return ChatTurn(role, text + refused, extras=refused_extras(refused) if refused and not text else {})
