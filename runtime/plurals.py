"""Counts in words: a number with its noun in the right form."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: "1 job", "2 jobs"; `plural` if it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
