"""Settings of the simulated engine: section [sim]."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from workers.settings import Positive


class SimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [sim]: the simulated engine's time model."""

    step_ms: Annotated[float, msgspec.Meta(ge=0)] = 15.0
    step_ms_per_text: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Milliseconds more of a step for each text that gets a token in it."""
    prefill_ms: Annotated[float, msgspec.Meta(ge=0)] = 25.0
    prefill_ms_per_1k_tokens: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Milliseconds more of the steps in which 1,000 prompt tokens are computed, which hold up every text; prompts are
    computed one after the other. 0: prompts of any size cost nothing more."""
    prefill_batch: Positive = 512
    """Prompt tokens of one step, where they cost time."""
    slots: Positive = 256
    kv_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens the simulated KV cache holds; 0: as many as the slots need."""
    kv_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] = "GUARANTEED_NO_EVICT"
    context: Positive = 8192
    load_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Simulated time to load the weights."""
    cache_prompts: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Prompts whose prefill is not simulated again for what they have in common with a new one of the same tenant."""
    faults: bool = False
    """Obey fault words in prompts ([[crash@5]], [[hang@5]], [[fail@5]], [[slow@5]]). For tests only."""
    authors: bool = False
    """Put four capital letters, drawn anew for each request the engine is given, behind each token: a text shows which
    run of an engine gave which token, as sampled text would. For tests only."""


SECTION = SimSettings
