"""Log-probability rendering in OpenAI's two formats: one object per token for chats, four columns for completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.engine import Logprob, token_bytes

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express; OpenAI uses the same value."""


def chat_logprobs(logprobs: Iterable[Logprob]) -> dict[str, Any]:
    return {"content": token_logprobs(logprobs), "refusal": None}


def token_logprobs(logprobs: Iterable[Logprob]) -> list[dict[str, Any]]:
    """Render one object per token, as chats and responses have them."""
    return [
        {**_token(each.token, each.logprob), "top_logprobs": [_token(token, value) for token, value in each.top]}
        for each in logprobs
    ]


def _token(token: str, logprob: float) -> dict[str, Any]:
    """Render a token. Its bytes are null if the engine gave only U+FFFD for a part of a character."""
    data = None if "\ufffd" in token else list(token_bytes(token))
    return {"token": token, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": data}


def characters(logprobs: Iterable[Logprob]) -> int:
    """Characters that begin in these tokens."""
    return sum([_begun(each.token) for each in logprobs])


def _begun(token: str) -> int:
    return sum([each & 0xC0 != 0x80 for each in token_bytes(token)]) if token.startswith("bytes:") else len(token)


def text_logprobs(logprobs: Iterable[Logprob], offset: int) -> dict[str, Any]:
    """Render the columns; `offset` is the number of characters of this choice before these tokens."""
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in logprobs:
        columns["tokens"].append(each.token)
        columns["token_logprobs"].append(max(each.logprob, LOWEST_LOGPROB))
        columns["top_logprobs"].append({token: max(value, LOWEST_LOGPROB) for token, value in each.top})
        columns["text_offset"].append(offset)
        offset += _begun(each.token)
    return columns
