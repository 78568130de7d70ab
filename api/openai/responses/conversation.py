"""Conversations of the Responses API: validates requests for them, renders them, and makes turns of their items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import Field, field_validator

from api.openai.fields import Metadata, StrictBody, refusal
from api.openai.rendering import to_json
from api.openai.responses.items import Item, ItemReference, Message, kind_of, reasoned_turn, refused_extras, shown_turn
from penstock.engine import ChatTurn
from penstock.loops import Sliced
from penstock.tools import ToolCall
from streaming.errors import DecodeError
from streaming.jobs.conversations import Conversation, ConversationItem

MAX_ADDED = 20
"""Items of one request."""
ITEMS_PER_SLICE = 100
"""Items that one slice makes turns of, in about half a millisecond if they are short."""


class _KeptPart(msgspec.Struct):
    text: str | None = None
    refusal: str = ""

    def __post_init__(self) -> None:
        if self.text is None:
            if not self.refusal:
                raise ValueError("it has no text")
            self.text = ""


class _KeptMessage(msgspec.Struct, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: list[_KeptPart]


class _KeptCall(msgspec.Struct, tag="function_call"):
    call_id: str
    name: str
    arguments: str


class _KeptOutput(msgspec.Struct, tag="function_call_output"):
    call_id: str
    output: str


class _KeptReasoning(msgspec.Struct, tag="reasoning"):
    content: list[_KeptPart] = []


_KEPT = msgspec.json.Decoder(_KeptMessage | _KeptCall | _KeptOutput | _KeptReasoning)

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
        match _KEPT.decode(item.shown):
            case _KeptCall(call_id, name, arguments):
                fields = msgspec.json.decode(item.shown)
                extras = {field: value for field, value in fields.items() if field not in OF_CALLS}
                return ChatTurn("assistant", "", (ToolCall(call_id, name, arguments, extras),))
            case _KeptOutput(call_id, output):
                return ChatTurn("tool", output, call_id=call_id)
            case _KeptMessage(role, content):
                text, refused = ("".join([getattr(part, field) for part in content]) for field in ("text", "refusal"))
                extras = refused_extras(refused) if refused and not text else {}
                return ChatTurn("system" if role == "developer" else role, text + refused, extras=extras)
            case kept:
                return reasoned_turn("".join([part.text for part in kept.content]))
    except ValueError as error:  # of the library, also for what is no UTF-8
        raise DecodeError(bytes(item.shown), error) from error
