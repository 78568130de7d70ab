"""How many tokens a prompt has, as llama.cpp counts them.

The library has no call for it; its listener has. Only what must be known before a slot takes a prompt is asked here.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""For an answer; counting takes a few milliseconds for each megabyte."""
ADDED_TOKENS = 2
"""A beginning and an end, which the tokenizer of a model may add to a text."""


def most_tokens(prompt: Sequence[str | int]) -> int:
    """No prompt has more: a token of a text stands for a byte at least."""
    return ADDED_TOKENS + sum(len(part.encode()) + 1 if isinstance(part, str) else 1 for part in prompt)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Where llama.cpp listens, and the key that it asks for."""

    socket: Path
    key: str

    async def count(self, prompt: Sequence[str | int]) -> int | None:
        """Tokens of a prompt of texts and ids, as a completion counts them; None if there is no answer: the prompt is
        then counted when a slot has taken it."""
        content = prompt[0] if len(prompt) == 1 else list(prompt)
        if isinstance(content, int):
            return 1
        body = json.dumps({"content": content, "add_special": True, "parse_special": True}).encode()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._posted("/tokenize", body)
            return len(json.loads(answer)["tokens"])
        except (OSError, TimeoutError, ValueError, KeyError) as error:
            log.warning("llama.cpp does not count tokens: %s %s", type(error).__name__, error)
            return None

    async def _posted(self, path: str, body: bytes) -> bytes:
        """The body of the answer. Raises OSError."""
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {self.key}",
            "Content-Type: application/json",
            "Connection: close",
            f"Content-Length: {len(body)}",
        ]
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            await writer.drain()
            return (await reader.read()).partition(b"\r\n\r\n")[2]
        finally:
            writer.close()
