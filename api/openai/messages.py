"""Messages of a chat: validates messages, tools and tool calls, and turns them into the form that engines take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from api.openai.errors import invalid_request, refuse_if
from api.openai.fields import MAX_MESSAGES, SchemaObject, StrictBody, by_shape, refusal, shape
from penstock.engine import ChatTurn
from penstock.tools import Tool, ToolCall, Tools


class TextPart(StrictBody):
    """One part of a message's content."""

    PASSED = True

    type: Literal["text", "input_text", "output_text", "refusal"]
    """Images, files, audio and videos are refused."""
    text: str | None = Field(None, validate_default=True)
    """Parts are joined without anything between them. Required, except in a part of type `refusal`."""
    refusal: str | None = None
    """The text of a part of type `refusal`."""

    @field_validator("text")
    @classmethod
    def _has_text(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None and info.data.get("type", "refusal") != "refusal":
            raise refusal("is required")
        return text

    @property
    def words(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""


def words_of(content: str | Sequence[TextPart] | None) -> str:
    """The text of a content."""
    return content if isinstance(content, str) else "".join([part.words for part in content or ()])


MAX_TOOLS = 128
MAX_NAME = 128
_NAME = r"^[a-zA-Z0-9_.-]+$"


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise refusal("must be a schema of type 'object'")
    return schema


Parameters: TypeAlias = Annotated[SchemaObject, AfterValidator(_of_object)]
FunctionName: TypeAlias = Annotated[str, Field(pattern=_NAME, min_length=1, max_length=MAX_NAME)]


class Function(StrictBody):
    """A function that the model may call."""

    PASSED = True

    name: FunctionName
    """Letters, digits, `_`, `-` and `.`; at most 128 characters."""
    description: Annotated[str, Field(max_length=16_384)] | None = None
    """What it does, for the model."""
    parameters: Parameters | None = None
    """JSON schema of its arguments, an object; at most 512 KiB."""
    strict: bool | None = None
    """Whether calls are checked against the schema."""

    def as_tool(self, extras: dict[str, Any]) -> Tool:
        return Tool(self.name, self.description or "", self.parameters, bool(self.strict), extras)


_HOSTED_KIND = r"^[a-z][a-z0-9_.-]{0,63}$"


class HostedTool(StrictBody):
    """A tool that OpenAI's servers run, such as `web_search`. It is dropped and named in X-Ignored-Fields."""

    type: str = Field(pattern=_HOSTED_KIND, max_length=64, json_schema_extra={"not": {"const": "function"}})
    """Any kind but `function`."""


def tool_shape(value: Any) -> str:
    """Tell a function from a tool of another kind."""
    return "<function>" if not isinstance(value, Mapping) or value.get("type", "function") == "function" else "<hosted>"


def extras_of(part: StrictBody, function: StrictBody) -> dict[str, Any]:
    """The unknown fields of a tool or a call, with those of its function."""
    inner = function.further
    return part.further | ({"function": inner} if inner else {})


class FunctionTool(StrictBody):
    """What the tools of chats and of responses have in common."""

    PASSED = True

    type: Literal["function"]
    """Only functions: the client runs them."""


class ChatTool(FunctionTool):
    """A tool of a chat."""

    function: Function
    """The function."""

    @property
    def tool(self) -> Tool:
        return self.function.as_tool(extras_of(self, self.function))


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<str>")]
    | Annotated[dict[str, Any], Field(max_length=8), Tag("<dict>")],
    by_shape(shape, "'none', 'auto' or 'required', or an object that names functions"),
]


def _chosen(choice: str | dict[str, Any] | None) -> tuple[str, list[str]]:
    """Return the mode of a choice and the functions that it names, as chats and as responses name them; the mode of a
    choice of one function is `function`. Raises ApiError (400)."""
    match choice:
        case None | str():
            return choice or "auto", []
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return "function", [name]
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)} | {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)},
        }:
            functions = [tool for tool in tools if isinstance(tool, dict) and tool.get("type") == "function"]
            if 0 < len(functions) <= MAX_TOOLS:
                return mode, [name for tool in functions for name in _chosen(tool)[1]]
    raise invalid_request("tool_choice must name functions: tools of other kinds do not run here.", "tool_choice")


def shown_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """A choice as a response shows it."""
    mode, names = _chosen(choice)
    if mode == "function":
        return {"type": "function", "name": names[0]}
    functions = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": functions} if names else mode


AnyChatTool: TypeAlias = Annotated[
    Annotated[ChatTool, Tag("<function>")] | Annotated[HostedTool, Tag("<hosted>")], Discriminator(tool_shape)
]


class CalledFunction(StrictBody):
    """The function of a call, and its arguments."""

    PASSED = True

    name: FunctionName
    """The function that was called."""
    arguments: str
    """JSON, as the model wrote it."""


def arguments_of(text: Any, field: str) -> str:
    """The arguments of a function whose one argument is the text that a custom tool got. Raises a refusal."""
    if not isinstance(text, str):
        raise refusal(f"needs `{field}`, the text that its tool got")
    return msgspec.json.encode({"input": text}).decode()


class MessageCall(StrictBody):
    """A call in an assistant's message."""

    PASSED = True

    id: Annotated[str, Field(min_length=1, max_length=128)]
    """The `tool_call_id` of its result."""
    type: Literal["function"] | None = "function"
    """May be left out."""
    function: CalledFunction
    """The function, and the arguments of the call."""

    @model_validator(mode="before")
    @classmethod
    def _of_custom_tool(cls, fields: Any) -> Any:
        """The history of another server may have calls of custom tools: a model here reads them as of a function."""
        if not isinstance(fields, dict) or fields.get("type") != "custom" or not isinstance(fields.get("custom"), dict):
            return fields
        custom = fields["custom"]
        function = {"name": custom.get("name"), "arguments": arguments_of(custom.get("input"), "custom.input")}
        return {key: each for key, each in fields.items() if key not in ("type", "custom")} | {"function": function}

    @property
    def call(self) -> ToolCall:
        extras = extras_of(self, self.function)
        extras.pop("index", None)  # of a chunk
        return ToolCall(self.id, self.function.name, self.function.arguments, extras)


class OfferedTools(StrictBody):
    """The fields of a request that offer tools, whose forms its endpoint decides."""

    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    """`auto` (the default with tools): the model chooses; `none`; `required`; or one function, or some."""
    parallel_tool_calls: bool | None = None
    """False: at most one call in an answer."""

    @property
    def functions(self) -> list[Any]:
        """The tools without those that do not run here."""
        return [tool for tool in self.tools or () if not isinstance(tool, HostedTool)]

    @property
    def tools_asked(self) -> Tools | None:
        """The functions that the answer may call; None if it may call none. Raises ApiError (400)."""
        offered, parallel = tuple([tool.tool for tool in self.functions]), self.parallel_tool_calls is not False
        known = {tool.name for tool in offered}
        refuse_if(len(known) < len(offered), "tools", "must have different names")
        mode, names = _chosen(self.tool_choice)
        if mode == "none" or (self.tool_choice in (None, "auto") and not offered):
            return None
        what = "needs tools: give the functions to choose from. Tools of other kinds do not run here"
        refuse_if(not offered, "tool_choice", what)
        refuse_if(not known.issuperset(names), "tool_choice", "names a function that is not in tools")
        if mode == "function":  # the others are still shown to the model
            return Tools(offered=offered, choice="required", named=names[0], parallel=parallel)
        some = tuple([tool for tool in offered if not names or tool.name in names])
        return Tools(offered=some, choice="required" if mode == "required" else "auto", parallel=parallel)


class ToolFields(OfferedTools):
    """The fields of a chat that offer tools."""

    tools: Annotated[list[AnyChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions that the model may call. Refused if it knows none. Other tools are ignored."""


_ROLES = {"developer": "system", "function": "tool"}

Content: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")]
    | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")],
    by_shape(shape, "a string or a list of text parts"),
]


def unless_assistant(content: Any, info: ValidationInfo) -> Any:
    """Check that a message has content; that of an assistant may have none."""
    if content is None and info.data.get("role", "assistant") != "assistant":
        raise refusal("is required")
    return content


class ChatMessage(StrictBody):
    """One turn of a conversation."""

    PASSED = True

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """Who speaks; `developer` counts as `system`; `function` is the older name of `tool`."""
    content: Annotated[Content | None, Field(validate_default=True)] = None
    """Only `assistant` may leave it out."""
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """The calls of a message of `assistant`. Refused if the model knows no tools."""
    tool_call_id: Annotated[str, Field(max_length=128)] | None = None
    """The call whose result a message of `tool` holds."""
    function_call: CalledFunction | None = None
    """A call by its older name: use `tool_calls`."""

    @model_validator(mode="after")
    def _of_function(self) -> ChatMessage:
        name = (self.model_extra or {}).get("name")
        if self.role == "function" and not (isinstance(name, str) and name):
            raise refusal("needs the `name` of the function whose result it is")
        return self

    @property
    def used(self) -> tuple[str, ...]:
        return ("refusal", "name") if self.role == "function" else ("refusal",)

    _has_content = field_validator("content")(unless_assistant)

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
