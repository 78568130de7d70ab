"""Fallback rules: which model's servers get a request, of the model that was asked for and those it may fall back to.
Pure.

An answer stays with the model that gave its first token: two models never write one text. Before that, a request goes
to a fallback while no server of its own model can be used, or after they have broken it twice. An error by the
request's own fault, and a content filter, lead to no fallback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine import CHARACTERS_PER_TOKEN, ChatTurn, ModelCard, Request
from streaming.jobs.job import HINTS

MAX_BREAKS_BEFORE = 2
"""A request that a model's servers break so often before its first token goes to the next model."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """What counts of one model's servers, for one request."""

    model: str
    ready: bool
    """Whether one of them is there."""
    wait_s: float = 0.0
    """For how long their rate limits hold the request."""
    breaks: int = 0
    """How often they have broken the request, before its first token."""
    card: ModelCard | None = None
    """What they can do; None: not known yet."""


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """The chosen pool and why it is not the first; None: the request waits for a server."""

    number: int | None
    reason: str = ""


def choose(request: Request, pools: Sequence[PoolState], patience_s: float, began: str | None) -> PoolChoice:
    """Choose the servers that get a request.

    Args:
        pools: of the model that was asked for, then of its fallbacks in their order.
        patience_s: rate limits that hold a request longer lead to a fallback.
        began: the model that gave the first token; None before that.
    """
    if began is not None:
        number = number_of(began, [pool.model for pool in pools])
        return PoolChoice(number if number is not None and pools[number].ready else None)
    reason = _obstacle(pools[0], patience_s)
    if not reason:
        return PoolChoice(0)
    for number, pool in enumerate(pools[1:], 1):
        if pool.card is not None and not _obstacle(pool, patience_s) and not unsuited(pool.card, request):
            return PoolChoice(number, reason)
    return PoolChoice(0 if pools[0].ready else None)


def number_of(model: str, models: Sequence[str]) -> int | None:
    """The number of the model that began an answer ("": the first); None if it is no longer among them."""
    if not model:
        return 0
    return models.index(model) if model in models else None


def unsuited(card: ModelCard, request: Request) -> str:
    """Why a model cannot stand in for another one with this request; "" if it can."""
    sampling, can, turns = request.sampling, card.capabilities, _turns(request)
    tools, called = request.tools, any(turn.calls or turn.call_id for turn in turns)
    size = size_of(request)
    obstacles = {
        "vectors and token ids are those of another model": request.task is not None,
        "token ids are those of another model": not isinstance(request.prompt, str) and not turns,
        "token ids of a bias are those of another model": bool(sampling.logit_bias),
        "it takes no raw prompts": isinstance(request.prompt, str) and not can.text_prompts,
        "it takes no conversations": bool(turns) and not can.chat,
        "it gives too few log-probabilities": sampling.logprobs is not None and sampling.logprobs > can.logprobs,
        "it cannot be held to JSON": sampling.json_schema is not None and not can.json_schema,
        "it knows no penalties": bool(sampling.presence_penalty or sampling.frequency_penalty) and not can.penalties,
        "it knows no top_k": bool(sampling.top_k) and not can.top_k,
        "it knows no min_p": bool(sampling.min_p) and not can.min_p,
        "it knows no repetition_penalty": sampling.repetition_penalty not in (None, 1) and not can.repetition_penalty,
        "it knows no tools": (called or (tools is not None and not tools.forced)) and not can.tools,
        "it cannot force a call": tools is not None and tools.forced and not can.forced_tools,
        "it gets no further fields": bool(request.passed.keys() - HINTS) and not can.passes_fields,
        "its context may be too short": size + (sampling.max_tokens or 1) > card.context,
        "its longest answer is shorter": (sampling.max_tokens or 0) > card.max_output,
    }
    return next((reason for reason, stands in obstacles.items() if stands), "")


def size_of(request: Request) -> int:
    """Tokens of a prompt, roughly."""
    turns = _turns(request)
    if request.inputs:
        sizes = [len(each) // (CHARACTERS_PER_TOKEN if isinstance(each, str) else 1) for each in request.inputs]
        return sum(sizes)
    if not turns and not isinstance(request.prompt, str):
        return len(request.prompt)
    texts = [turn.content for turn in turns] or [str(request.prompt)]
    return sum([len(text) // CHARACTERS_PER_TOKEN for text in texts])


def _turns(request: Request) -> list[ChatTurn]:
    return [] if isinstance(request.prompt, str) else [turn for turn in request.prompt if isinstance(turn, ChatTurn)]


def _obstacle(pool: PoolState, patience_s: float) -> str:
    """Why a model's servers do not get a request that has no token yet; "" if they may."""
    if not pool.ready:
        return "no server of it is there"
    if pool.breaks >= MAX_BREAKS_BEFORE:
        return f"its servers broke the request {pool.breaks} times"
    if pool.wait_s > patience_s:
        return f"its rate limit holds for {pool.wait_s:.0f} s"
    return ""
