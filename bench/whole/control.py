"""`python -m bench.whole.control PORT SETTINGS`: the simulated engine behind a bare socket server.

It answers completions in one piece, and nothing can deliver them sooner: when the last token comes, the texts are
joined, encoded and written. The answer's header `X-Ended` says when that was.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import msgspec

from bench.gateway.engine import EngineConnection, serve
from penstock.engine import Piece

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Ended: %.6f\r\nContent-Length: %d\r\n\r\n%b"


class CompletionAsk(msgspec.Struct):
    """As much of a completion request as this server reads."""

    prompt: str | list[str]
    max_tokens: int
    n: int = 1

    @property
    def prompts(self) -> list[str]:
        """One for each choice, in the order of their indexes."""
        each = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [prompt for prompt in each for _ in range(self.n)]


class Choices:
    """The texts of one request; calls `done` behind the last piece of the last one."""

    def __init__(self, count: int, done: Callable[[bytes], None]) -> None:
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._running, self._done = count, done

    def take(self, index: int, piece: Piece) -> None:
        self._texts[index].append(piece.text)
        self._running -= piece.last
        if not self._running:
            ended = time.time()
            choices = [{"index": at, "text": "".join(text)} for at, text in enumerate(self._texts)]
            body = msgspec.json.encode({"choices": choices})
            self._done(ANSWER % (ended, len(body), body))


class ControlConnection(EngineConnection):
    """One client, one request after another."""

    def asked(self, method: bytes, path: bytes, body: bytes) -> None:
        asked = msgspec.json.decode(body, type=CompletionAsk)
        choices = Choices(len(asked.prompts), self._write)
        for index, prompt in enumerate(asked.prompts):
            self._tap.open(prompt, asked.max_tokens, partial(choices.take, index))


if __name__ == "__main__":
    serve(ControlConnection, *sys.argv[1:])
