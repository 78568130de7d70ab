"""Input items of the Responses API: validates those of a request, and renders those of a stored one.

A message becomes one turn of the conversation. Calls of functions and their outputs are refused until an engine can
render them: `_OTHER_ITEMS` names the remedy of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator

from api.openai.fields import MAX_MESSAGES, ClosedBody, StrictBody, refusal
from api.openai.responses.ids import input_item_id
from penstock.engine import ChatTurn

_NO_TOOLS = "which is not supported here: tools are not; send the text of the call and of its result as messages"
_OTHER_ITEMS: Mapping[str, str] = {
    "function_call": _NO_TOOLS,
    "function_call_output": _NO_TOOLS,
    "reasoning": "which is not supported here: leave the reasoning of earlier answers out",
}
"""Kinds of items that are refused, with the remedy."""

_OTHER_PARTS: Mapping[str, str] = {
    "input_image": "but images are not supported here: describe the image in a part of type 'input_text'",
    "input_file": "but files are not supported here: send the file's text in a part of type 'input_text'",
    "input_audio": "but audio is not supported here: send its transcript in a part of type 'input_text'",
}
"""Kinds of parts that are refused, with the remedy."""


ItemId: TypeAlias = Annotated[str, Field(max_length=128)]


class Part(StrictBody):
    """One part of a message's content."""

    type: Literal["input_text", "output_text", "text", "refusal"] = Field(
        description="Images, files and audio are refused."
    )
    text: Annotated[
        str | None, Field(validate_default=True, description="Required, except in a part of type `refusal`.")
    ] = None
    refusal: str | None = Field(None, description="The text of a part of type `refusal`.")

    @field_validator("type", mode="before")
    @classmethod
    def _only_text(cls, kind: Any) -> Any:
        if isinstance(kind, str) and kind in _OTHER_PARTS:
            raise refusal(f"is {kind!r}, {_OTHER_PARTS[kind]}")
        return kind

    @field_validator("text")
    @classmethod
    def _has_text(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None and info.data.get("type") != "refusal":
            raise refusal("is required")
        return text

    @property
    def words(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""


def _shape(value: Any) -> str:
    return "<str>" if isinstance(value, str) else "<list>"


PartList: TypeAlias = Annotated[list[Part], Field(max_length=MAX_MESSAGES, fail_fast=True)]
Content: TypeAlias = Annotated[Annotated[str, Tag("<str>")] | Annotated[PartList, Tag("<list>")], Discriminator(_shape)]


class Message(StrictBody):
    """An input item: one turn of a conversation, in the short or in the long form."""

    type: Literal["message"] | None = Field("message", description="May be left out.")
    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="Who speaks; `developer` counts as `system`."
    )
    content: Content = Field(description="A text, or a list of parts, which are joined.")
    id: ItemId | None = Field(None, description="Without effect: input items get ids of their own.")
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(None, description="Without effect.")

    @property
    def turn(self) -> ChatTurn:
        """Return the message as engines take it: text only, and `developer` as `system`, which chat templates know."""
        text = self.content if isinstance(self.content, str) else "".join(part.words for part in self.content)
        return ChatTurn("system" if self.role == "developer" else self.role, text)


class ItemReference(ClosedBody):
    """An input item that stands for one of an earlier response."""

    type: Literal["item_reference"] | None = Field(None, description="May be left out.")
    id: ItemId = Field(description="The id of an input or output item of a stored response.")


def _check_kind(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in (None, "message", "item_reference"):
        return value
    if isinstance(kind, str) and kind in _OTHER_ITEMS:
        raise refusal(f"is a {kind!r}, {_OTHER_ITEMS[kind]}")
    raise refusal("must have the type 'message' or 'item_reference'")


def _kind(value: Any) -> str:
    if not isinstance(value, dict):
        return "<message>"
    kind = value.get("type")
    refers = kind == "item_reference" or (kind is None and "id" in value and "role" not in value)
    return "<reference>" if refers else "<message>"


Item: TypeAlias = Annotated[
    Annotated[Message, Tag("<message>")] | Annotated[ItemReference, Tag("<reference>")],
    Discriminator(_kind),
    BeforeValidator(_check_kind),
]


def input_items(job_id: str, turns: Sequence[ChatTurn]) -> list[dict[str, Any]]:
    """Render a stored response's own input, oldest first."""
    return [_input_item(input_item_id(job_id, place), turn) for place, turn in enumerate(turns)]


def _input_item(item_id: str, turn: ChatTurn) -> dict[str, Any]:
    text = turn.content
    part = output_text(text) if turn.role == "assistant" else {"type": "input_text", "text": text}
    return {"id": item_id, "type": "message", "status": "completed", "role": turn.role, "content": [part]}


def output_text(text: Any, logprobs: Any = ()) -> dict[str, Any]:
    """Render a part of an answer. `text` and `logprobs` may be encoded JSON."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def output_item(item_id: str, status: str, content: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Render an item of an answer; `status` is in_progress, completed or incomplete."""
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": list(content)}
