"""Log-probability rendering in OpenAI's two formats: one object per token for chats, four columns for completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.engine import Logprob

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
    """Render a token. If it is only part of a character, its bytes cannot be derived from its text and are null."""
    data = None if "\ufffd" in token else list(token.encode())
    return {"token": token, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": data}


def text_logprobs(logprobs: Iterable[Logprob], offset: int) -> dict[str, Any]:
    """Render the columns; `offset` is the number of characters of this choice before these tokens."""
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in logprobs:
        columns["tokens"].append(each.token)
        columns["token_logprobs"].append(max(each.logprob, LOWEST_LOGPROB))
        columns["top_logprobs"].append({token: max(value, LOWEST_LOGPROB) for token, value in each.top})
        columns["text_offset"].append(offset)
        offset += len(each.token)
    return columns
