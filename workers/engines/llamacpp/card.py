"""Model card of the embedded engine: what a model file can do here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.engine import MAX_LOGPROBS, Capabilities, ModelCard
from workers.engines.llamacpp.settings import LlamacppSettings

if TYPE_CHECKING:
    from workers.engines.llamacpp.prompt import Prompts

RANKING = "rank"
"""The pooling of a model that ranks documents."""


def card_of(model: str, context: int, prompts: Prompts | None, settings: LlamacppSettings, size: int) -> ModelCard:
    """The card of a model that was loaded now. `prompts`: of its file, if it could be read; `size`: of its vectors."""
    ranks = settings.embeddings and settings.pooling == RANKING
    embeds = settings.embeddings and not ranks
    return ModelCard(
        name=model,
        engine="llamacpp",
        context=context,
        max_output=context,
        capabilities=Capabilities(
            chat=prompts is not None and prompts.chat,
            logprobs=MAX_LOGPROBS,
            json_schema=True,
            penalties=True,
            token_prompts=True,
            top_k=True,
            min_p=True,
            repetition_penalty=True,
            logit_bias=True,
            ignore_eos=True,
            reasoning=prompts is not None and prompts.reasoning,
            reasoning_effort=prompts is not None and prompts.reasoning_effort,
            tools=prompts is not None and prompts.tools,
            forced_tools=prompts is not None and prompts.chat,
            embed=embeds,
            rerank=ranks,
            tokenize=True,
            tokenize_chats=prompts is not None and prompts.chat,
        ),
        embedding_size=size if embeds else 0,
        created=int(time.time()),
    )
