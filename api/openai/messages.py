"""Messages of a chat: validates one turn of a conversation, and turns it into the form that engines take."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, Tag, ValidationInfo, field_validator, model_validator

from api.openai.fields import MAX_MESSAGES, StrictBody, by_shape, refusal, shape
from api.openai.other_parts import TextPart, words_of
from api.openai.tool_fields import MAX_TOOLS, CalledFunction, MessageCall
from penstock.engine import ChatTurn
from penstock.tools import ToolCall

_ROLES = {"developer": "system", "function": "tool"}

Content: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")]
    | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")],
    by_shape(shape, "a string or a list of text parts"),
]


class ChatMessage(StrictBody):
    """One turn of a conversation."""

    PASSED = True

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        description="Who speaks; `developer` counts as `system`; `function` is the older name of `tool`."
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
    function_call: CalledFunction | None = Field(None, description="A call by its older name: use `tool_calls`.")

    @model_validator(mode="after")
    def _of_function(self) -> ChatMessage:
        name = (self.model_extra or {}).get("name")
        if self.role == "function" and not (isinstance(name, str) and name):
            raise refusal("needs the `name` of the function whose result it is")
        return self

    @property
    def used(self) -> tuple[str, ...]:
        return ("name",) if self.role == "function" else ()

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

    @property
    def turn(self) -> ChatTurn:
        """Return the message as engines take it: text only, and roles and calls by the names that chat templates know.
        The id of a call by its older name is its function's name, by which the message with its result names it."""
        text, role = words_of(self.content), _ROLES.get(self.role, self.role)
        extras = self.further if self.model_extra else {}
        if isinstance(self.content, list) and any(part.model_extra or part.refusal for part in self.content):
            extras["content"] = [part.model_dump(exclude_none=True) for part in self.content]
        if not text and role == "assistant" and isinstance(refused := extras.get("refusal"), str):
            text, extras["content"] = refused, None
        if self.role == "function":
            return ChatTurn(role, text, call_id=str(extras.pop("name", "")), extras=extras)
        if not self.tool_calls and not self.tool_call_id and not self.function_call:
            return ChatTurn(role, text, extras=extras)
        calls = tuple([each.call for each in self.tool_calls or ()])
        if role == "assistant" and not calls and (called := self.function_call) is not None:
            calls = (ToolCall(called.name, called.name, called.arguments),)
        return ChatTurn(role, text, calls, (self.tool_call_id or "") if role == "tool" else "", extras)
