"""Words of the GPU server: one word is one token, there and back, so that a text continues exactly where it was cut.

A word that is a number below the size of the vocabulary is that token, as the server writes it; any other word is the
token of its checksum.
"""

from __future__ import annotations

from zlib import crc32


def tokens_of(text: str, vocab: int) -> list[int]:
    """The tokens of a text."""
    return [_token(word, vocab) for word in text.split()]


def text_of(token: int) -> str:
    """A token as it stands in an answer."""
    return f" {token}"


def _token(word: str, vocab: int) -> int:
    if word.isascii() and word.isdigit() and len(word) <= len(str(vocab)) and int(word) < vocab:
        return int(word)
    return crc32(word.encode()) % vocab
