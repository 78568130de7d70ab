"""Log-probabilities in OpenAI's two shapes: one object per token for chats, four columns for completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streaming.jobs.frames import Logprob

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's own stand-in."""


def chat_logprobs(logprobs: Iterable[Logprob]) -> dict[str, Any]:
    content = [
        {**_token(each.token, each.logprob), "top_logprobs": [_token(token, value) for token, value in each.top]}
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def _token(token: str, logprob: float) -> dict[str, Any]:
    """A token that is only part of a character has no bytes that could be told from its text."""
    data = None if "\ufffd" in token else list(token.encode())
    return {"token": token, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": data}


def text_logprobs(logprobs: Iterable[Logprob], offset: int) -> dict[str, Any]:
    """`offset` counts the characters of this choice before these tokens."""
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in logprobs:
        columns["tokens"].append(each.token)
        columns["token_logprobs"].append(max(each.logprob, LOWEST_LOGPROB))
        columns["top_logprobs"].append({token: max(value, LOWEST_LOGPROB) for token, value in each.top})
        columns["text_offset"].append(offset)
        offset += len(each.token)
    return columns
