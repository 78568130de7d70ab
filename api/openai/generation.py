"""Generation request: the fields that chats, completions and responses share, and what becomes of unknown fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from pydantic import Field, field_validator

from api.openai.errors import invalid_request
from api.openai.fields import OTHERS_PRIORITY, PASSABLE, LogitBias, Metadata, QueueOptions, StrictBody
from penstock.engine import Capabilities, ModelCard, Sampling, Task
from penstock.tools import Tools
from streaming.jobs.job import NO_FORM, Chat, Prompt, ResponseForm, TaskForm, has_extras, without_extras
from streaming.order import Priority

TIERS = {
    "default": Priority.STANDARD,
    "flex": Priority.BATCH,
    "scale": Priority.INTERACTIVE,
    "priority": Priority.INTERACTIVE,
    "fast": Priority.INTERACTIVE,
}
"""The lane of each `service_tier`; `auto` means the endpoint's default."""

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class QueuedRequest(StrictBody, ABC):
    """A request that becomes one job."""

    REFUSED: ClassVar[Refused] = {}

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

    @field_validator("queue", mode="before", json_schema_input_type=QueueOptions | None)
    @classmethod
    def _queue_or_null(cls, value: Any) -> Any:
        return QueueOptions() if value is None else value

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
    def prompt_asked(self) -> Prompt: ...

    @property
    @abstractmethod
    def sampling(self) -> Sampling: ...

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream."""
        return False

    @property
    def effort(self) -> Effort | None:
        """How much the model shall reason; None: as much as it does by itself."""
        return None

    @property
    def tools_asked(self) -> Tools | None:
        """The functions that the answer may call. Raises ApiError (400)."""
        return None

    @property
    def choices_per_prompt(self) -> int:
        return 1

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream of chunks ends with the token counts."""
        return False

    @property
    def response_form(self) -> ResponseForm | None:
        """What the Responses API shows of the request; None for the other endpoints."""
        return None

    @property
    def version_read(self) -> int | None:
        """The version of the conversation whose turn the request is, as it was read; None if it is no turn of one."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether each text begins with its prompt."""
        return False

    @property
    def task_asked(self) -> Task | None:
        """What it asks for instead of generated texts."""
        return None

    def task_for(self, card: ModelCard | None) -> Task | None:
        """What a model is asked for instead of generated texts. `card`: the model's, if one is known."""
        return self.task_asked

    @property
    def task_form(self) -> TaskForm:
        """What the answer to a task shows."""
        return NO_FORM


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
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def sampler_fields(self) -> dict[str, Any]:
        """The fields of Sampling that every endpoint has under the same name."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
        }


def reasoning_of(request: QueuedRequest, card: ModelCard | None) -> str:
    """Return the `reasoning` of a request's job: a model that reasons by itself is not asked to, and `none` asks only
    such a model for something. `card`: of the model, if one is known."""
    if request.task_asked is not None:
        return ""
    if request.effort not in (None, "none"):
        return request.effort
    reasons = card is not None and card.capabilities.reasoning and isinstance(request.prompt_asked, Chat)
    return (request.effort or "default") if reasons else ""


def sampling_of(request: QueuedRequest, tools: Tools | None) -> Sampling:
    """Return the sampling of a request's job. An answer whose call is forced has no text that a schema could hold."""
    sampling = request.sampling
    if tools is None or not tools.forced or sampling.json_schema is None:
        return sampling
    return msgspec.structs.replace(sampling, json_schema=None)


Refused: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]
"""Known fields that are not supported: their neutral values, which are accepted (like null), and what to do instead."""

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
    "echo": ((False,), "Put the last message in front of the answer yourself; completions have it."),
}
"""Fields of a completion that have no place in a chat."""

_PATTERN = 'the schema {"type": "string", "pattern": ...}.'
_INSTEAD = {
    "guided_json": "the schema in json_schema.schema.",
    "guided_regex": _PATTERN,
    "guided_choice": 'the schema {"enum": [...]}.',
    "guided_grammar": "a schema instead of a grammar.",
    "structured_outputs": "the schema in json_schema.schema.",
    "structural_tag": "a schema instead of tags.",
    "json_schema": "the schema in json_schema.schema.",
    "regex": _PATTERN,
    "grammar": "a schema instead of a grammar.",
    "ebnf": "a schema instead of a grammar.",
}
CONSTRAINTS: Refused = {
    name: ((), f"Use response_format with type 'json_schema' and {instead}") for name, instead in _INSTEAD.items()
}
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
OURS = frozenset(
    {
        *UNSUPPORTED,
        *(CHAT_ONLY.keys() - {"reasoning_effort"}),
        *COMPLETION_ONLY,
        *CONSTRAINTS,
        # what Penstock decides: which answer is continued and how, what is streamed and counted, and in which order
        *("model", "models", "fallbacks", "endpoint", "queue", "messages", "prompt", "input", "stream"),
        *("stream_options", "n", "best_of", "stop", "background", "priority", "rid", "request_id", "client_metadata"),
        *("continue_final_message", "add_generation_prompt", "add_special_tokens", "input_ids", "prompt_embeds"),
        *("prompt_token_ids", "return_token_ids", "return_tokens_as_token_ids", "return_tokens", "return_progress"),
        *("n_predict", "max_new_tokens", "verbose", "detokenize", "return_hidden_states"),
        # what reaches other tenants' data, other machines, or the server itself
        *("cache_salt", "cache_prompt", "id_slot", "slot_id", "session_id", "session_params", "keep_alive"),
        *("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank"),
        *("custom_logit_processor", "lora_path", "api_key", "api_base", "api_version", "base_url", "headers"),
        *("extra_headers", "user_config", "extra_body", "extra_query", "extra_key", "routed_dp_rank"),
        *("disaggregated_params", "ec_transfer_params", "logits_processors", "lora_request", "lora", "options"),
        *("mm_processor_kwargs", "media_io_kwargs", "model_list", "custom_llm_provider", "deployment_id"),
        *("organization", "data_sources", "cache", "guardrails", "num_retries", "timeout", "preset", "provider"),
        *("plugins", "previous_response_id", "conversation_id", "use_beam_search"),
        # what would mean something else where an answer is continued
        *("truncate_prompt_tokens", "t_max_predict_ms"),
    }
)
"""Fields that are never passed on."""


OF_GATEWAYS = ("aws_", "azure_", "vertex_", "litellm_")
"""Prefixes of fields that tell a gateway where to send a request, and as whom."""


UNKNOWN = ModelCard(
    name="", engine="", context=0, max_output=0, capabilities=Capabilities(passes_fields=True), created=0
)
"""The card of a model that no worker has loaded yet, for lines of a batch, whose answers have no X-Ignored-Fields. A
worker leaves out what its engine does not take."""


def passes(name: str, card: ModelCard | None) -> bool:
    """Whether a field of a request is passed on. `card`: of the model; None: not known.

    An engine without the capability `passes_fields`, or a model whose card is not known yet, gets no field that
    Penstock does not read: X-Ignored-Fields then names the fields.
    """
    if card is None or not card.capabilities.passes_fields or not PASSABLE.fullmatch(name):
        return False
    if name in OURS or name.startswith(OF_GATEWAYS):
        return False
    return {name, ALL}.isdisjoint(card.withheld)


def passed_fields(request: QueuedRequest, card: ModelCard | None) -> dict[str, Any]:
    """Return the fields of a request that its job has for the model's server."""
    if card is None or not card.capabilities.passes_fields:
        return {}
    found = {**(request.model_extra or {}), **request.known_to_servers}
    return {name: value for name, value in found.items() if value is not None and passes(name, card)}


def passed_parts(
    prompt: Prompt, tools: Tools | None, card: ModelCard | None, *, shown: bool = False
) -> tuple[Prompt, Tools | None]:
    """Return prompt and tools with those further fields of messages, calls and tools that are passed on. `shown`: its
    turns are shown as items again, where a refusal is one."""
    if not has_extras(prompt, tools):
        return prompt, tools
    if card is None or not card.capabilities.passes_fields or ALL in card.withheld:
        bare, tools = without_extras(prompt, tools)
        return _with_refusals(bare, prompt) if shown else bare, tools
    return prompt, tools


def _with_refusals(bare: Prompt, prompt: Prompt) -> Prompt:
    """The bare turns of a prompt, where those that are a refusal say so."""
    if not isinstance(bare, Chat) or not isinstance(prompt, Chat):
        return bare
    marked = [
        msgspec.structs.replace(turn, extras={name: full.extras.get(name) for name in ("content", "refusal")})
        if "refusal" in full.extras
        else turn
        for turn, full in zip(bare.turns, prompt.turns, strict=True)
    ]
    return Chat(tuple(marked))
