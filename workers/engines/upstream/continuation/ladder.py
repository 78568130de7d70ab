"""Continuation ladder: how a server continues an answer that another attempt began, best way first. Pure.

JSON, calls of tools, reasoning, and penalties that count only new tokens are never continued in the middle: a replay
that is compared with what was shown goes on, or the job begins again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.engine import ChatTurn, Request, Sampling
from workers.engines.upstream.server.kinds import ServerFacts

Row = tuple[str, Sequence[int], int]
"""Text, known token ids, and count of tokens, of what was generated."""


class Rung(Enum):
    """A way to send a request."""

    FRESH = "fresh"
    """From the beginning: nothing was generated yet."""
    REATTACH = "reattachment"
    """The same generation, which goes on at the server; what was shown is swallowed."""
    IDS = "token ids"
    """The ids of prompt and answer so far, with no template and no tokenisation at the seam."""
    TEXT = "text"
    """The rendered prompt and the answer so far, as one text."""
    PREFILL = "prefill"
    """The answer so far as the beginning of the assistant's message."""
    REPLAY = "replay"
    """From the beginning; what was shown is swallowed as long as it is the same."""
    RESTART = "restart"
    """The job begins again, and its reader is told."""


FROM_BEGINNING = (Rung.FRESH, Rung.REATTACH, Rung.REPLAY)
"""Rungs whose reply begins with the first token."""
REPEATED = (Rung.REATTACH, Rung.REPLAY)
"""Rungs whose reply repeats what was shown."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The rung for a request, and why no higher one."""

    rung: Rung
    reason: str = ""


def choose(facts: ServerFacts, request: Request, rows: Sequence[Row], tried: Collection[Rung] = ()) -> Continuation:
    """How this server continues `request` after `rows`, all of its answer so far.

    Args:
        tried: rungs that the server has refused for this request.
    """
    if not rows:
        return Continuation(Rung.FRESH)
    if facts.reattach and request.text_id and Rung.REATTACH not in tried:
        return Continuation(Rung.REATTACH)
    reason = _unspliceable(facts, request, rows)
    if not reason:
        for rung, obstacle in _splices(facts, request, rows):
            if rung in tried:
                reason = f"{facts.kind} has refused {rung.value}"
            elif obstacle:
                reason = obstacle
            else:
                return Continuation(rung, reason)
    if Rung.REPLAY not in tried and is_repeatable(request.sampling):
        return Continuation(Rung.REPLAY, reason)
    return Continuation(Rung.RESTART, reason)


def is_repeatable(sampling: Sampling) -> bool:
    """Whether the same request may give the same answer once more, so that a replay is worth its tokens."""
    return sampling.temperature == 0 or sampling.seed is not None


def _unspliceable(facts: ServerFacts, request: Request, rows: Sequence[Row]) -> str:
    sampling = request.sampling
    if request.tools is not None:
        return "a call of a tool would be cut in two"
    if sampling.json_schema is not None:
        return "a grammar would begin at its root again"
    if (request.reasoning and not facts.template_chat) or any(count and not text for text, _, count in rows):
        return "a part of the answer may be reasoning, which the server tells apart or hides"
    if (sampling.presence_penalty or sampling.frequency_penalty) and not facts.penalties_span:
        return f"penalties of {facts.kind} do not count tokens of a prompt"
    if sampling.repetition_penalty not in (None, 1.0) and not facts.repetition_span:
        return f"repetition_penalty of {facts.kind} may not count tokens of a prompt"
    return ""


def _splices(facts: ServerFacts, request: Request, rows: Sequence[Row]) -> list[tuple[Rung, str]]:
    """The rungs that continue in the middle, best first, each with what stands in its way ("" for nothing)."""
    chat = is_chat(request)
    splices = [(Rung.IDS, _without_ids(facts, chat=chat, rows=rows))]
    if not chat:
        splices.append((Rung.TEXT, "" if isinstance(request.prompt, str) else "the prompt is token ids"))
    elif facts.prefill:
        splices.append((Rung.PREFILL, ""))
    else:
        splices.append((Rung.PREFILL, f"{facts.kind} does not continue an assistant's message"))
    return splices


def _without_ids(facts: ServerFacts, *, chat: bool, rows: Sequence[Row]) -> str:
    if not facts.token_prompts:
        return f"{facts.kind} takes no token ids"
    if chat and not facts.chat_ids:
        return f"{facts.kind} does not render a conversation"
    if not facts.mixed and not all(len(ids) == count for _, ids, count in rows):
        return "not all token ids of the answer are known"
    return ""


def is_chat(request: Request) -> bool:
    """Whether its prompt is a conversation."""
    prompt = request.prompt
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], ChatTurn)
