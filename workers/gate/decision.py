"""Decisions of the gate, each with its reason."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

GateReason: TypeAlias = Literal["", "slots", "kv", "ttft", "itl"]
"""Why a text waits. "": it is admitted; "slots": every slot is taken; "kv": the KV cache would overflow before the
texts have ended; "ttft", "itl": a chat would wait too long for its first token, or between two tokens."""

WAIT_REASONS: tuple[GateReason, ...] = tuple(reason for reason in get_args(GateReason) if reason)


class GateDecision(NamedTuple):
    """Whether a text is admitted now, and else why it waits."""

    admitted: bool
    reason: GateReason = ""
    peak: int = 0
    """Tokens of KV cache that the texts are predicted to hold at most, with this one; 0: not computed."""


ADMITTED = GateDecision(True)
