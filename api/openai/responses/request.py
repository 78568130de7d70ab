"""Request schema of POST /v1/responses, and what is known and refused there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, PrivateAttr, Tag, field_validator

from api.openai import fields
from api.openai.errors import refuse_if
from api.openai.responses.items import TEXT_OR_LIST, Item, ItemReference, Message, with_media_behind
from penstock.engine import MAX_LOGPROBS, ChatTurn, ModelCard
from penstock.tools import Tool
from streaming.jobs.job import Chat, ResponseForm


class FlatTool(fields.Function, fields.FunctionTool):
    """A function that the model may call."""

    @property
    def tool(self) -> Tool:
        return self.as_tool(self.further)

    @property
    def shown(self) -> dict[str, Any]:
        """As the response shows it."""
        named = {"type": "function", "name": self.name, "description": self.description}
        return {**named, "parameters": self.parameters, "strict": bool(self.strict)}


AnyFlatTool: TypeAlias = Annotated[
    Annotated[FlatTool, Tag("<function>")] | Annotated[fields.HostedTool, Tag("<hosted>")],
    Discriminator(fields.tool_shape),
]


LOGPROBS = "message.output_text.logprobs"

_OTHER_NAMES = "is no field of this endpoint. Use"

UNSUPPORTED: fields.Refused = {
    "prompt": ((), "Send the whole text in instructions and input."),
    "max_tokens": ((), f"It {_OTHER_NAMES} max_output_tokens."),
    "max_completion_tokens": ((), f"It {_OTHER_NAMES} max_output_tokens."),
    "messages": ((), f"It {_OTHER_NAMES} input."),
    "response_format": ((), f"It {_OTHER_NAMES} text.format."),
    "reasoning_effort": (("none",), f"It {_OTHER_NAMES} reasoning.effort."),
    "logprobs": ((False,), f"It {_OTHER_NAMES} include with '{LOGPROBS}'."),
    "n": ((1,), "A response has one text: send the request several times."),
    "stop": ((), "A response has no stop texts: use /v1/chat/completions for them."),
    "seed": ((), "A response has no seed: use temperature 0, or /v1/chat/completions with a seed."),
}
_CONSTRAINTS: fields.Refused = dict.fromkeys(fields.CONSTRAINTS, ((), "Use text.format with type 'json_schema'."))


class Format(fields.ClosedBody):
    """Output format of a response, flat, unlike a chat's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    """Anything but `text` needs an engine for it."""
    name: Annotated[str, Field(max_length=128)] | None = None
    """Of a schema; for models of upstream servers."""
    schema_: Annotated[fields.SchemaObject | None, Field(alias="schema", validate_default=True)] = None
    """Required with type `json_schema`: at most 512 KiB. The answer is checked."""
    description: Annotated[str, Field(max_length=4096)] | None = None
    """For models of upstream servers."""
    strict: bool | None = None
    """For models of upstream servers: every schema is strict here."""

    _given = field_validator("schema_")(fields.with_its_type)

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """Return the schema that constrains the output: None for plain text, `{}` for any JSON object."""
        return None if self.type == "text" else self.schema_ or {}

    @property
    def shown(self) -> dict[str, Any]:
        """Return the format as the response shows it; {} for plain text."""
        if self.type != "json_schema":
            return {} if self.type == "text" else {"type": self.type}
        named = {"name": self.name or "schema", "description": self.description, "strict": self.strict}
        return {"type": self.type, **named, "schema": self.schema_}


class TextOptions(fields.StrictBody):
    """Options of the text of a response."""

    format: Format | None = None
    """Plain text, any JSON object, or JSON of a schema."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """For a model's server."""

    @property
    def ignored(self) -> list[str]:
        return ["verbosity"] if self.verbosity in ("low", "high") else []


Summary: TypeAlias = Literal["auto", "concise", "detailed"]


class Reasoning(fields.StrictBody):
    """Options of reasoning."""

    effort: fields.Effort | None = None
    """How much the model reasons before it answers. Refused if it cannot be told that."""
    summary: Summary | None = None
    """Ignored: no engine summarizes."""
    generate_summary: Summary | None = None
    """Ignored, as its newer name."""

    @property
    def ignored(self) -> list[str]:
        return [name for name in ("summary", "generate_summary") if getattr(self, name)]


class ResponseStreamOptions(fields.StrictBody):
    """Options of a response's stream."""

    include_obfuscation: bool | None = None
    """Without effect: no event is padded."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a request refers to, once it is read: the turns before its own input, and those of its references."""

    turns: tuple[ChatTurn, ...] = ()
    """Of the response that it continues, with its answer; without its instructions."""
    previous: str = ""
    """The job of that response."""
    referenced: Mapping[str, ChatTurn] | None = None
    """By id of an item."""
    version: int = -1
    """Of the conversation that it belongs to, as it was read; -1: it was not."""


Items: TypeAlias = Annotated[list[Item], Field(min_length=1, max_length=fields.MAX_MESSAGES, fail_fast=True)]
Input: TypeAlias = Annotated[Annotated[str, Tag("<str>")] | Annotated[Items, Tag("<list>")], TEXT_OR_LIST]


class ConversationName(fields.ClosedBody):
    """A conversation, by its id."""

    id: Annotated[str, Field(min_length=1, max_length=128)]


Conversation: TypeAlias = Annotated[
    Annotated[str, Field(min_length=1, max_length=128), Tag("<str>")] | Annotated[ConversationName, Tag("<object>")],
    Discriminator(lambda value: "<str>" if isinstance(value, str) else "<object>"),
]


class InputFields(fields.OfferedTools, fields.GenerationRequest):
    """The fields of a response that decide what its prompt is."""

    REFUSED: ClassVar[fields.Refused] = {**UNSUPPORTED, **_CONSTRAINTS}

    input: Input
    """A text of the user, or a list of items, oldest first."""
    tools: Annotated[list[AnyFlatTool], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] | None = None
    """Functions that the model may call. Refused if it knows none. Other tools are ignored."""
    instructions: str | None = None
    """The first turn, as system; later responses do not inherit it."""
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    """Continues the conversation of this stored response, without its instructions."""

    conversation: Conversation | None = None
    """The conversation that it belongs to: its id, or an object with its id."""

    _context: Context = PrivateAttr(default=Context())

    @property
    def conversation_id(self) -> str:
        """The conversation that it belongs to, or ""."""
        named = self.conversation
        return named.id if isinstance(named, ConversationName) else named or ""

    @property
    def references(self) -> Sequence[str]:
        """Ids of the items that the input refers to."""
        items = self.input if isinstance(self.input, list) else ()
        return [item.id for item in items if isinstance(item, ItemReference)]

    def within(self, context: Context) -> None:
        """Set what the request refers to, before its job is made."""
        self._context = context

    @property
    def own_turns(self) -> tuple[ChatTurn, ...]:
        """The turns of the request's own input."""
        return self._own_turns[0]

    @property
    def developer_turns(self) -> tuple[int, ...]:
        """Places of those of its own turns that have the role `developer`."""
        return self._own_turns[1]

    @property
    def _own_turns(self) -> tuple[tuple[ChatTurn, ...], tuple[int, ...]]:
        if isinstance(self.input, str):
            return (ChatTurn("user", self.input),), ()
        known = self._context.referenced or {}
        found, developer = list[ChatTurn](), set[int]()
        for item in self.input:
            turn = known.get(item.id) if isinstance(item, ItemReference) else item.turn
            found += [turn] if turn is not None else []
            developer |= {id(turn)} if isinstance(item, Message) and item.of_developer else set()
        turns = tuple(with_media_behind(found))
        return turns, tuple([place for place, turn in enumerate(turns) if id(turn) in developer])

    @property
    def prompt_asked(self) -> Chat:
        first = () if self.instructions is None else (ChatTurn("system", self.instructions),)
        return Chat((*first, *self._context.turns, *self.own_turns))


class ResponseRequest(InputFields):
    """The body of POST /v1/responses."""

    max_output_tokens: fields.TokenLimit | None = None
    """Most tokens. Null: the engine's default."""
    text: TextOptions | None = None
    """The format of the answer."""
    background: bool | None = False
    """Answer at once; the response goes on whoever disconnects. Needs `store`."""
    store: bool | None = True
    """Whether it can be retrieved later, for as long as jobs are kept."""
    include: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=16, fail_fast=True)] | None = None
    """What else the answer holds. Log-probabilities are refused if the engine has none; others ignored."""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` is ignored: too long an input is refused."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Likeliest alternatives of each token; needs include with message.output_text.logprobs."""
    stream_options: ResponseStreamOptions | None = None
    """Without effect."""
    reasoning: Reasoning | None = None
    """How much the model reasons."""
    max_tool_calls: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Without effect: the client runs all tools."""
    safety_identifier: Annotated[str, Field(max_length=128)] | None = None
    """Shown in the response."""
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    """Shown in the response."""

    @property
    def ignored(self) -> list[str]:
        included = [f"include[].{name}" for name in self.include or () if name != LOGPROBS]
        return [*(["truncation"] if self.truncation == "auto" else []), *included]

    def check(self) -> None:
        super().check()
        unread = self.background and self.store is False
        refuse_if(unread, "store", "must be true with background: nobody could read the answer")
        without = self.top_logprobs and LOGPROBS not in (self.include or ())
        refuse_if(without, "top_logprobs", f"needs include: ['{LOGPROBS}']")

    @property
    def detached(self) -> bool:
        return bool(self.background)

    @property
    def sampler_fields(self) -> dict[str, Any]:
        return super().sampler_fields | {
            "max_tokens": self.max_output_tokens,
            "logprobs": (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None,
            "json_schema": self.text.format.schema_wanted if self.text and self.text.format else None,
        }

    @property
    def effort(self) -> fields.Effort | None:
        return self.reasoning.effort if self.reasoning else None

    @property
    def known_to_servers(self) -> dict[str, Any]:
        form = self.text.format if self.text else None
        found = super().known_to_servers | fields.named_format(form if form and form.type == "json_schema" else None)
        if self.text and self.text.verbosity:
            found["verbosity"] = self.text.verbosity
        return found | {"prompt_cache_key": self.prompt_cache_key, "safety_identifier": self.safety_identifier}

    @property
    def version_read(self) -> int | None:
        return self._context.version if self.conversation_id else None

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        form = ResponseForm(
            background=bool(self.background),
            store=self.store is not False,
            previous=self._context.previous,
            instructed=self.instructions is not None,
            own_turns=len(self.own_turns),
            conversation=self.conversation_id,
            developer=self.developer_turns,
            format=self.text.format.shown if self.text and self.text.format else {},
            top_logprobs=self.top_logprobs or 0,
            max_tool_calls=self.max_tool_calls,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            tools=tuple([tool.shown for tool in self.functions]),
            tool_choice=fields.shown_choice(self.tool_choice),
            safety_identifier=self.safety_identifier,
            prompt_cache_key=self.prompt_cache_key,
        )
        return super().particulars(card) | {"response": form}


class CountRequest(fields.Counted, InputFields):
    """The body of POST /v1/responses/input_tokens."""


def check_line(request: ResponseRequest) -> None:
    """Refuse what a line of a batch cannot ask for: what is stored, or a response in the background.
    Raises ApiError (400)."""
    what = "has no place in a batch, whose lines run at the same time. Send the conversation in input"
    refuse_if(request.previous_response_id is not None, "previous_response_id", what)
    refuse_if(request.conversation is not None, "conversation", what)
    refuse_if(request.references, "input", "cannot refer to items in a batch. Send them as messages")
    refuse_if(request.background, "background", "has no place in a batch, whose lines all run so. Leave it out")
