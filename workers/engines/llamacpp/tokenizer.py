"""Token counter: asks llama.cpp's HTTP listener how many tokens a prompt has.

The library itself has no call for that. The engine asks only when it must know before a slot takes the prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""For one reply; counting takes a few milliseconds per megabyte."""
ADDED_TOKENS = 2
"""The begin and end tokens that a model's tokenizer may add to a text."""


def max_tokens_of(prompt: Sequence[str | int]) -> int:
    """Upper bound on the prompt's tokens: each token of a text stands for at least one byte."""
    return ADDED_TOKENS + sum(len(part.encode()) + 1 if isinstance(part, str) else 1 for part in prompt)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Client of llama.cpp's listener: its Unix socket and its API key."""

    socket: Path
    key: str

    async def count(self, prompt: Sequence[str | int]) -> int | None:
        """Count the tokens of a prompt of texts and ids, as a completion does. Returns None on an error: the prompt is
        then counted once a slot has taken it."""
        content = prompt[0] if len(prompt) == 1 else list(prompt)
        if isinstance(content, int):
            return 1
        body = {"content": content, "add_special": True, "parse_special": True}
        transport = httpx2.AsyncHTTPTransport(uds=str(self.socket), verify=False)
        headers = {"Authorization": f"Bearer {self.key}"}
        try:
            async with httpx2.AsyncClient(transport=transport, headers=headers, timeout=TIMEOUT_S) as client:
                answer = await client.post("http://localhost/tokenize", json=body)
            return len(answer.json()["tokens"])
        except (httpx2.HTTPError, ValueError, KeyError) as error:
            log.warning("llama.cpp does not count tokens: %s %s", type(error).__name__, error)
            return None
