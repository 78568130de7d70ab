"""Settings of the simulated engine: section [sim]."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Annotated, Literal

import msgspec

from penstock.config import Positive
from penstock.engine import MAX_LOGPROBS, Capabilities, ModelCard
from workers.engines.sim.answers import SIZE


class SimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [sim]: the simulated engine's time model."""

    step_ms: Annotated[float, msgspec.Meta(ge=0)] = 15.0
    """Milliseconds of one engine step."""
    step_ms_per_text: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Milliseconds added to a step for each text that gets a token in it."""
    prefill_ms: Annotated[float, msgspec.Meta(ge=0)] = 25.0
    """Milliseconds from a slot to the first token."""
    prefill_ms_per_1k_tokens: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Milliseconds that 1,000 prompt tokens add to the steps in which they are computed, which delay every text.
    Prompts are computed one after the other. 0: the cost of a prompt does not depend on its size."""
    prefill_batch: Positive = 512
    """Prompt tokens per step, where they cost time."""
    slots: Positive = 256
    """Texts generated at a time."""
    kv_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Capacity of the simulated KV cache in tokens; 0: as many as the slots need."""
    kv_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] = "GUARANTEED_NO_EVICT"
    """What is admitted to the KV cache, as in TensorRT-LLM."""
    context: Positive = 8192
    """Tokens per request (prompt + completion)."""
    load_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Simulated time to load the weights."""
    cache_prompts: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Size of the simulated prefix cache in prompts: a prefix shared with a cached prompt of the same tenant costs no
    prefill."""
    max_adapters: Positive = 4
    """Adapters loaded at a time. A text that needs another one waits until one of them is not in use."""
    adapter_load_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Milliseconds to load an adapter, for which the text that needs it waits."""
    faults: bool = False
    """Inject the faults that prompts name ([[crash@5]], [[hang@5]], [[fail@5]], [[slow@5]]). For tests only."""
    authors: bool = False
    """Append four capital letters, random per request, to each token: the text then shows which run of an engine
    generated which token, as sampled text would. For tests only."""


SECTION = SimSettings


DEFAULT_MAX_TOKENS = 128


def card_of(model: str, settings: SimSettings, adapters: Collection[str] = ()) -> ModelCard:
    """The card of a model that was loaded now."""
    context = context_of(settings)
    can = ("prompt_logprobs", "token_prompts", "tools", "forced_tools", "tool_resume", "top_k", "min_p",
           "repetition_penalty", "logit_bias", "ignore_eos", "reasoning_effort", "embed", "embedding_dimensions",
           "rerank", "tokenize", "tokenize_chats")  # fmt: skip
    return ModelCard(
        name=model,
        engine="sim",
        context=context,
        max_output=max(1, context - 1),
        default_output=DEFAULT_MAX_TOKENS,
        capabilities=Capabilities(logprobs=MAX_LOGPROBS, **dict.fromkeys(can, True)),
        adapters=tuple(adapters),
        embedding_size=SIZE,
        created=int(time.time()),
    )


def context_of(settings: SimSettings) -> int:
    """Tokens of the longest request: a cache that is smaller than the context holds no more."""
    return min(settings.context, settings.kv_tokens or settings.context)
