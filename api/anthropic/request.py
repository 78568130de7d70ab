"""Request schemas of POST /v1/messages and /v1/messages/count_tokens, and a job's request in their form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from api.anthropic.blocks import CacheControl, Messages, Words, sent_messages, turns_of
from api.openai import fields
from api.openai.errors import refuse_if
from penstock.engine import ModelCard
from penstock.tools import Tool, Tools
from streaming.jobs.job import Chat, Job, MessageForm

_OTHER_NAME = "It is no field of this endpoint. Use"
UNSUPPORTED: fields.Refused = {
    "stop": ((), f"{_OTHER_NAME} stop_sequences."),
    "max_completion_tokens": ((), f"{_OTHER_NAME} max_tokens."),
    "response_format": ((), f"{_OTHER_NAME} output_config.format."),
    "reasoning_effort": ((), f"{_OTHER_NAME} thinking or output_config.effort."),
    "n": ((1,), "A message has one text: send the request several times."),
    "logprobs": ((False,), "A message has no log-probabilities: use /v1/chat/completions for them."),
    "seed": ((), "A message has no seed: use temperature 0, or /v1/chat/completions with a seed."),
}
_CONSTRAINTS = dict.fromkeys(fields.CONSTRAINTS, ((), "Use output_config.format with type 'json_schema'."))


class CustomTool(fields.StrictBody):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    """May be left out."""
    name: fields.FunctionName
    """Letters, digits, `_`, `-` and `.`; at most 128 characters."""
    description: str | None = None
    """What it does, for the model."""
    input_schema: fields.Parameters
    """JSON schema of its input, an object; at most 512 KiB."""
    strict: bool | None = None
    """Whether calls are checked against the schema."""
    cache_control: CacheControl | None = None
    """Without effect."""

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.input_schema, bool(self.strict))


def _tool_shape(value: Any) -> str:
    return "<custom>" if not isinstance(value, Mapping) or value.get("type") in (None, "custom") else "<hosted>"


AnyTool: TypeAlias = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[fields.HostedTool, Tag("<hosted>")], Discriminator(_tool_shape)
]
MODES = {"auto": "auto", "any": "required", "tool": "function", "none": "none"}
"""The types of a choice, as chats name them."""


class Choice(fields.StrictBody):
    """Whether the model must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    """`any`: it must call one; `tool`: the named one."""
    name: fields.FunctionName | None = None
    """Of the tool, with the type `tool`."""
    disable_parallel_tool_use: bool | None = None
    """True: at most one call in an answer."""


class ThinkingOptions(fields.StrictBody):
    """Whether the answer shows thinking."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    """`disabled`: none is shown, and the model is told not to think if it can be. Of a model that does not think, all
    types say the same."""
    budget_tokens: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Ignored: engines have no budget for it."""
    display: Literal["summarized", "omitted"] | None = None
    """`omitted`: it is not shown."""

    @property
    def ignored(self) -> list[str]:
        return ["budget_tokens"] if self.budget_tokens else []

    @property
    def shown(self) -> bool:
        return self.type != "disabled" and self.display != "omitted"


class OutputFormat(fields.StrictBody):
    """The format of the answer."""

    type: Literal["json_schema"]
    """JSON of a schema."""
    schema_: Annotated[fields.SchemaObject, Field(alias="schema")]
    """At most 512 KiB. The answer is checked."""


class OutputConfig(fields.StrictBody):
    """Options of the answer."""

    format: OutputFormat | None = None
    """JSON of a schema."""
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """How much the model thinks, if it can be told that."""


class PromptFields(fields.GenerationRequest):
    """The fields of a message that decide what its prompt is."""

    REFUSED: ClassVar[fields.Refused] = {**UNSUPPORTED, **_CONSTRAINTS}
    OPEN = False

    messages: Messages
    """The conversation, oldest message first; the last one is not of `assistant`."""
    system: Words | None = None
    """Instructions: a text, or blocks of text."""
    tools: Annotated[list[AnyTool], Field(max_length=fields.MAX_MESSAGES, fail_fast=True)] | None = None
    """Tools that the model may call. Refused if it knows none. Those that a server runs are ignored."""
    tool_choice: Choice | None = None
    """Whether it must call one."""
    thinking: ThinkingOptions | None = None
    """Whether the answer shows thinking; not without this field."""
    output_config: OutputConfig | None = None
    """Format of the answer, and effort."""
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""
    cache_control: CacheControl | None = None
    """Without effect."""

    def check(self) -> None:
        super().check()
        what = "must not end with a message of 'assistant': an answer cannot be begun here"
        refuse_if(self.messages[-1].role == "assistant", "messages", what)

    @property
    def prompt_asked(self) -> Chat:
        return Chat(turns_of(self.system, self.messages))

    @property
    def tools_asked(self) -> Tools | None:
        offered = tuple([tool.tool for tool in self.tools or () if isinstance(tool, CustomTool)])
        choice = self.tool_choice or Choice(type="auto")
        named = [choice.name] if choice.type == "tool" and choice.name else []
        refuse_if(choice.type == "tool" and not named, "tool_choice.name", "is required with the type 'tool'")
        if choice.type == "auto" and not offered:
            return None
        parallel = not choice.disable_parallel_tool_use
        return fields.offered_tools(offered, MODES[choice.type], named, parallel=parallel)

    @property
    def effort(self) -> fields.Effort | None:
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        effort = self.output_config.effort if self.output_config else None
        return "xhigh" if effort == "max" else effort

    def reasoning_of(self, card: ModelCard | None) -> str:
        """As that of a chat that asks for as much as its model can be told: effort is a hint here."""
        if card is not None and card.capabilities.reasoning_effort:
            return super().reasoning_of(card) or ("default" if self.thinking and self.thinking.shown else "")
        return "default" if card is not None and card.capabilities.reasoning else ""

    @property
    def known_to_servers(self) -> dict[str, Any]:
        return {"user": self.end_user}


class MessagesRequest(PromptFields):
    """The body of POST /v1/messages."""

    max_tokens: fields.TokenLimit
    """Most tokens."""
    stop_sequences: Annotated[list[fields.StopText], Field(max_length=64, fail_fast=True)] | None = None
    """The text ends before the first of these."""
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    """Null: the engine's setting."""
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]  # other words
    """`standard_only`: the standard lane."""

    @property
    def end_user(self) -> str | None:
        return (self.metadata or {}).get("user_id", self.user)

    @property
    def sampler_fields(self) -> dict[str, Any]:
        form = (self.output_config and self.output_config.format) or self.output_format
        return super().sampler_fields | {
            "max_tokens": self.max_tokens,
            "stop": tuple([stop for stop in self.stop_sequences or () if stop]),
            "json_schema": form.schema_ if form else None,
        }

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        form = MessageForm(thinking=bool(self.thinking and self.thinking.shown))
        return super().particulars(card) | {"message": form}


class MessageCountRequest(fields.Counted, PromptFields):
    """The body of POST /v1/messages/count_tokens."""


# --- a job's request -------------------------------------------------------------------------------------------------


def sent_fields(job: Job, form: MessageForm) -> dict[str, Any]:
    """Render what a request would send for a job's prompt, tools and format. What says nothing is None."""
    tools, sampling = job.tools, job.sampling
    choice: dict[str, Any] | None = None
    if tools is not None and (tools.forced or not tools.parallel):
        kind = "tool" if tools.named else "any" if tools.forced else "auto"
        choice = {"type": kind, "name": tools.named or None, "disable_parallel_tool_use": not tools.parallel}
    offered = None if tools is None else [_shown_tool(tool) for tool in tools.offered]
    schema = sampling.json_schema
    asked = None if schema is None else {"type": "json_schema", "schema": schema}
    effort = None if job.reasoning in ("", "default", "none") else job.reasoning
    thinking = "disabled" if job.reasoning == "none" else "adaptive" if form.thinking else None
    return {
        **sent_messages(job.prompt.turns if isinstance(job.prompt, Chat) else ()),
        "tools": offered,
        "tool_choice": choice,
        "stop_sequences": list(sampling.stop) or None,
        "output_config": {"format": asked, "effort": effort} if asked or effort else None,
        "thinking": {"type": thinking} if thinking else None,
    }


def _shown_tool(tool: Tool) -> dict[str, Any]:
    schema = tool.schema if tool.parameters is None else tool.parameters
    return {"name": tool.name, "description": tool.description, "input_schema": schema, "strict": tool.strict}
