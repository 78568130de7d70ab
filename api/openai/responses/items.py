"""Items of the Responses API: validates those of a request, renders those of a stored response or conversation, and
makes turns of them; and the requests for conversations.

Each becomes one turn: a message, a call of a function, or its output. Reasoning of earlier answers is taken and left
out, and so are the calls of tools that do not run here: models do not see them.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec.structs import replace
from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from api.openai import fields
from api.openai.errors import refuse_if
from api.openai.rendering import to_json
from penstock.engine import ChatTurn
from penstock.loops import Sliced
from penstock.tools import ToolCall
from streaming.errors import DecodeError
from streaming.jobs.conversations import Conversation, ConversationItem
from streaming.jobs.job import REFERENCE

RESPONSE = "resp_"
MESSAGE, CALL, OUTPUT, REASONING = "msg", "fc", "fco", "rs"
"""What ids of items begin with: of a message, a call, the output of a call, and reasoning."""
_ITEM = re.compile(r"(?:msg|fc|fco|rs)_(job_[0-9a-f]{32})_(in|out)([0-9]{1,4})")


def response_id(job_id: str) -> str:
    return RESPONSE + job_id


def job_of(response: str) -> str:
    """Return the job of a response; "" if this is no id of a response. The job's id itself is not checked."""
    return response.removeprefix(RESPONSE) if response.startswith(RESPONSE) else ""


def item_of(item: str) -> tuple[str, bool, int] | None:
    """Return the job of an item, whether the item is output, and its place; None if this is no id of an item."""
    match = _ITEM.fullmatch(item)
    return (match[1], match[2] == "out", int(match[3])) if match else None


HOSTED = r"^([a-z_]{1,56}_call(_output)?|mcp_[a-z_]{1,56}|tool_search_output|compaction(_trigger)?)$"
"""Items of tools that OpenAI's servers run, and of kinds of tools that have no place here."""
_KINDS = ("message", "item_reference", "function_call", "function_call_output", "reasoning")

ItemId: TypeAlias = Annotated[str, Field(max_length=128)]


class Part(fields.TextPart):
    """One part of an item's content."""

    PASSED = False


class InputMedia(fields.StrictBody):
    """A part of a message that is an image, a recording or a document. Refused if the model takes none."""

    type: Literal["input_image", "input_audio", "input_file"]
    """What it is."""
    image_url: fields.DataOrLink | None = None
    """Of an image: a data: URL with base64 of PNG, JPEG, GIF or WebP; or a link, if `[media] links` takes any."""
    detail: fields.Detail | None = None
    """For models of upstream servers."""
    input_audio: fields.InputAudio | None = None
    """A recording."""
    file_data: fields.DataUrl | None = None
    """Of a document: a data: URL with base64 of PDF or plain text."""
    file_url: fields.DataOrLink | None = None
    """Of a document: a link, if `[media] links` is `fetch`."""
    file_id: fields.FileId | None = None
    """A file of yours with the image or the document."""
    filename: fields.FileName | None = None
    """For models of upstream servers."""

    @model_validator(mode="after")
    def _one_source(self) -> InputMedia:
        sources = {"input_image": ("image_url", "file_id"), "input_audio": ("input_audio",)}
        names = sources.get(self.type, ("file_data", "file_url", "file_id"))
        if sum([getattr(self, name) is not None for name in names]) != 1:
            raise fields.refusal(f"needs {' or '.join(names)}")
        return self

    words: ClassVar[str] = ""

    @property
    def shown(self) -> dict[str, Any]:
        """As a part of OpenAI's chats."""
        if self.input_audio is not None:
            return fields.as_part("input_audio", vars(self.input_audio))
        if self.type == "input_image":
            return fields.as_part("image_url", {"url": self.image_url, "detail": self.detail, "file_id": self.file_id})
        data = self.file_data or self.file_url
        return fields.as_part("file", {"file_data": data, "filename": self.filename, "file_id": self.file_id})


AnyPart: TypeAlias = Annotated[
    Annotated[Part, Tag("<text>")] | Annotated[InputMedia, Tag("<media>")], Discriminator(fields.part_shape)
]
TEXT_OR_LIST = fields.by_shape(fields.shape, "a string or a list")
"""Tells which form a field has that takes a text or a list."""
MixedList: TypeAlias = Annotated[list[AnyPart], Field(max_length=fields.MAX_MESSAGES, fail_fast=True)]
Mixed: TypeAlias = Annotated[Annotated[str, Tag("<str>")] | Annotated[MixedList, Tag("<list>")], TEXT_OR_LIST]


def _is_refusal(content: Any) -> bool:
    return isinstance(content, list) and all(part.type == "refusal" for part in content)


def refused_extras(text: str) -> dict[str, Any]:
    """The extras of a turn that is nothing but a refusal: so a model's server gets it, and an item shows it."""
    return {"content": None, "refusal": text}


ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""By the role of a message that of its turn: chat templates know no `developer`."""


class InputItem(fields.StrictBody):
    """An item of an input."""

    id: ItemId | None = None
    """Without effect: input items get ids of their own."""
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    """Without effect."""


class Message(InputItem):
    """An input item: one turn of a conversation, in the short or in the long form."""

    type: Literal["message"] | None = "message"
    """May be left out."""
    role: Literal["system", "developer", "user", "assistant"]
    """Who speaks; `developer` counts as `system`."""
    content: Annotated[Mixed | None, Field(validate_default=True)] = None
    """A text, or a list of parts, which are joined. Not null of others."""
    refusal: str | None = None
    """What an earlier answer said instead of `content`."""

    _has_content = field_validator("content")(fields.unless_assistant)

    @property
    def of_developer(self) -> bool:
        return self.role == "developer"

    @property
    def turn(self) -> ChatTurn:
        said, refused = fields.words_of(self.content), ""
        if self.role == "assistant" and (not said or _is_refusal(self.content)):
            refused = said or self.refusal or ""
        extras = refused_extras(refused) if refused else {}
        parts = fields.parts_of(self.content, InputMedia)
        return ChatTurn(ROLES[self.role], said or refused, extras=extras, parts=parts)


class FunctionCall(InputItem):
    """An input item: a call that an earlier answer made."""

    PASSED = True

    type: Literal["function_call"]
    """A call."""
    call_id: Annotated[str, Field(min_length=1, max_length=128)]
    """The `call_id` of its output."""
    name: fields.FunctionName
    """The function that was called."""
    arguments: str
    """JSON, as the model wrote it."""

    @property
    def turn(self) -> ChatTurn:
        return ChatTurn("assistant", "", (ToolCall(self.call_id, self.name, self.arguments, self.further),))


class FunctionCallOutput(InputItem):
    """An input item: what a function returned."""

    type: Literal["function_call_output"]
    """The output of a call."""
    call_id: Annotated[str, Field(min_length=1, max_length=128)]
    """The call."""
    output: Mixed
    """A text, or a list of parts. Their texts are joined; images and documents are for models that take them."""

    @property
    def turn(self) -> ChatTurn:
        parts = fields.parts_of(self.output, InputMedia)
        return ChatTurn("tool", fields.words_of(self.output), call_id=self.call_id, parts=parts)


class ReasoningItem(fields.StrictBody):
    """An input item: the reasoning of an earlier answer, which is left out."""

    type: Literal["reasoning"]
    """Without effect: models do not see earlier reasoning."""
    turn: ClassVar[None] = None


class HostedItem(fields.StrictBody):
    """An input item: the call of a tool that does not run here, or what it gave. It is left out."""

    type: str = Field(
        pattern=HOSTED, max_length=80, json_schema_extra={"not": {"enum": ["function_call", "function_call_output"]}}
    )
    """Without effect: named in X-Ignored-Fields."""
    turn: ClassVar[None] = None


class ItemReference(fields.ClosedBody):
    """An input item that stands for one of an earlier response."""

    type: Literal["item_reference"] | None = None
    """May be left out."""
    id: ItemId
    """The id of an input or output item of a stored response."""


_CUSTOM = {"custom_tool_call": "function_call", "custom_tool_call_output": "function_call_output"}
"""Items of custom tools, whose text a model here reads as the one argument of a function."""


def _of_custom_tool(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _CUSTOM:
        return value
    rest = {name: each for name, each in value.items() if name != "input"}
    if kind == "custom_tool_call":
        rest["arguments"] = fields.arguments_of(value.get("input"), "input")
    return {**rest, "type": _CUSTOM[kind]}


def _kind(value: Any) -> str:
    if not isinstance(value, dict):
        return "<message>"
    kind = value.get("type")
    if kind in ("function_call", "function_call_output", "reasoning"):
        return f"<{kind}>"
    if kind not in _KINDS and kind is not None:
        return "<hosted>"
    refers = kind == "item_reference" or (kind is None and "id" in value and "role" not in value)
    return "<reference>" if refers else "<message>"


Item: TypeAlias = Annotated[
    Annotated[Message, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[HostedItem, Tag("<hosted>")]
    | Annotated[ItemReference, Tag("<reference>")],
    Discriminator(_kind),
    BeforeValidator(_of_custom_tool),
]


def input_items(job_id: str, turns: Sequence[ChatTurn], developer: Container[int] = ()) -> list[dict[str, Any]]:
    """Render a stored response's own input, oldest first. `developer`: places of turns with the role `developer`."""
    return [
        shown_turn(f"{kind_of(turn)}_{job_id}_in{place}", turn, developer=place in developer)
        for place, turn in enumerate(turns)
    ]


def kind_of(turn: ChatTurn) -> str:
    """What the id of a turn's item begins with."""
    return CALL if turn.calls else OUTPUT if turn.call_id else MESSAGE


def shown_turn(item_id: str, turn: ChatTurn, *, developer: bool = False) -> dict[str, Any]:
    """Render a turn that a client sent as an item. `developer`: it was sent with that role."""
    if turn.calls:
        call = turn.calls[0]
        return {**call.extras, **call_item(item_id, call.id, call.name, call.arguments, "completed")}
    if turn.call_id:
        made = {"id": item_id, "type": "function_call_output", "status": "completed"}
        return made | {"call_id": turn.call_id, "output": turn.content}
    if turn.parts:
        return message_item(item_id, "completed", turn.role, shown_parts(turn))
    part = output_text(turn.content) if turn.role == "assistant" else {"type": "input_text", "text": turn.content}
    part = refusal_part(turn.content) if "refusal" in turn.extras else part
    role = "developer" if developer else turn.role
    return message_item(item_id, "completed", role, [part])


def shown_parts(turn: ChatTurn) -> list[dict[str, Any]]:
    """The parts of a turn with media as those of an item. It shows links, and no bytes."""
    found = list[dict[str, Any]]()
    for part in turn.parts:
        kind = part["type"]
        if kind == "text":
            found.append({"type": "input_text", "text": part["text"]})
        elif kind == "image_url":
            url = part[kind]["url"]
            link = None if url.startswith(REFERENCE) else url
            detail = part[kind].get("detail", "auto")
            found.append({"type": "input_image", "detail": detail, "image_url": link, "file_id": None})
        elif kind == "file":
            found.append({"type": "input_file", "file_id": None, "filename": part[kind].get("filename")})
        else:
            found.append({"type": "input_audio"})
    return found


def with_media_behind(turns: Iterable[ChatTurn]) -> Iterator[ChatTurn]:
    """Yield turns of which none of a tool has media: those of results stand in the user's turn behind the results,
    because servers take images only there."""
    media = tuple[dict[str, Any], ...]()
    for turn in turns:
        if turn.role == "tool":
            media += tuple([part for part in turn.parts if part["type"] != "text"])
            yield replace(turn, parts=()) if turn.parts else turn
        elif media and turn.role == "user":
            yield replace(turn, parts=media + (turn.parts or ({"type": "text", "text": turn.content},)))
            media = ()
        else:
            yield from [ChatTurn("user", "", parts=media), turn] if media else [turn]
            media = ()
    if media:
        yield ChatTurn("user", "", parts=media)


def reasoned_turn(text: str) -> ChatTurn:
    """Earlier reasoning as a turn: engines do not see it, and a model's server gets it as a field of the message."""
    return ChatTurn("assistant", "", extras={"reasoning_content": text} if text else {})


def sent_items(turn: ChatTurn) -> list[dict[str, Any]]:
    """Render a turn as the items that a request would send for it."""
    if turn.call_id:
        return [{"type": "function_call_output", "call_id": turn.call_id, "output": turn.content}]
    content = shown_parts(turn) if turn.parts else turn.content
    said = [{"role": turn.role, "content": content}] if content or not turn.calls else []
    return said + [
        {**call.extras, "type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
        for call in turn.calls
    ]


def call_item(item_id: str, call_id: str, name: str, arguments: Any, status: str) -> dict[str, Any]:
    """Render a call of a function. `arguments` may be encoded JSON."""
    named = {"id": item_id, "type": "function_call", "status": status, "call_id": call_id, "name": name}
    return named | {"arguments": arguments}


def output_text(text: Any, logprobs: Any = ()) -> dict[str, Any]:
    """Render a part of an answer. `text` and `logprobs` may be encoded JSON."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def refusal_part(text: str) -> dict[str, Any]:
    """Render a refusal as a part of an answer."""
    return {"type": "refusal", "refusal": text}


def message_item(item_id: str, status: str, role: str, content: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Render a message; `status` is in_progress, completed or incomplete."""
    return {"id": item_id, "type": "message", "status": status, "role": role, "content": content}


# --- conversations ---------------------------------------------------------------------------------------------------


MAX_ADDED = 20
"""Items of one request."""
ITEMS_PER_SLICE = 100
"""Items that one slice makes turns of, in about half a millisecond if they are short."""


OF_CALLS = frozenset({"id", "type", "status", "call_id", "name", "arguments"})
"""Fields of a call's item that are no extras."""

NewItems: TypeAlias = Annotated[list[Item], Field(max_length=MAX_ADDED, fail_fast=True)]


def _check_references(items: list[Any] | None) -> list[Any] | None:
    if any(isinstance(item, ItemReference) for item in items or ()):
        raise fields.refusal("cannot have an item_reference: send the item itself")
    return items


class ConversationRequest(fields.StrictBody):
    """The body of POST /v1/conversations."""

    items: NewItems | None = None
    """Its first items, oldest first; at most 20."""
    metadata: fields.Metadata | None = None
    """Your own labels; the conversation shows them."""

    _no_references = field_validator("items")(_check_references)


class ConversationUpdate(fields.StrictBody):
    """The body of POST /v1/conversations/{conversation_id}."""

    metadata: fields.Metadata | None
    """Replaces the labels. Null: none."""


class ItemsRequest(fields.StrictBody):
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


NO_MEDIA = "may be texts only: a conversation keeps no images. Send them in input, and use previous_response_id"


def new_items(sent: Iterable[Any], token: str) -> list[ConversationItem]:
    """Return the items of a request as a conversation keeps them, with ids of their own, which `token` makes unique.
    Raises ApiError (400)."""
    found = list[ConversationItem]()
    for item in sent:
        if (turn := item.turn) is not None:
            refuse_if(turn.parts, "items", NO_MEDIA)
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
                before, turn = (replace(each, extras=_unrefused(each)) for each in (before, turn))
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
