"""Length of the common prefix of two prompts, which a prefix cache need not compute again."""

from __future__ import annotations

from collections.abc import Sequence


def shared_length(one: Sequence[str | int], other: Sequence[str | int]) -> int:
    """Length of the common prefix of two prompts; a character of a text and a token id count as one each."""
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
    """Length of the common prefix of two texts, in characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def length(prompt: Sequence[str | int]) -> int:
    """Length of a prompt; a character of a text and a token id count as one each."""
    return sum(len(part) if isinstance(part, str) else 1 for part in prompt)
