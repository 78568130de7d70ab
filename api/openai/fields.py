"""Fields of request bodies: contents, prompts, output formats, messages, tools, Penstock's queue options, what all
generation requests share, and what becomes of unknown fields.

Types are strict and sizes bounded. An error text of a field begins with a verb, because the field's path is put before
it.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from api.openai.errors import invalid_request, refuse_if
from penstock.engine import Capabilities, ChatTurn, ModelCard, Sampling, Task
from penstock.tools import Tool, ToolCall, Tools
from streaming.jobs.job import Chat, has_media, without_extras
from streaming.jobs.job import Prompt as JobPrompt
from streaming.order import Priority

MAX_MESSAGES = 1024
MAX_INPUTS = 2048
"""Prompts of a completion, or inputs of a task; `[api] max_choices_per_request` bounds those of completions further."""
MAX_SCHEMA_BYTES = 512 * 1024
"""OpenAI takes 5,000 properties and 120,000 characters of names and values, which is about 400 KiB of JSON."""
WEEK_MS = 7 * 24 * 3600 * 1000
MAX_DELAY_MS = 30 * 24 * 3600 * 1000
CLOCK_TOLERANCE_MS = 60_000

OTHERS_PRIORITY = 0
"""The value that other servers' own `priority` has by default: a client that sends it asks for nothing."""

TokenLimit: TypeAlias = Annotated[int, Field(ge=1, le=1_048_576)]
Milliseconds: TypeAlias = Annotated[int, Field(ge=1, le=WEEK_MS)]
_MAX_METADATA = 16


def refusal(what: str) -> PydanticCustomError:
    """Return an error about the field being validated; `what` begins with a verb."""
    return PydanticCustomError("refused", "{what}", {"what": what})


def time_ms(text: str) -> int:
    """Unix milliseconds of a time as RFC 3339 writes it. Raises PydanticCustomError."""
    try:
        at = datetime.fromisoformat(text)
        if at.tzinfo is not None and "T" in text:
            return max(0, int(1000 * at.timestamp()))
    except (ValueError, OverflowError):
        pass
    raise refusal("is no time with an offset from UTC, such as 2026-12-01T08:00:00Z")


def _check_count(value: Any) -> Any:
    """Check the number of entries first, because each wrong entry would be an error of its own."""
    if isinstance(value, dict) and len(value) > _MAX_METADATA:
        raise refusal(f"may have at most {_MAX_METADATA} entries")
    return value


Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=_MAX_METADATA),
    BeforeValidator(_check_count),
]

MAX_BIASES = 1024
MAX_BIAS = 100.0
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def _check_biases(value: Any) -> Any:
    """Check keys and count, before each wrong entry would be an error of its own."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise refusal(f"may have at most {MAX_BIASES:,} entries")
    if not all(isinstance(key, str) and _TOKEN_ID.fullmatch(key) and int(key) < 2**31 for key in value):
        raise refusal('must have token ids as its names, such as {"50256": -100}')
    return value


LogitBias: TypeAlias = Annotated[
    dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
    Field(max_length=MAX_BIASES, fail_fast=True),
    BeforeValidator(_check_biases),
]

_DISCONNECT = r"^(cancel|continue|grace:([0-9]{1,3}|[12][0-9]{3}|3[0-5][0-9]{2}|3600))$"


PASSABLE = re.compile(r"[a-z][a-z0-9_]{0,63}")
"""Names of fields that may be passed on to a model's server. Some servers read names whatever their case, so `Stream`
would be `stream` there."""


Refused: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]
"""Known fields that are not supported: their neutral values, which are accepted (like null), and what to do instead."""


class StrictBody(BaseModel):
    """Base of request bodies: strict types; unknown fields are collected (for X-Ignored-Fields), not refused."""

    REFUSED: ClassVar[Refused] = {}
    PASSED: ClassVar[bool] = False
    """Whether its unknown fields go on to a model's server, if there is one."""

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    @property
    def further(self) -> dict[str, Any]:
        """Its unknown fields that say anything."""
        found = (self.model_extra or {}).items()
        return {name: value for name, value in found if value not in (None, "", [], {}) and passable(name)}

    @property
    def used(self) -> tuple[str, ...]:
        """Names of unknown fields of it that have an effect."""
        return ()

    @property
    def ignored(self) -> list[str]:
        """Known fields of it that have a valid value without effect."""
        return []


class ClosedBody(StrictBody):
    """Base of objects in which an unknown field is an error; only the first is reported: there may be 10,000."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, fields: Any) -> Any:
        known = cls.__pydantic_fields__  # read for every body: `model_fields` is a call
        if not isinstance(fields, dict) or fields.keys() <= known.keys():
            return fields
        first = next(name for name in fields if name not in known)
        return {name: fields[name] for name in (*known, first) if name in fields}


# --- fields with alternative types ---------------------------------------------------------------------------------

# The value's type selects the member of a union, so that errors name the form that the sender chose. Tags in angle
# brackets are internal to the validator and never shown.


def shape(value: Any) -> str:
    return f"<{type(value).__name__}>"


def _prompt_shape(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else None
    return shape(value) if first is None else f"<list of {type(first).__name__}>"


def by_shape(shape: Callable[[Any], str], expected: str) -> Discriminator:
    return Discriminator(shape, custom_error_type="shape", custom_error_message=f"must be {expected}")


StopText: TypeAlias = Annotated[str, Field(max_length=256)]
Stop: TypeAlias = Annotated[
    Annotated[StopText, Tag("<str>")] | Annotated[list[StopText], Field(max_length=4, fail_fast=True), Tag("<list>")],
    by_shape(shape, "a string or a list of strings"),
]

PromptText: TypeAlias = Annotated[str, Field(min_length=1)]
PromptIds: TypeAlias = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
BY_TEXTS_OR_IDS = by_shape(
    _prompt_shape, "a string, or a list of strings, of token ids or of lists of token ids; not empty"
)
_SEVERAL = Field(max_length=MAX_INPUTS, fail_fast=True)
Prompt: TypeAlias = Annotated[
    Annotated[PromptText, Tag("<str>")]
    | Annotated[list[PromptText], _SEVERAL, Tag("<list of str>")]
    | Annotated[PromptIds, Tag("<list of int>")]
    | Annotated[list[PromptIds], _SEVERAL, Tag("<list of list>")],
    BY_TEXTS_OR_IDS,
]


def inputs_of(value: str | list[Any]) -> list[Any]:
    """Return the texts or the tuples of token ids that a prompt holds."""
    if isinstance(value, str):
        return [value]
    if isinstance(value[0], int):
        return [tuple(value)]
    return [each if isinstance(each, str) else tuple(each) for each in value]


# --- output ----------------------------------------------------------------------------------------------------------


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    if len(msgspec.msgpack.encode(schema)) > MAX_SCHEMA_BYTES:
        raise refusal(f"must be at most {MAX_SCHEMA_BYTES} bytes")
    return schema


SchemaObject: TypeAlias = Annotated[dict[str, Any], AfterValidator(_bounded)]


class JsonSchema(StrictBody):
    """A named JSON schema."""

    PASSED = True

    name: str | None = None
    """For models of upstream servers."""
    schema_: SchemaObject = Field(alias="schema")
    """At most 512 KiB. The answer is checked against it."""
    description: str | None = None
    """For models of upstream servers."""
    strict: bool | None = None
    """For models of upstream servers: every schema is strict here."""


def with_its_type(schema: Any, info: ValidationInfo) -> Any:
    """Check that a format has a schema if and only if its type says so."""
    kind = info.data.get("type")
    if schema is None and kind == "json_schema":
        raise refusal("is required when type is 'json_schema'")
    if schema is not None and kind in ("text", "json_object"):
        raise refusal(f"has no effect when type is {kind!r}; set type to 'json_schema'")
    return schema


class ResponseFormat(ClosedBody):
    """Output format: free text, any JSON object, or JSON of one schema.

    An unknown field in it is an error: it would be a constraint without effect.
    """

    type: Literal["text", "json_object", "json_schema"]
    """Anything but `text` needs an engine for it."""
    json_schema: Annotated[JsonSchema | None, Field(validate_default=True)] = None
    """Required with type `json_schema`, else refused."""

    _given = field_validator("json_schema")(with_its_type)

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """Return the schema that constrains the output: None for plain text, `{}` for any JSON object."""
        if self.type == "text":
            return None
        return self.json_schema.schema_ if self.type == "json_schema" and self.json_schema else {}


def named_format(schema: Any) -> dict[str, Any]:
    """What a format says of its schema, as a field of a request. `schema`: what names it; None: the format has none."""
    if schema is None:
        return {}
    own = {name: getattr(schema, name) for name in ("name", "description", "strict")}
    said = {name: value for name, value in own.items() if value is not None} | schema.further
    return {"response_format": said} if said else {}


class StreamOptions(StrictBody):
    """Options of a token stream."""

    include_usage: bool | None = False
    """One more chunk at the end, with the token counts."""


# --- the queue -------------------------------------------------------------------------------------------------------


class QueueOptions(ClosedBody):
    """Penstock's own options. An unknown field in it is an error: no other API has this object."""

    priority: Literal["interactive", "standard", "batch"] | None = None
    """The lane; never above the highest one the API key may use."""
    deadline_ms: Milliseconds | None = None
    """From acceptance to the last token."""
    max_queue_ms: Milliseconds | None = None
    """From acceptance to the start of the work."""
    not_before: Annotated[str, Field(max_length=64)] | None = None
    """The earliest start, at most 30 days ahead, e.g. 2026-12-01T08:00:00Z; the limits above count from then. Where
    no client waits for the answer."""
    delay_ms: Annotated[int, Field(ge=1, le=MAX_DELAY_MS)] | None = None
    """The same, from acceptance on."""
    do_not_queue: bool | None = False
    """Answer 503 at once unless a worker is free."""
    on_disconnect: Annotated[str, Field(pattern=_DISCONNECT)] | None = None
    """When the reader goes away: 'cancel', 'continue', or 'grace:<seconds>' (0 to 3600), then cancel."""
    webhook: Annotated[str, Field(min_length=1, max_length=2048)] | None = None
    """Who is told how the job ends: the name of a [webhooks] entry of your tenant, or a URL that its `urls` allow."""

    @field_validator("not_before")
    @classmethod
    def _may_be_then(cls, value: str | None) -> str | None:
        ahead_ms = time_ms(value) - 1000 * time.time() if value is not None else 0
        if ahead_ms > MAX_DELAY_MS:
            raise refusal("is more than 30 days ahead")
        return value

    @model_validator(mode="after")
    def _one_time(self) -> Self:
        if self.scheduled:
            one = self.not_before is None or self.delay_ms is None
            refuse_if(not one, "queue.delay_ms", "cannot be combined with not_before. Leave one of them out")
            refuse_if(self.do_not_queue, "queue.do_not_queue", "cannot be combined with a later start. Leave it out")
        return self

    @property
    def scheduled(self) -> bool:
        """Whether the job is for later."""
        return self.not_before is not None or self.delay_ms is not None

    @property
    def not_before_ms(self) -> int | None:
        """None also for a time that is over, whatever Redis' clock differs."""
        then_ms = 0 if self.not_before is None else time_ms(self.not_before)
        return then_ms if then_ms > 1000 * time.time() - CLOCK_TOLERANCE_MS else None


# --- messages and tools ----------------------------------------------------------------------------------------------


class TextPart(StrictBody):
    """One part of a message's content."""

    PASSED = True

    type: Literal["text", "input_text", "output_text", "refusal"]
    """A text. Videos are refused."""
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

    @property
    def shown(self) -> dict[str, Any]:
        """As a part of OpenAI's chats."""
        return {**self.further, "type": "text", "text": self.words}


MAX_LINK = 8192


def _of_data(value: str) -> str:
    if not value.startswith("data:"):
        raise refusal("must be a data: URL with base64, such as data:application/pdf;base64,JVBERi0=")
    return value


def _data_or_link(value: str) -> str:
    if not value.startswith(("data:", "https://", "http://")):
        raise refusal("must be a data: URL with base64, or the https:// address of an image")
    if not value.startswith("data:") and len(value) > MAX_LINK:
        raise refusal(f"may have at most {MAX_LINK} characters")
    return value


DataUrl: TypeAlias = Annotated[str, AfterValidator(_of_data)]
DataOrLink: TypeAlias = Annotated[str, AfterValidator(_data_or_link)]
FileId: TypeAlias = Annotated[str, Field(min_length=1, max_length=128)]
FileName: TypeAlias = Annotated[str, Field(max_length=255)]
Detail: TypeAlias = Literal["auto", "low", "high", "original"]


class ImageUrl(StrictBody):
    """An image."""

    url: DataOrLink
    """A data: URL with base64 of PNG, JPEG, GIF or WebP; or a link, if `[media] links` takes any."""
    detail: Detail | None = None
    """For models of upstream servers."""


class InputAudio(StrictBody):
    """A recording."""

    data: Annotated[str, Field(min_length=1)]
    """Base64."""
    format: Literal["wav", "mp3"]
    """What it is."""


class FileInput(StrictBody):
    """A document: `file_data` or `file_id`."""

    file_data: DataUrl | None = None
    """A data: URL with base64 of PDF or plain text."""
    file_id: FileId | None = None
    """A file of yours."""
    filename: FileName | None = None
    """For models of upstream servers."""

    @model_validator(mode="after")
    def _one_source(self) -> FileInput:
        if (self.file_data is None) == (self.file_id is None):
            raise refusal("needs either file_data or file_id")
        return self


class MediaPart(StrictBody):
    """One part of a message's content that is no text. Refused if the model takes none."""

    PASSED = True

    type: Literal["image_url", "input_audio", "file"]
    """What it is; the field of that name has it."""
    image_url: Annotated[ImageUrl | None, Field(validate_default=True)] = None
    """An image."""
    input_audio: Annotated[InputAudio | None, Field(validate_default=True)] = None
    """A recording."""
    file: Annotated[FileInput | None, Field(validate_default=True)] = None
    """A document."""

    @field_validator("image_url", "input_audio", "file")
    @classmethod
    def _of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        if (value is None) == (info.data.get("type") == info.field_name):
            raise refusal("is required" if value is None else "is not what the type says")
        return value

    words: ClassVar[str] = ""
    refusal: ClassVar[None] = None

    @property
    def shown(self) -> dict[str, Any]:
        """As a part of OpenAI's chats."""
        return self.further | as_part(self.type, vars(getattr(self, self.type)))


def as_part(kind: str, inner: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a turn with media, as ChatTurn.parts has it."""
    return {"type": kind, kind: {name: each for name, each in inner.items() if each is not None}}


def words_of(content: str | Sequence[Any] | None) -> str:
    """The text of a content, which may have parts."""
    return "".join([each if isinstance(each, str) else each.words for each in content or ()])


def parts_of(content: Any, kind: type[StrictBody] = MediaPart) -> tuple[dict[str, Any], ...]:
    """The parts of a content, if one of them is of this kind; else ()."""
    if not isinstance(content, list) or not any(isinstance(part, kind) for part in content):
        return ()
    return tuple([part.shown for part in content])


def part_shape(value: Any) -> str:
    """Tell a part with media, of a chat or of a response, from one that is a text."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    return "<media>" if kind in ("image_url", "input_audio", "file", "input_image", "input_file") else "<text>"


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


def offered_tools(offered: tuple[Tool, ...], mode: str, names: Sequence[str], *, parallel: bool) -> Tools | None:
    """Return the tools of an answer; None if it may call none. `mode` and `names`: as `_chosen` has them. Raises
    ApiError (400)."""
    known = {tool.name for tool in offered}
    refuse_if(len(known) < len(offered), "tools", "must have different names")
    if mode == "none":
        return None
    what = "needs tools: give the functions to choose from. Tools of other kinds do not run here"
    refuse_if(not offered, "tool_choice", what)
    refuse_if(not known.issuperset(names), "tool_choice", "names a function that is not in tools")
    if mode == "function":  # the others are still shown to the model
        return Tools(offered=offered, choice="required", named=names[0], parallel=parallel)
    some = tuple([tool for tool in offered if not names or tool.name in names])
    return Tools(offered=some, choice="required" if mode == "required" else "auto", parallel=parallel)


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
        offered, (mode, names) = tuple([tool.tool for tool in self.functions]), _chosen(self.tool_choice)
        if self.tool_choice in (None, "auto") and not offered:
            return None
        return offered_tools(offered, mode, names, parallel=self.parallel_tool_calls is not False)


_ROLES = {"developer": "system", "function": "tool"}

ContentPart: TypeAlias = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[MediaPart, Tag("<media>")], Discriminator(part_shape)
]
Content: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")]
    | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")],
    by_shape(shape, "a string or a list of parts"),
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
        """Return the message as engines take it: with roles and calls by the names that chat templates know.
        The id of a call by its older name is its function's name, by which the message with its result names it."""
        text, role = words_of(self.content), _ROLES.get(self.role, self.role)
        extras, parts = self.further if self.model_extra else {}, parts_of(self.content)
        if (
            isinstance(self.content, list)
            and not parts
            and any(part.model_extra or part.refusal for part in self.content)
        ):
            own = [part.model_dump(include={"type", "text", "refusal"}, exclude_none=True) for part in self.content]
            extras["content"] = [part.further | said for part, said in zip(self.content, own, strict=True)]
        if not text and role == "assistant" and isinstance(refused := extras.get("refusal"), str):
            text, extras["content"] = refused, None
        if self.role == "function":
            return ChatTurn(role, text, call_id=str(extras.pop("name", "")), extras=extras, parts=parts)
        if not self.tool_calls and not self.tool_call_id and not self.function_call:
            return ChatTurn(role, text, extras=extras, parts=parts)
        calls = tuple([each.call for each in self.tool_calls or ()])
        if role == "assistant" and not calls and (called := self.function_call) is not None:
            calls = (ToolCall(called.name, called.name, called.arguments),)
        return ChatTurn(role, text, calls, (self.tool_call_id or "") if role == "tool" else "", extras, parts)


Messages: TypeAlias = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


# --- generation ------------------------------------------------------------------------------------------------------

TIERS = {
    "default": Priority.STANDARD,
    "standard_only": Priority.STANDARD,
    "flex": Priority.BATCH,
    "scale": Priority.INTERACTIVE,
    "priority": Priority.INTERACTIVE,
    "fast": Priority.INTERACTIVE,
}
"""The lane of each `service_tier`; `auto` means the endpoint's default."""

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class QueuedRequest(StrictBody, ABC):
    """A request that becomes one job."""

    OPEN: ClassVar[bool] = True
    """Whether its unknown fields may go on to a model's server: those of another API may not."""

    model: Annotated[str, Field(min_length=1, max_length=128)]
    """A name from `GET /v1/models`."""
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    """OpenAI's word for the lane: default is standard, flex is batch, the last three are interactive."""
    metadata: Metadata | None = None
    """Your own labels; the job shows them."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """Kept with the job."""
    queue: QueueOptions = QueueOptions()
    """Penstock's own options."""
    _adapter: str = ""

    @property
    def adapter(self) -> str:
        """The adapter of `model` that it names; "": none."""
        return self._adapter

    def naming(self, model: str, adapter: str = "") -> Self:
        """The same request for the model and the adapter that its own name of one means."""
        if not adapter and model == self.model:
            return self
        return self.model_copy(update={"model": model})._with(adapter)

    def _with(self, adapter: str) -> Self:
        self._adapter = adapter
        return self

    @field_validator("queue", mode="before", json_schema_input_type=QueueOptions | None)
    @classmethod
    def _queue_or_null(cls, value: Any) -> Any:
        return QueueOptions() if value is None else value

    @property
    def end_user(self) -> str | None:
        """Whom the client asks for."""
        return self.user

    @property
    def detached(self) -> bool:
        """Whether it goes on without its client, by default in the standard lane."""
        return False

    @property
    def lane(self) -> Priority:
        """Return the requested lane; `queue.priority` overrides `service_tier`."""
        if self.queue.priority:
            return Priority(self.queue.priority)
        return TIERS.get(self.service_tier or "auto", Priority.STANDARD if self.detached else Priority.INTERACTIVE)

    @property
    def on_disconnect(self) -> str:
        """What happens to the job when its reader disconnects."""
        return self.queue.on_disconnect or ("continue" if self.detached else "cancel")

    @property
    def known_to_servers(self) -> dict[str, Any]:
        """Fields that are read here and that a model's server may know too, by their names there. The tier is none
        of them if `queue` names a lane: it then says nothing."""
        tier = None if self.queue.priority else self.service_tier
        return {"user": self.user, "metadata": self.metadata or None, "service_tier": tier}

    @property
    @abstractmethod
    def prompt_asked(self) -> JobPrompt: ...

    @property
    @abstractmethod
    def sampling(self) -> Sampling: ...

    @property
    def tools_asked(self) -> Tools | None:
        """The functions that the answer may call. Raises ApiError (400)."""
        return None

    @property
    def include_usage(self) -> bool:
        """Whether a stream of chunks ends with the token counts."""
        return False

    @property
    def version_read(self) -> int | None:
        """The version of the conversation whose turn the request is, as it was read; None if it is no turn of one."""
        return None

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        """The fields of Job that only this kind of request sets. `card`: of the model, if one is known."""
        return {}

    def check(self) -> None:
        """Refuse fields that do not go together. Raises ApiError (400)."""


class OfJob:
    """What the body of POST /v1/jobs has by default, unlike a request that waits for its answer."""

    detached = True


class GenerationRequest(QueuedRequest):
    """A request for generated texts."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Null: the engine's setting."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Null: the engine's setting."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Against tokens that the text has. Refused if the engine knows no penalties."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Against tokens by how often the text has them. Refused if the engine knows no penalties."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Sample only the k likeliest tokens; 0 or -1: all. Refused if the engine has no top_k."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample only tokens this likely, relative to the likeliest. Refused if the engine has none."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    """Against tokens that prompt or answer have; 1: off. Refused if the engine has none."""
    logit_bias: LogitBias | None = None
    """Adds to the logits of tokens, from -100 (never) to 100 (always), by the token ids of this model. Refused if the
    engine has none."""
    stream: bool | None = False
    """Answer with a stream. A job's events stream without it."""

    @property
    def effort(self) -> Effort | None:
        """How much the model shall reason; None: as much as it does by itself."""
        return None

    def reasoning_of(self, card: ModelCard | None) -> str:
        """Return the `reasoning` of the request's job: a model that reasons by itself is not asked to, and `none` asks
        only such a model for something."""
        if self.effort not in (None, "none"):
            return self.effort
        reasons = card is not None and card.capabilities.reasoning and isinstance(self.prompt_asked, Chat)
        return (self.effort or "default") if reasons else ""

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        return {"stream": bool(self.stream), "reasoning": self.reasoning_of(card)}

    @property
    def known_to_servers(self) -> dict[str, Any]:
        return super().known_to_servers | ({"reasoning_effort": "none"} if self.effort == "none" else {})

    @property
    def sampler_fields(self) -> dict[str, Any]:
        """The fields of Sampling."""
        same = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty")
        return {name: getattr(self, name) for name in same} | {
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
        }

    @property
    def sampling(self) -> Sampling:
        return Sampling(**self.sampler_fields)


class Counted(GenerationRequest):
    """A request that counts the tokens of its prompt."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_tokens=1, temperature=0.0)

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        """The tokenizer counts, where it counts as an answer's prompt is counted; else one token is generated."""
        found = super().particulars(card)
        plain = self.tools_asked is None and not found["reasoning"] and not has_media(self.prompt_asked)
        can_count = card is not None and card.capabilities.tokenize_chats and plain
        return found | {"task": Task(kind="tokenize") if can_count else None}


_LEAVE_OUT = "Leave it out."

UNSUPPORTED: Refused = {
    "functions": (([],), "Use tools, its newer name."),
    "function_call": (("none", "auto"), "Use tool_choice, its newer name."),
    "suffix": (("",), "Put it into the prompt, between the fill-in-the-middle tokens of the model, if it has any."),
    "best_of": ((), "Ask for n answers and choose among them."),
    "webhook": ((), "Use queue.webhook, which names a webhook of the settings."),
}

CHAT_ONLY: Refused = {
    "tools": (([],), _LEAVE_OUT),
    "tool_choice": (("none", "auto"), _LEAVE_OUT),
    "reasoning_effort": (("none",), _LEAVE_OUT),
}
"""Fields of a chat that have no place in a completion."""

COMPLETION_ONLY: Refused = {
    "echo": ((False,), "Put the last message in front of the answer yourself; completions have it.")
}
"""Fields of a completion that have no place in a chat."""

CONSTRAINTS: Refused = dict.fromkeys(
    (
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "structural_tag"),
        *("json_schema", "regex", "grammar", "ebnf"),
    ),
    ((), "Use response_format with type 'json_schema'; a schema may be a pattern, or an enum of texts."),
)
"""Fields by which other servers constrain the output."""


def refuse(fields: Mapping[str, Any], refused: Refused) -> None:
    """Refuse known fields that nothing here honours, and those of `queue` outside it. Raises ApiError (400)."""
    for name, value in fields.items():
        if value is None:
            continue
        if name in QueueOptions.model_fields and value != OTHERS_PRIORITY:
            raise invalid_request(f"{name} has no effect there (did you mean queue.{name}?).", name)
        if name not in refused:
            continue
        neutral, remedy = refused[name]
        if name == "best_of":
            neutral = (fields.get("n") or 1,)
        if value not in neutral:
            raise invalid_request(f"{name} is not supported here. {remedy}", name)


ALL = "*"
"""In a card's `withheld`: every field."""
_NAMES = (
    # what Penstock decides: which answer is continued and how, what is streamed and counted, and in which order
    "model models fallbacks endpoint queue messages prompt input stream stream_options n best_of stop background "
    "priority rid request_id client_metadata continue_final_message add_generation_prompt add_special_tokens "
    "input_ids prompt_embeds prompt_token_ids return_token_ids return_tokens_as_token_ids return_tokens "
    "return_progress n_predict max_new_tokens verbose detokenize return_hidden_states "
    # what reaches other tenants' data, other machines, or the server itself
    "uuid cache_salt cache_prompt id_slot slot_id session_id session_params keep_alive kv_transfer_params "
    "bootstrap_host bootstrap_port bootstrap_room data_parallel_rank custom_logit_processor lora_path api_key "
    "api_base api_version base_url headers extra_headers user_config extra_body extra_query extra_key "
    "routed_dp_rank disaggregated_params ec_transfer_params logits_processors lora_request lora options "
    "mm_processor_kwargs media_io_kwargs model_list custom_llm_provider deployment_id organization data_sources "
    "cache guardrails num_retries timeout preset provider plugins previous_response_id conversation_id "
    "use_beam_search "
    # what would mean something else where an answer is continued
    "truncate_prompt_tokens t_max_predict_ms"
)
OURS = frozenset(_NAMES.split()).union(
    UNSUPPORTED, CHAT_ONLY.keys() - {"reasoning_effort"}, COMPLETION_ONLY, CONSTRAINTS
)
"""Fields that are never passed on."""


OF_GATEWAYS = ("aws_", "azure_", "vertex_", "litellm_")
"""Prefixes of fields that tell a gateway where to send a request, and as whom."""


UNKNOWN = ModelCard(
    name="", engine="", context=0, max_output=0, capabilities=Capabilities(passes_fields=True), created=0
)
"""The card of a model that no worker has loaded yet, for lines of a batch, whose answers have no X-Ignored-Fields. A
worker leaves out what its engine does not take."""


def passable(name: str) -> bool:
    """Whether a field of a request, or of a part of one, may be passed on."""
    return PASSABLE.fullmatch(name) is not None and name not in OURS and not name.startswith(OF_GATEWAYS)


def passes(name: str, card: ModelCard | None) -> bool:
    """Whether a field of a request is passed on. `card`: of the model; None: not known.

    An engine without the capability `passes_fields`, or a model whose card is not known yet, gets no field that
    Penstock does not read: X-Ignored-Fields then names the fields.
    """
    if card is None or not card.capabilities.passes_fields or not passable(name):
        return False
    return name in card.takes or {name, ALL}.isdisjoint(card.withheld)


def passed_fields(request: QueuedRequest, card: ModelCard | None) -> dict[str, Any]:
    """Return the fields of a request that its job has for the model's server."""
    if card is None or not card.capabilities.passes_fields:
        return {}
    found = {**((request.model_extra or {}) if request.OPEN else {}), **request.known_to_servers}
    return {name: value for name, value in found.items() if value is not None and passes(name, card)}


def passed_parts(
    prompt: JobPrompt, tools: Tools | None, card: ModelCard | None, *, shown: bool = False
) -> tuple[JobPrompt, Tools | None]:
    """Return prompt and tools with those further fields of messages, calls and tools that are passed on. `shown`: its
    turns are shown as items again, where a refusal is one."""
    if card is not None and card.capabilities.passes_fields and ALL not in card.withheld:
        return prompt, tools
    return without_extras(prompt, tools, refusals=shown)
