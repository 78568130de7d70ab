"""`python -m bench.whole.control PORT SETTINGS`: the simulated engine behind a bare socket server.

It answers completions in one piece, and nothing can deliver them sooner: when the last token comes, the texts are
joined, encoded and written. The answer's header `X-Ended` says when that was.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import msgspec
import uvloop

from bench.gateway.engine import Tap, forever, settings_from
from workers.engines.base import Piece

HEAD_END = b"\r\n\r\n"
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


class ControlConnection(asyncio.Protocol):
    """One client, one request after another."""

    def __init__(self, tap: Tap) -> None:
        self._tap, self._received = tap, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast(asyncio.Transport, transport).write

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(HEAD_END)
        if not found or len(body) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            return
        self._received = b""
        asked = msgspec.json.decode(body, type=CompletionAsk)
        choices = Choices(len(asked.prompts), self._write)
        for index, prompt in enumerate(asked.prompts):
            self._tap.open(prompt, asked.max_tokens, partial(choices.take, index))


async def serve(port: int, tap: Tap) -> None:
    """Until the process is ended."""
    await tap.start()
    await asyncio.get_running_loop().create_server(lambda: ControlConnection(tap), "127.0.0.1", port)
    await forever()


def main(argv: Sequence[str]) -> int:
    """Serve."""
    port, settings = argv
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(port), Tap(settings_from(settings))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
