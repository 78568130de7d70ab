"""Model card of upstream servers: what all of them can do together, and whether one stands up to a card. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.engine import Capabilities, ModelCard
from workers.engines.upstream.server.kinds import DEFAULT_CONTEXT, ServerFacts
from workers.engines.upstream.settings import UpstreamSettings


def card_of(model: str, settings: UpstreamSettings, known: Sequence[ServerFacts]) -> ModelCard:
    """The card of a model that these servers compute; at least one."""
    context = min([facts.context for facts in known if facts.context], default=DEFAULT_CONTEXT)
    return ModelCard(
        name=model,
        engine="upstream",
        context=context,
        max_output=min(settings.max_output or context, context),
        default_output=settings.default_output,
        capabilities=_common(known),
        withheld=settings.withhold_fields,
        embedding_size=max([facts.embedding_size for facts in known]),
        created=int(time.time()),
    )


def lacking(card: ModelCard, facts: ServerFacts) -> str:
    """Why a server cannot stand for the card that other servers gave; "" if it can."""
    if facts.context and facts.context < card.context:
        return f"its context is {facts.context} tokens, and the others' is {card.context}"
    can, must = facts.capabilities(), card.capabilities
    sizes = facts.embedding_size, card.embedding_size
    if must.embed and all(sizes) and sizes[0] != sizes[1]:
        return "its vectors have {} numbers, and the others' have {}".format(*sizes)
    named = [name for name in Capabilities.__struct_fields__ if name != "reattaches"]  # which refuses nothing
    lacks = [name for name in named if getattr(can, name) < getattr(must, name)]
    return f"it lacks {', '.join(lacks)}" if lacks else ""


def _common(known: Sequence[ServerFacts]) -> Capabilities:
    """What all of these can do. Vectors of different lengths cannot be compared, so such servers make none together."""
    each = [facts.capabilities() for facts in known]
    least = {name: min(getattr(one, name) for one in each) for name in Capabilities.__struct_fields__}
    sizes = {facts.embedding_size for facts in known if facts.embedding_size}
    return Capabilities(**least | {"embed": least["embed"] and len(sizes) <= 1})
