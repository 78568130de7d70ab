"""Tokenizer: asks llama.cpp's HTTP listener for the token ids of a prompt, their number, or the text of ids.

The library itself has no call for that. The engine counts only when it must know before a slot takes the prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""For the whole reply. Counting takes up to 7 s per megabyte (of digits, measured on one core), in a thread of
llama.cpp, which goes on when nobody waits any more."""
MIN_TOLD_BYTES, MAX_TOLD_BYTES, TOLD_BYTES_PER_TOKEN = 256 << 10, 1 << 20, 8
"""Of a text whose token ids are told: enough for any text that fits into the context, between the first two."""
ADDED_TOKENS = 2
"""The begin and end tokens that a model's tokenizer may add to a text."""


def max_tokens_of(prompt: Sequence[str | int]) -> int:
    """Upper bound on the prompt's tokens: each token of a text stands for at least one byte."""
    return ADDED_TOKENS + sum(len(part.encode()) + 1 if isinstance(part, str) else 1 for part in prompt)


def max_told_bytes(context: int) -> int:
    """Bytes of a text whose token ids are told, for a model with a context of so many tokens."""
    return min(MAX_TOLD_BYTES, max(MIN_TOLD_BYTES, TOLD_BYTES_PER_TOKEN * context))


class TokenizerFailed(Exception):
    """Raised when llama.cpp's listener gave no usable reply."""


class Tokenizer:
    """Client of llama.cpp's listener: its Unix socket and its API key."""

    def __init__(self, socket: Path, key: str) -> None:
        self.socket, self.key = socket, key
        # A connection that stays open would hold one of llama.cpp's threads.
        transport = httpx2.AsyncHTTPTransport(
            uds=str(socket), verify=False, limits=httpx2.Limits(max_keepalive_connections=0)
        )
        self._client = httpx2.AsyncClient(
            transport=transport, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def count(self, prompt: Sequence[str | int]) -> int | None:
        """Count the tokens of a prompt of texts and ids, as a completion does. Returns None on an error: the prompt is
        then counted once a slot has taken it."""
        try:
            return len(await self.ids(prompt))
        except TokenizerFailed as error:
            log.warning("llama.cpp does not count tokens: %s", error)
            return None

    async def ids(self, prompt: Sequence[str | int], *, special: bool = True) -> list[int]:
        """The token ids of a prompt of texts and ids. `special`: with those that a completion has beside the text.
        Raises TokenizerFailed."""
        content = prompt[0] if len(prompt) == 1 else list(prompt)
        if isinstance(content, int):
            return [content]
        body = {"content": content, "add_special": special, "parse_special": True}
        return [int(each) for each in await self._ask("tokenize", body, "tokens")]

    async def text(self, ids: Sequence[int]) -> str:
        """The text of token ids. Raises TokenizerFailed."""
        return str(await self._ask("detokenize", {"tokens": list(ids)}, "content"))

    async def _ask(self, path: str, body: dict[str, Any], field: str) -> Any:
        """Raises TokenizerFailed."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._client.post(f"http://localhost/{path}", json=body)
            return answer.json()[field]
        except (httpx2.HTTPError, TimeoutError, ValueError, KeyError) as error:
            raise TokenizerFailed(f"{type(error).__name__} {error}") from error
