"""Field types of request bodies: contents, prompts, stop strings, output formats, Penstock's queue options.

Types are strict and sizes bounded. An error text here begins with a verb, because the field's path is put before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

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

MAX_MESSAGES = 1024
MAX_INPUTS = 2048
"""Prompts of a completion, or inputs of a task; `[api] max_choices_per_request` bounds those of completions further."""
MAX_SCHEMA_BYTES = 512 * 1024
"""OpenAI takes 5,000 properties and 120,000 characters of names and values, which is about 400 KiB of JSON."""
WEEK_MS = 7 * 24 * 3600 * 1000

OTHERS_PRIORITY = 0
"""The value that other servers' own `priority` has by default: a client that sends it asks for nothing."""

TokenLimit: TypeAlias = Annotated[int, Field(ge=1, le=1_048_576)]
Milliseconds: TypeAlias = Annotated[int, Field(ge=1, le=WEEK_MS)]
_MAX_METADATA = 16


def refusal(what: str) -> PydanticCustomError:
    """Return an error about the field being validated; `what` begins with a verb."""
    return PydanticCustomError("refused", "{what}", {"what": what})


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
        return {name: value for name, value in found if value not in (None, "", [], {}) and PASSABLE.fullmatch(name)}

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
    do_not_queue: bool | None = False
    """Answer 503 at once unless a worker is free."""
    on_disconnect: Annotated[str, Field(pattern=_DISCONNECT)] | None = None
    """When the reader goes away: 'cancel', 'continue', or 'grace:<seconds>' (0 to 3600), then cancel."""
    webhook: Annotated[str, Field(min_length=1, max_length=2048)] | None = None
    """Who is told how the job ends: the name of a [webhooks] entry of your tenant, or a URL that its `urls` allow."""
