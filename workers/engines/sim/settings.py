"""Settings of the simulated engine: section [sim]."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.config import Positive


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
    faults: bool = False
    """Inject the faults that prompts name ([[crash@5]], [[hang@5]], [[fail@5]], [[slow@5]]). For tests only."""
    authors: bool = False
    """Append four capital letters, random per request, to each token: the text then shows which run of an engine
    generated which token, as sampled text would. For tests only."""


SECTION = SimSettings
