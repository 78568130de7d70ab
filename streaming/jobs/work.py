"""The unit of work: how many tokens a request may have generated. Pure.

One unit is one token of one choice. The reservation of the store's memory and the token quotas of batches count by it,
and a worker's share of its KV cache by the same limit of an answer, so that no shape of a request (prompt lists, n, no
max_tokens) is cheaper in one of them. Quotas count prompts too, once for each choice: an engine computes the prompt of
every choice unless its prefix cache happens to have it.
"""

from __future__ import annotations

from streaming.jobs.cards import ModelCard
from streaming.jobs.job import Chat, Prompt, Sampling, Text, Tokens, prompt_count

UNKNOWN_OUTPUT = 4096
"""Tokens of an answer without a limit by a model that no worker has loaded yet."""

CHARACTERS_PER_TOKEN = 4
"""Estimate."""


def work_of(prompt: Prompt, sampling: Sampling, card: ModelCard | None) -> int:
    """The most tokens that all choices together can have. `card`: what is known of the model, if anything is."""
    if isinstance(prompt, Tokens):
        return sampling.n * sum([answer_tokens(sampling.max_tokens, card, len(ids)) for ids in prompt.ids])
    return sampling.n * prompt_count(prompt) * answer_tokens(sampling.max_tokens, card)


def weight_of(prompt: Prompt, sampling: Sampling, card: ModelCard | None) -> int:
    """What token quotas count: the work, and the prompt of every choice. `card` as for `work_of`."""
    return sampling.n * sum(prompt_sizes(prompt)) + work_of(prompt, sampling, card)


def answer_tokens(max_tokens: int | None, card: ModelCard | None, prompt_tokens: int = 0) -> int:
    """The longest answer of one choice: as asked for, else the engine's default, and in both cases no longer than the
    model's longest answer and what `prompt_tokens` leave of its context. Only the engine knows how many tokens a text
    has, so callers who must not count too little leave them out for texts."""
    if card is None:
        return UNKNOWN_OUTPUT if max_tokens is None else max_tokens
    wanted = (card.default_output or card.max_output) if max_tokens is None else max_tokens
    return max(0, min(wanted, card.max_output, card.context - prompt_tokens))


def prompt_sizes(prompt: Prompt) -> list[int]:
    """Tokens of each prompt: counted where token ids were sent, estimated from the characters of texts."""
    match prompt:
        case Chat(turns):
            return [sum([len(turn.role) + len(turn.content) for turn in turns]) // CHARACTERS_PER_TOKEN]
        case Text(texts):
            return [len(text) // CHARACTERS_PER_TOKEN for text in texts]
        case Tokens(ids):
            return [len(each) for each in ids]
