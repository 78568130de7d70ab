"""Reasoned tokens: how many tokens of an answer are reasoning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from penstock.tools import CallReader
from streaming.jobs.frames import Delta


def reasoned_tokens(deltas: Iterable[Delta]) -> int:
    """Count the tokens whose text is reasoning, or that end it, of all choices together."""
    readers, count = defaultdict[int, CallReader](CallReader), 0
    for delta in deltas:
        reader = readers[delta.index]
        reasons = reader.reasons
        reader.feed(delta.text)
        count += delta.n if reasons or reader.reasons else 0
    return count
