"""Content blocks of the Messages API: validates the messages of a request, and converts them to turns and back.

A message becomes one turn or more, the same as the messages of a chat that say it: each result of a tool is a turn of
its own, and earlier thinking is a further field, which only a model's server gets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from pydantic import Field, Tag, model_validator

from api.openai.fields import (
    MAX_MESSAGES,
    DataOrLink,
    FileId,
    FileName,
    FunctionName,
    StrictBody,
    as_part,
    by_shape,
    refusal,
    shape,
    words_of,
)
from api.openai.responses.items import reasoned_turn, with_media_behind
from penstock.engine import ChatTurn
from penstock.tools import ToolCall
from streaming.jobs.job import source_of

USER, ASSISTANT = "user", "assistant"
ID = Field(min_length=1, max_length=128)
CacheControl: TypeAlias = Annotated[dict[str, Any], Field(max_length=16)]


class Block(StrictBody):
    """One block of a message's content."""

    ROLES: ClassVar[tuple[str, ...]] = (USER, ASSISTANT, "system")
    """The roles of messages that may have it."""

    cache_control: CacheControl | None = None
    """Without effect: engines keep the beginnings of prompts by themselves."""

    @property
    def words(self) -> str:
        """What of it is text of its message."""
        return ""

    @property
    def part(self) -> dict[str, Any]:
        """As a part of OpenAI's chats."""
        return {"type": "text", "text": self.words}


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    """Text."""
    text: str
    """Blocks are joined without anything between them."""

    @property
    def words(self) -> str:
        return self.text


class Source(StrictBody):
    """Where a block has its bytes, or its text."""

    type: Literal["base64", "url", "file", "text"]
    """What the other fields are."""
    media_type: Annotated[str, Field(max_length=64)] | None = None
    """Of `data`, such as image/png."""
    data: str | None = None
    """Base64, or a text."""
    url: DataOrLink | None = None
    """A link, if `[media] links` takes any."""
    file_id: FileId | None = None
    """A file of yours."""

    @model_validator(mode="after")
    def _given(self) -> Source:
        if getattr(self, {"base64": "data", "text": "data", "file": "file_id"}.get(self.type, "url")) is None:
            raise refusal("needs what its type says")
        return self


class MediaBlock(Block):
    """An image or a document. Refused if the model takes none."""

    ROLES = (USER,)

    type: Literal["image", "document"]
    """What it is."""
    source: Source
    """Where it has its bytes."""
    title: FileName | None = None
    """Of a document."""

    @property
    def words(self) -> str:
        return self.source.data or "" if self.source.type == "text" else ""

    @property
    def part(self) -> dict[str, Any]:
        """As a part of OpenAI's chats."""
        source = self.source
        if source.type == "text":
            return super().part
        is_image, given = self.type == "image", source.url
        if source.type == "base64":
            kind = source.media_type or ("image/png" if is_image else "application/pdf")
            given = f"data:{kind};base64,{source.data}"
        if is_image:
            return as_part("image_url", {"url": given, "file_id": source.file_id})
        return as_part("file", {"file_data": given, "file_id": source.file_id, "filename": self.title})


class Thinking(Block):
    """The thinking of an earlier answer, which engines do not see."""

    ROLES = (ASSISTANT,)

    type: Literal["thinking"]
    """Earlier thinking."""
    thinking: str
    """Only a model's server gets it."""
    signature: str | None = None
    """Without effect."""


class ToolUse(Block):
    """A call that an earlier answer made."""

    ROLES = (ASSISTANT,)

    type: Literal["tool_use"]
    """A call."""
    id: Annotated[str, ID]
    """The `tool_use_id` of its result."""
    name: FunctionName
    """The tool that was called."""
    input: dict[str, Any]
    """The arguments."""

    @property
    def call(self) -> ToolCall:
        return ToolCall(self.id, self.name, msgspec.json.encode(self.input).decode())


_UNSEEN = r"^(redacted_thinking|(server|mcp)_tool_use|[a-z_]{1,64}_tool_result)$"


class Unseen(Block):
    """A block that models here do not see: redacted thinking, or of a tool that a server runs. It is left out."""

    type: str = Field(pattern=_UNSEEN, max_length=80)
    """Without effect: named in X-Ignored-Fields."""

    @property
    def ignored(self) -> list[str]:
        return [self.type]


_KINDS = ("text", "thinking", "tool_use", "tool_result", "image", "document")


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return None
    if kind in ("image", "document"):
        return "<media>"
    return f"<{kind}>" if kind in _KINDS else "<unseen>" if re.fullmatch(_UNSEEN, kind) else None


TextBlocks: TypeAlias = Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]
Words: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[TextBlocks, Tag("<list>")],
    by_shape(shape, "a string or a list of blocks"),
]
"""A text, or blocks of text."""


ResultBlocks: TypeAlias = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("<text>")] | Annotated[MediaBlock, Tag("<media>")],
            by_shape(_kind, "a block of type text, image or document"),
        ]
    ],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
]
Result: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[ResultBlocks, Tag("<list>")],
    by_shape(shape, "a string or a list of blocks"),
]


def _parts(content: str | Sequence[Block] | None) -> tuple[dict[str, Any], ...]:
    """The parts of a turn, if one has media; else ()."""
    found = tuple([block.part for block in content or () if isinstance(block, Block)])
    return found if any(part["type"] != "text" for part in found) else ()


class ToolResult(Block):
    """What a tool returned."""

    ROLES = (USER,)

    type: Literal["tool_result"]
    """The result of a call."""
    tool_use_id: Annotated[str, ID]
    """The call."""
    content: Result | None = None
    """A text, or blocks."""
    is_error: bool | None = None
    """Of a result without content, the model is told that the tool failed."""

    @property
    def turn(self) -> ChatTurn:
        said = words_of(self.content)
        parts = _parts(self.content)
        said = "Error" if self.is_error and not said and not parts else said
        return ChatTurn("tool", said, call_id=self.tool_use_id, parts=parts)


AnyBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[Thinking, Tag("<thinking>")]
    | Annotated[ToolUse, Tag("<tool_use>")]
    | Annotated[ToolResult, Tag("<tool_result>")]
    | Annotated[MediaBlock, Tag("<media>")]
    | Annotated[Unseen, Tag("<unseen>")],
    by_shape(_kind, f"a block of type {', '.join(_KINDS)}: this model takes no others"),
]
Blocks: TypeAlias = Annotated[list[AnyBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]
Content: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[Blocks, Tag("<list>")], by_shape(shape, "a string or a list of blocks")
]


class SentMessage(StrictBody):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    """Who speaks."""
    content: Content
    """A text, or a list of blocks."""

    @model_validator(mode="after")
    def _in_place(self) -> SentMessage:
        for block in self.content if isinstance(self.content, list) else ():
            if self.role not in block.ROLES:
                raise refusal(f"has a block {block.type!r}, which has no place in a message of {self.role!r}")
        return self

    @property
    def turns(self) -> list[ChatTurn]:
        """The message as engines take it."""
        if isinstance(self.content, str):
            return [ChatTurn(self.role, self.content)]
        if self.role == ASSISTANT:
            thought = reasoned_turn("".join([each.thinking for each in self.content if isinstance(each, Thinking)]))
            calls = tuple([block.call for block in self.content if isinstance(block, ToolUse)])
            return [ChatTurn(ASSISTANT, words_of(self.content), calls, extras=thought.extras)]
        turns = list[ChatTurn]()
        for is_result, blocks in groupby(self.content, lambda block: isinstance(block, ToolResult)):
            if is_result:
                turns += [block.turn for block in blocks if isinstance(block, ToolResult)]
            else:
                said = list(blocks)
                turns.append(ChatTurn(self.role, words_of(said), parts=_parts(said)))
        return turns or [ChatTurn(self.role, "")]


Messages: TypeAlias = Annotated[list[SentMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def turns_of(system: str | Sequence[Block] | None, messages: Iterable[SentMessage]) -> tuple[ChatTurn, ...]:
    """Return a conversation as engines take it."""
    first = [] if system is None else [ChatTurn("system", words_of(system))]
    return (*first, *with_media_behind(turn for message in messages for turn in message.turns))


# --- turns as messages -----------------------------------------------------------------------------------------------


def sent_messages(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    """Render turns as the `system` and `messages` that a request would send for them."""
    first = [turn.content for turn in turns[:1] if turn.role == "system"]
    return {"system": first[0] if first else None, "messages": list(_messages(turns[len(first) :]))}


def _messages(turns: Iterable[ChatTurn]) -> Iterator[dict[str, Any]]:
    for is_result, group in groupby(turns, lambda turn: turn.role == "tool"):
        if is_result:
            results = [{"type": "tool_result", "tool_use_id": each.call_id, "content": each.content} for each in group]
            yield {"role": USER, "content": results}
        else:
            yield from ({"role": turn.role, "content": _content(turn)} for turn in group)


def _content(turn: ChatTurn) -> str | list[dict[str, Any]]:
    thought = turn.extras.get("reasoning_content")
    if turn.parts:
        return [_shown(part) for part in turn.parts]
    if not turn.calls and not isinstance(thought, str):
        return turn.content
    blocks = [{"type": "thinking", "thinking": thought, "signature": ""}] if isinstance(thought, str) else []
    blocks += [{"type": "text", "text": turn.content}] if turn.content else []
    return blocks + [tool_use(call.id, call.name, call.arguments) for call in turn.calls]


def _shown(part: dict[str, Any]) -> dict[str, Any]:
    """A part as a block, with a link, or a reference in place of the bytes."""
    kind = part["type"]
    if kind == "text":
        return {"type": "text", "text": part["text"]}
    source = {"type": "url", "url": source_of(part)}
    return {"type": "image" if kind == "image_url" else "document", "source": source}


INVALID = "INVALID_JSON"
"""The one field of an input whose text is no object that can be read; Anthropic's documentation names it."""


def tool_use(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Render a call, whose arguments keep the numbers that the model wrote. A text that is no object, because a limit
    cut it, or that parsers refuse (halves of characters, endless nesting), is told as it is."""
    try:
        given = msgspec.json.format(arguments or "{}", indent=-1)
    except (msgspec.MsgspecError, RecursionError):
        given = ""
    told = msgspec.Raw(given) if given[:1] == "{" else {INVALID: arguments}
    return {"type": "tool_use", "id": call_id, "name": name, "input": told}
