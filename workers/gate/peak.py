"""Peak of KV use: the most tokens that running texts will hold at the same time until all of them have ended. Pure.

The formula of LightLLM's Past-Future scheduler. Every text generates one token in each step and releases its tokens
when it ends, so the use is highest just before some text ends. With the texts sorted by remaining tokens, the longest
first, the use before the i-th ends is `remaining_i * i + sum(held_j for j <= i)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Holding: TypeAlias = tuple[int, int]
"""(tokens that a text will still generate, tokens that it holds now: its prompt and what it has generated)."""

MAX_WORLDS = 5


def worlds(texts: int) -> int:
    """In how many drawn futures the peak is computed: fewer for many texts, whose errors cancel out."""
    return min(MAX_WORLDS, 200 // max(1, texts) + 1)


def future_peak(texts: Iterable[Holding]) -> int:
    """The peak in tokens; 0 without texts."""
    peak = held = 0
    for number, (remaining, tokens) in enumerate(sorted(texts, reverse=True), 1):
        held += tokens
        peak = max(peak, remaining * number + held)
    return peak


def headroom(texts: Iterable[Holding], remaining: int, capacity: int) -> int:
    """The most tokens that one more text, which generates `remaining`, may hold now so that the peak is at most
    `capacity`. Negative: by so many tokens the peak is too high even if it holds none.

    Every term of the peak from its own on contains what it holds, exactly once; the terms before do not.
    """
    before = after = held = number = 0
    placed = False
    for left, tokens in sorted(texts, reverse=True):
        if not placed and left < remaining:
            placed, number = True, number + 1
            after = remaining * number + held
        number += 1
        held += tokens
        term = left * number + held
        if placed:
            after = max(after, term)
        else:
            before = max(before, term)
    if not placed:
        after = remaining * (number + 1) + held
    return capacity - max(before, after) if before > capacity else capacity - after
