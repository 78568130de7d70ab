"""`python -m bench.gpu.server PORT MODEL DEVICE SLOTS CONTEXT`: a step loop behind OpenAI's API.

It batches in flight, each step in the least batch that holds it, and answers streamed, greedy completions of exactly
`max_tokens` tokens, with random weights. MODEL: a name of the planner's, or `tiny`; DEVICE: `cuda` or `cpu`.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from zlib import crc32

import msgspec

from bench.gpu.slots import SlotTable, SlotText
from bench.http import HOST
from bench.served_connection import ServedConnection
from planner.facts import catalogue
from planner.facts.model import ModelShape

PROMPT_ROWS = 512
"""Prompt tokens of a step."""
TINY = {"layers": 2, "hidden": 128, "heads": 2, "kv_heads": 2, "head_dim": 64, "ffn": 512, "vocab": 4000}
SWITCH_S = 0.0002
"""How long a thread may keep the interpreter from the one that starts steps."""

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE, LAST = b"data: [DONE]\n\n", b"0\r\n\r\n"
PAGE = b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
CHAT, TEXT = b"/v1/chat/completions", b"/v1/completions"

Took = Callable[[int, bool], None]
"""Called with each token of a text and whether it is the last, on the event loop."""
Told = tuple[Took, int, bool]


def shape_of(name: str) -> ModelShape:
    """A model of the planner's, or `tiny`. Raises PlanError."""
    if name == "tiny":
        return msgspec.structs.replace(catalogue.model("opt-125m"), name=name, **TINY)
    return catalogue.model(name)


def row_counts(slots: int) -> list[int]:
    """Sizes of a step: powers of two for the texts that generate alone, and multiples of the slots with prompts."""
    alone = [1 << power for power in range(slots.bit_length()) if 1 << power < slots]
    return [*alone, *range(slots, slots + PROMPT_ROWS + 1, 64)]


def tokens_of(text: str, vocab: int) -> list[int]:
    """The tokens of a text. One word is one token, there and back, so that a text continues exactly where it was cut: a
    number below the size of the vocabulary is that token, and any other word the token of its checksum."""
    return [_token(word, vocab) for word in text.split()]


def text_of(token: int) -> str:
    """A token as it stands in an answer."""
    return f" {token}"


def _token(word: str, vocab: int) -> int:
    if word.isascii() and word.isdigit() and len(word) <= len(str(vocab)) and int(word) < vocab:
        return int(word)
    return crc32(word.encode()) % vocab


class StepLoop(threading.Thread):
    """Runs the steps. `run` of `steps` takes rows and returns the token behind each."""

    def __init__(self, table: SlotTable, steps: Any, tell: Callable[[Iterable[Told]], object]) -> None:
        super().__init__(name="steps", daemon=True)
        self._table, self._steps, self._tell = table, steps, tell
        self._coming: queue.SimpleQueue[tuple[SlotText, Took] | None] = queue.SimpleQueue()
        self._takers: dict[SlotText, Took] = {}

    def submit(self, text: SlotText, took: Took) -> None:
        """From any thread."""
        self._coming.put((text, took))

    def end(self) -> None:
        """The thread ends after the step under way. From any thread."""
        self._coming.put(None)

    def run(self) -> None:
        is_idle = True
        while self._took_in(is_idle):
            step = self._table.next_step()
            is_idle = step is None
            if step is None:
                self._takers.clear()  # whoever is left has gone
                continue
            made = self._table.took(step, self._steps.run(step.tokens, step.slots, step.places))
            self._tell([(self._takers.pop(text) if last else self._takers[text], token, last)
                        for text, token, last in made])  # fmt: skip

    def _took_in(self, is_idle: bool) -> bool:
        """Take what has come; if the table is idle, wait for it. False: it is the end."""
        try:
            while (coming := self._coming.get(block=is_idle)) is not None:
                text, took = coming
                self._takers[text] = took
                self._table.submit(text)
                is_idle = False
        except queue.Empty:
            return True
        return False


class _AskedMessage(msgspec.Struct):
    content: str


class _AskedOptions(msgspec.Struct):
    include_usage: bool = False


class _Asked(msgspec.Struct):
    """A completion's or a chat's body; other fields are not looked at."""

    prompt: str | None = None
    messages: list[_AskedMessage] = []
    max_tokens: int = 16
    stream: bool = False
    stream_options: _AskedOptions | None = None


_ASKED = msgspec.json.Decoder(_Asked)


class GpuConnection(ServedConnection):
    """One client."""

    def __init__(self, loop: StepLoop, shape: ModelShape, context: int) -> None:
        super().__init__()
        self._loop, self._shape, self._context = loop, shape, context
        self._text: SlotText | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._text is not None:
            self._text.has_left = True

    def asked(self, method: bytes, path: bytes, body: bytes) -> None:
        if method == b"POST" and path in (CHAT, TEXT):
            self._generate(body, is_chat=path == CHAT)
        elif path == b"/health":
            self._page({"status": "ok"})
        elif path == b"/v1/models":
            row = {"id": self._shape.name, "object": "model", "created": 0, "owned_by": "bench"}
            self._page({"object": "list", "data": [row | {"max_model_len": self._context}]})
        else:
            self._refuse(404, b"Not Found", f"no {path.decode(errors='replace')} here")

    def _generate(self, body: bytes, *, is_chat: bool) -> None:
        try:
            asked = _ASKED.decode(body)
        except msgspec.DecodeError as error:
            return self._refuse(400, b"Bad Request", str(error))
        said = " ".join(each.content for each in asked.messages) if is_chat else asked.prompt or ""
        prompt = tokens_of(said, self._shape.vocab)
        if not asked.stream or not prompt or asked.max_tokens < 1 or len(prompt) + asked.max_tokens > self._context:
            why = f"expected stream, and from 1 + 1 to {self._context} tokens, got {len(prompt)} + {asked.max_tokens}"
            return self._refuse(400, b"Bad Request", why)
        text = self._text = SlotText(prompt, asked.max_tokens)
        kind, name = ("chat.completion.chunk", "chatcmpl") if is_chat else ("text_completion", "cmpl")
        opening = f'data: {{"id":"{name}-{id(text)}","object":"{kind}","created":{int(time.time())},"model":'
        opening += f'"{self._shape.name}","choices":['
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        self._write(STREAM)
        self._loop.submit(text, partial(self._take, text, opening.encode(), is_chat, with_usage))
        return None

    def _take(self, text: SlotText, opening: bytes, is_chat: bool, with_usage: bool, token: int, last: bool) -> None:
        if text.has_left:
            return None
        word = (b'"delta":{"content":"%b"}' if is_chat else b'"text":"%b"') % text_of(token).encode()
        finish = b'"length"' if last else b"null"
        data = b'%b{"index":0,%b,"finish_reason":%b}]}\n\n' % (opening, word, finish)
        if not last:
            return self._write(_chunk(data))
        self._text = None
        if with_usage:
            counts = (len(text.prompt), text.limit, len(text.prompt) + text.limit)
            usage = b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % counts
            data += b"%b],%b}\n\n" % (opening, usage)
        return self._write(_chunk(data + DONE) + LAST)

    def _page(self, page: object) -> None:
        data = msgspec.json.encode(page)
        self._write(PAGE % (200, b"OK", len(data), data))

    def _refuse(self, status: int, reason: bytes, why: str) -> None:
        data = msgspec.json.encode({"error": {"message": why, "type": "invalid_request_error"}})
        self._write(PAGE % (status, reason, len(data), data))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _told(batch: Iterable[Told]) -> None:
    for took, token, last in batch:
        took(token, last)


async def serve(port: int, shape: ModelShape, context: int, table: SlotTable, steps: Any) -> None:
    """Until the process is ended."""
    running = asyncio.get_running_loop()
    loop = StepLoop(table, steps, lambda batch: running.call_soon_threadsafe(_told, batch))
    loop.start()
    try:
        listener = await running.create_server(lambda: GpuConnection(loop, shape, context), HOST, port, backlog=2048)
        async with listener:
            await asyncio.Event().wait()
    finally:
        loop.end()


def _end_process(failure: threading.ExceptHookArgs) -> None:
    """A step that fails ends the server: it would answer nobody any more."""
    threading.__excepthook__(failure)
    sys.stderr.flush()
    os._exit(1)


def main(words: list[str]) -> None:
    """As the module says. The port opens once the engine is warm."""
    import uvloop  # noqa: PLC0415 - not on every system

    from bench.gpu.slotted import SlotSteps, SlottedDecoder  # noqa: PLC0415 - torch is not a dependency

    port, name, device, slots, context = words
    shape, size = shape_of(name), int(slots)
    counts = row_counts(size)
    steps = SlotSteps(SlottedDecoder(shape, size, int(context), device=device), counts)
    table = SlotTable(size, counts[-1], PROMPT_ROWS)
    sys.setswitchinterval(SWITCH_S)
    threading.excepthook = _end_process
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(port), shape, int(context), table, steps))


if __name__ == "__main__":
    main(sys.argv[1:])
