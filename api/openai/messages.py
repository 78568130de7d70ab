"""Messages of a chat: validates one turn of a conversation, and turns it into the form that engines take."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, Tag, ValidationInfo, field_validator

from api.openai.fields import MAX_MESSAGES, StrictBody, by_shape, refusal, shape
from api.openai.other_parts import refuse_others
from api.openai.tool_fields import MAX_TOOLS, MessageCall
from penstock.engine import ChatTurn


class TextPart(StrictBody):
    """One part of a message's content."""

    PASSED = True

    type: Literal["text"] = Field(description="Images, files, audio and videos are refused.")
    text: str = Field(description="Parts are joined without anything between them.")

    @field_validator("type", mode="before")
    @classmethod
    def _only_text(cls, kind: Any) -> Any:
        return refuse_others(kind, "text")


Content: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")]
    | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")],
    by_shape(shape, "a string or a list of text parts"),
]


class ChatMessage(StrictBody):
    """One turn of a conversation."""

    PASSED = True

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Who speaks; `developer` counts as `system`."
    )
    content: Annotated[
        Content | None, Field(validate_default=True, description="Only `assistant` may leave it out.")
    ] = None
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="The calls of a message of `assistant`. Refused if the model knows no tools."
    )
    tool_call_id: Annotated[str, Field(max_length=128)] | None = Field(
        None, description="The call whose result a message of `tool` holds."
    )
    function_call: None = Field(None, description="Refused: use `tool_calls`, its newer name.")

    @field_validator("content")
    @classmethod
    def _has_content(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role", "assistant") != "assistant":
            raise refusal("is required")
        return content

    @field_validator("tool_calls")
    @classmethod
    def _of_assistant(cls, calls: list[MessageCall] | None, info: ValidationInfo) -> list[MessageCall] | None:
        if calls and info.data.get("role", "assistant") != "assistant":
            raise refusal("has a place only in a message of 'assistant'")
        return calls

    @field_validator("function_call", mode="before")
    @classmethod
    def _no_function_call(cls, value: Any) -> Any:
        if value is not None:
            raise refusal("is not supported here: use tool_calls, its newer name")
        return value

    @property
    def turn(self) -> ChatTurn:
        """Return the message as engines take it: text only, and `developer` as `system`, which chat templates know."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        extras = self.further if self.model_extra else {}
        if not isinstance(content, str) and any(part.model_extra for part in content):
            extras["content"] = [part.model_dump(exclude_none=True) for part in content]
        if not self.tool_calls and not self.tool_call_id:
            return ChatTurn(role, text, extras=extras)
        calls = tuple([each.call for each in self.tool_calls or ()])
        return ChatTurn(role, text, calls, (self.tool_call_id or "") if role == "tool" else "", extras)
