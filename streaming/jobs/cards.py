"""Model card: what a worker found when it loaded a model, and what the model's engine can do."""

from __future__ import annotations

import msgspec


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Which known request fields an engine honours. What it cannot do is refused with 400, never ignored."""

    chat: bool = True
    logprobs: int = 0
    """The most alternatives per token; -1: no log-probabilities at all."""
    json_schema: bool = False
    json_resume: bool = False
    """Whether the engine can continue JSON output that an earlier attempt began: it restores the grammar's state."""
    penalties: bool = False
    token_prompts: bool = False


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker found when it loaded a model. It stays in Redis, so a sleeping model is still described."""

    name: str
    engine: str
    context: int
    """Longest prompt + completion, in tokens."""
    max_output: int
    capabilities: Capabilities
    created: int
    """Unix seconds of the first load."""
    default_output: int = 0
    """Tokens of an answer whose request names no limit, at most; 0: max_output."""
