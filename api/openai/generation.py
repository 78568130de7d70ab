"""Generation request: the fields that chats, completions and responses share, and what the queue reads of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, field_validator

from api.openai.fields import LogitBias, Metadata, QueueOptions, StrictBody
from penstock.engine import ModelCard, Sampling
from penstock.tools import Tools
from streaming.jobs.job import Chat, Prompt
from streaming.jobs.response_form import ResponseForm
from streaming.priority import Priority

TIERS = {
    "default": Priority.STANDARD,
    "flex": Priority.BATCH,
    "scale": Priority.INTERACTIVE,
    "priority": Priority.INTERACTIVE,
    "fast": Priority.INTERACTIVE,
}
"""The lane of each `service_tier`; `auto` means the endpoint's default."""


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class GenerationRequest(StrictBody, ABC):
    """A request that becomes one job."""

    LANE: ClassVar[Priority] = Priority.INTERACTIVE
    ON_DISCONNECT: ClassVar[str] = "cancel"

    model: Annotated[str, Field(min_length=1, max_length=128, description="A name from `GET /v1/models`.")]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="Null: the engine's setting.")
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="Null: the engine's setting.")
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        None, description="Against tokens that the text has. Refused if the engine knows no penalties."
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        None, description="Against tokens by how often the text has them. Refused if the engine knows no penalties."
    )
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="Sample only the k likeliest tokens; 0 or -1: all. Refused if the engine has no top_k."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Sample only tokens this likely, relative to the likeliest. Refused if the engine has none."
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = Field(
        None,
        description="Against tokens that prompt or answer have; 1: off. Refused if the engine has none.",
    )
    logit_bias: LogitBias | None = Field(
        None,
        description="Adds to the logits of tokens, from -100 (never) to 100 (always), by the token ids of this model. "
        "Refused if the engine has none.",
    )
    stream: bool | None = Field(False, description="Answer with a stream. A job's events stream without it.")
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = Field(
        None,
        description="OpenAI's word for the lane: default is standard, flex is batch, the last three are interactive.",
    )
    metadata: Metadata | None = Field(None, description="Your own labels; the job shows them.")
    user: Annotated[str, Field(max_length=256)] | None = Field(None, description="Kept with the job, without effect.")
    queue: QueueOptions = Field(QueueOptions(), description="Penstock's own options.")

    @field_validator("queue", mode="before", json_schema_input_type=QueueOptions | None)
    @classmethod
    def _queue_or_null(cls, value: Any) -> Any:
        return QueueOptions() if value is None else value

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

    @property
    def default_lane(self) -> Priority:
        return self.LANE

    @property
    def default_on_disconnect(self) -> str:
        return self.ON_DISCONNECT

    @property
    def lane(self) -> Priority:
        """Return the requested lane; `queue.priority` overrides `service_tier`."""
        if self.queue.priority:
            return Priority(self.queue.priority)
        return TIERS.get(self.service_tier or "auto", self.default_lane)

    @property
    def on_disconnect(self) -> str:
        """What happens to the job when its reader disconnects."""
        return self.queue.on_disconnect or self.default_on_disconnect

    @property
    @abstractmethod
    def prompt_asked(self) -> Prompt: ...

    @property
    @abstractmethod
    def sampling(self) -> Sampling: ...

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


def reasoning_of(request: GenerationRequest, card: ModelCard | None) -> str:
    """Return the `reasoning` of a request's job: a model that reasons by itself is not asked to, and `none` asks only
    such a model for something. `card`: of the model, if one is known."""
    if request.effort not in (None, "none"):
        return request.effort
    reasons = card is not None and card.capabilities.reasoning and isinstance(request.prompt_asked, Chat)
    return (request.effort or "default") if reasons else ""
