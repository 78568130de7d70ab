"""Generation request: the fields that chats, completions and responses share, beside those of every queued request."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import Field

from api.openai.fields import LogitBias
from api.openai.queued_request import QueuedRequest
from penstock.engine import ModelCard, Sampling
from penstock.tools import Tools
from streaming.jobs.job import Chat


class GenerationRequest(QueuedRequest):
    """A request for generated texts."""

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
