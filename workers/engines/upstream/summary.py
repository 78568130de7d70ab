"""Summary of one server in words, for people: what it is, and how answers continue there. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine import ChatTurn, Request, Sampling
from penstock.text import counted
from workers.engines.upstream.continuation import ladder
from workers.engines.upstream.continuation.ladder import Rung
from workers.engines.upstream.server.kinds import DEFAULT_CONTEXT, ServerFacts

BEGUN = ((" a", (1,), 1),)
LATER = {Rung.REPLAY: "replay at temperature 0 or with a seed", Rung.RESTART: "beginning again"}


def summary(facts: ServerFacts) -> str:
    """One line."""
    name = f"{facts.kind} {facts.version}".strip()
    context = counted(facts.context, "token") if facts.context else f"{DEFAULT_CONTEXT} tokens of context are assumed"
    parts = [f"{name}: {facts.model}", context]
    if facts.slots:
        parts.append(f"runs {counted(facts.slots, 'request')} at once")
    parts.append(f"continues chats by {_way(facts, [ChatTurn('user', 'a')])}")
    parts.append(f"texts by {_way(facts, 'a')}" if facts.text else "takes no raw texts")
    if facts.reattach:
        parts.append("goes on with answers whose reader is lost")
    if facts.embeds:
        parts.append("makes vectors")
    if facts.ranks:
        parts.append("ranks documents")
    if lacks := _lacks(facts):
        parts.append(f"no {', no '.join(lacks)}")
    return "; ".join(parts)


def _way(facts: ServerFacts, prompt: str | Sequence[ChatTurn]) -> str:
    rung = ladder.choose(facts, Request("", prompt, Sampling(temperature=0)), BEGUN).rung
    return LATER.get(rung, rung.value)


def _lacks(facts: ServerFacts) -> list[str]:
    """What is refused at the API."""
    lacks = {
        "JSON schemas": not facts.json_schema,
        "log-probabilities": facts.logprobs < 0,
        "prompts of token ids": not facts.token_prompts and facts.text,
        "penalties": not facts.penalties,
    }
    return [name for name, lacking in lacks.items() if lacking]
