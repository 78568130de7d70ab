"""Common prefixes of prompts: how much of one was computed before for another."""

from __future__ import annotations

from collections.abc import Sequence


def shared_length(one: Sequence[str | int], other: Sequence[str | int]) -> int:
    """How much two prompts have in common from their beginning: characters of texts and ids, counted alike."""
    total = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine == theirs:
            total += length((mine,))
            continue
        if isinstance(mine, str) and isinstance(theirs, str):
            total += shared_characters(mine, theirs)
        break
    return total


def shared_characters(one: str, other: str) -> int:
    """The length of the beginning that two texts have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def length(prompt: Sequence[str | int]) -> int:
    """Characters of texts and ids, counted alike."""
    return sum(len(part) if isinstance(part, str) else 1 for part in prompt)
