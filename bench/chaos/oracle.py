"""Expected text of the simulated engine, written anew from its documentation: the kit does not ask the product.

Token i of a prompt is one of 32 words, chosen by the CRC-32 of the prompt and of i in decimal, with i behind it; every
token but the first begins with a space. A chat of one user turn stands for the prompt `user: TEXT`. With the setting
`sim.authors` four capital letters follow: they name the run of an engine that gave the token (its author).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

WORDS = (
    "amber", "brook", "cedar", "delta", "ember", "fjord", "grove", "haven",
    "inlet", "jetty", "kelp", "lagoon", "mill", "north", "ocean", "pier",
    "quarry", "river", "sluice", "tide", "upland", "valve", "weir", "xylem",
    "yarrow", "zephyr", "basin", "canal", "drift", "eddy", "ford", "gate",
)  # fmt: skip

TOKEN = re.compile(r"( ?)([a-z]+)([0-9]+)([A-Z]{4})?")


class Token(NamedTuple):
    """One token of a text. `number` is -1 for text that is no token."""

    number: int
    author: str
    text: str


def chat(text: str) -> str:
    """The prompt that a chat of one user turn stands for."""
    return f"user: {text}"


def plain(prompt: str, index: int) -> str:
    """Token `index` (from 0) without its author."""
    word = WORDS[zlib.crc32(f"{prompt}{index}".encode()) % len(WORDS)]
    return f" {word}{index}" if index else f"{word}{index}"


def prompt_tokens(prompt: str) -> int:
    """What a prompt counts for: a token for each four characters begun and ended, and one at least."""
    return max(1, len(prompt) // 4)


def tokens(texts: Iterable[str]) -> Iterator[Token]:
    """The tokens of texts, each text with whole tokens; a text with anything else in it is one token of number -1."""
    for text in texts:
        found = list(TOKEN.finditer(text))
        if "".join(match[0] for match in found) != text:
            yield Token(-1, "", text)
            continue
        for match in found:
            yield Token(int(match[3]), match[4] or "", match[0])


def is_right(prompt: str, token: Token) -> bool:
    """Whether the engine may say this token where it says it."""
    return token.number >= 0 and token.text == plain(prompt, token.number) + token.author
