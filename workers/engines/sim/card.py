"""Model card of the simulated engine, and its refusal of a request that exceeds the card."""

from __future__ import annotations

import time

from penstock.engine import Capabilities, Failure, ModelCard
from workers.engines.sim.settings import SimSettings
from workers.engines.sim.tasks import SIZE

DEFAULT_MAX_TOKENS = 128


def card_of(model: str, settings: SimSettings) -> ModelCard:
    """The card of a model that was loaded now."""
    context = context_of(settings)
    return ModelCard(
        name=model,
        engine="sim",
        context=context,
        max_output=max(1, context - 1),
        default_output=DEFAULT_MAX_TOKENS,
        capabilities=Capabilities(
            logprobs=-1,
            token_prompts=True,
            tools=True,
            forced_tools=True,
            tool_resume=True,
            top_k=True,
            min_p=True,
            repetition_penalty=True,
            logit_bias=True,
            ignore_eos=True,
            reasoning_effort=True,
            embed=True,
            embedding_dimensions=True,
            rerank=True,
            tokenize=True,
            tokenize_chats=True,
        ),
        embedding_size=SIZE,
        created=int(time.time()),
    )


def context_of(settings: SimSettings) -> int:
    """Tokens of the longest request: a cache that is smaller than the context holds no more."""
    return min(settings.context, settings.kv_tokens or settings.context)


def too_long(prompt_tokens: int, max_tokens: int | None, context: int, param: str = "messages") -> Failure:
    """The refusal of a request that does not fit into the context, with its numbers."""
    asked = f" and {max_tokens} were asked for the answer" if max_tokens else ""
    return Failure(
        "context_length_exceeded",
        f"This model's context is {context} tokens; the prompt has {prompt_tokens}{asked}. Shorten one of them.",
        400,
        param,
    )
