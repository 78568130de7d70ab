"""Generation request: the fields that chats, completions and responses share, and what becomes of unknown fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import Field, field_validator

from api.openai.errors import invalid_request
from api.openai.fields import OTHERS_PRIORITY, PASSABLE, LogitBias, Metadata, QueueOptions, Refused, StrictBody
from penstock.engine import Capabilities, ModelCard, Sampling
from penstock.tools import Tools
from streaming.jobs.job import Chat, Prompt, without_extras
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
    "cache_salt cache_prompt id_slot slot_id session_id session_params keep_alive kv_transfer_params "
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
    if card is not None and card.capabilities.passes_fields and ALL not in card.withheld:
        return prompt, tools
    bare, tools = without_extras(prompt, tools)
    if not shown or bare is prompt or not isinstance(bare, Chat) or not isinstance(prompt, Chat):
        return bare, tools
    marked = [
        msgspec.structs.replace(turn, extras={name: full.extras.get(name) for name in ("content", "refusal")})
        if "refusal" in full.extras
        else turn
        for turn, full in zip(bare.turns, prompt.turns, strict=True)
    ]
    return Chat(tuple(marked)), tools
