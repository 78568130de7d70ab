"""Answers other than success that a row may bring about, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ANY = 1 << 30

REFUSALS = frozenset(
    {
        (409, "idempotency_in_progress"),
        (429, "queue_full"),
        (503, "draining"),
        (503, "no_capacity"),
        (503, "store_full"),
        (503, "store_unavailable"),
    }
)
"""Status and code of every refusal the documentation knows; each comes with Retry-After."""

BREAKS = frozenset({"draining", "store_unavailable"})
"""Codes of errors in a stream that say nothing about its job: read on elsewhere."""

RESETS = frozenset({"stream_reset", "resume_impossible"})
"""Codes of errors in a chat stream which say that what was shown is not what is stored."""


class Other(NamedTuple):
    """An answer that is no refusal, and that a row asks for; at most so many per trial, over all clients."""

    status: int
    code: str
    most: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Per trial, over all clients and on average: the answers of a row are held against the budgets of all its trials.
    What exceeds it is a violation; any other answer always is."""

    refused: int = 0
    """Documented refusals: 429 and 503 with Retry-After."""
    unanswered: int = 0
    """Requests that were sent and got no answer."""
    broken: int = 0
    """Connections that ended, or streams that ended with a passing error, before their end."""
    others: tuple[Other, ...] = ()
    """Other answers that the row asks for: any other code, and any more of these, is a violation."""
    why: str = "nothing that clients talk to is disturbed"


NOTHING = Budget()
