"""Upstream server of the fault rows, as a process of its own: `python -m bench.chaos.upstream_server PORT KIND`.

It generates the text of `oracle`, from its first token on or from where a request says that the answer has got to. Each
reply has an author of its own, so the judge sees which reply gave a token. KIND is what the server says that it is, and
so how an answer continues there: "vllm" by token ids, "ollama" by the beginning of an assistant's message.

POST /fault names what goes wrong with the next replies (UpstreamFault), and answers how often faults were met so far.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

import msgspec

from bench.chaos import oracle
from bench.http import STREAM, chunk

MODEL = "sim"
OWNERS = {"vllm": "vllm", "ollama": "library"}
STEP_S = 0.01
FIRST_ID = 1 << 21
"""Id of the first token of any answer; ids below are the characters of a prompt."""
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
JSON = b"HTTP/1.1 %d X\r\n%bContent-Length: %d\r\n\r\n%b"
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"
LINGER_NOT = struct.pack("ii", 1, 0)
"""A connection is then reset where it is closed."""

AT_START = frozenset({"429", "503", "no head", "reset at once", "nothing but [DONE]"})
"""Faults of a reply before its first token."""
WORDS = {
    "error after 200": b'data: {"error":{"message":"the engine died","type":"server_error","code":500}}\n\n' + DONE,
    "malformed chunk": b'data: {"id":"x","choices":[{"index":0,"delta":{"con\n\n' + DONE,
    "[DONE] alone": DONE,
    "finish reason abort": b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n' + DONE,
    "no finish reason": b"",
}
"""Faults in the middle of a reply, by what it says instead of its next token; then its body ends well."""
BREAKS = frozenset({"cut", "reset", "half-closed"})
"""Faults in the middle of a reply whose body does not end well."""
STALL = "stall"


class UpstreamFault(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong with so many of the next replies; of STALL, of so many of their tokens."""

    what: str = ""
    replies: int = 0
    seconds: float = 0.0
    """Of a silence, which comments interrupt; with status 429 what Retry-After says."""


class UpstreamServer:
    """Serves until the process is ended."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._fault = UpstreamFault()
        self._met = 0

    async def serve(self, port: int) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", port, backlog=1024)
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                await writer.drain()
        except (OSError, EOFError):
            pass  # the client left
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Returns whether the connection goes on."""
        head = await reader.readuntil(b"\r\n\r\n")
        path, length = head.split(b" ", 2)[1].decode(), LENGTH.search(head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        if path.endswith("/completions"):
            return await self._complete(reader, writer, msgspec.json.decode(body))
        page = msgspec.json.encode(self._page(path, body))
        writer.write(JSON % (200, b"", len(page), page))
        return True

    def _page(self, path: str, body: bytes) -> Mapping[str, Any]:
        if path == "/v1/models":
            return {"data": [{"id": MODEL, "owned_by": OWNERS[self._kind], "max_model_len": 8192}]}
        if path == "/tokenize":
            prompt, _ = _asked(msgspec.json.decode(body))
            return {"tokens": [ord(character) for character in prompt]}
        if path == "/fault":
            self._fault = msgspec.json.decode(body, type=UpstreamFault)
            return {"met": self._met}
        return {}

    def _meets(self, *whats: str) -> UpstreamFault | None:
        """The fault that this reply meets now, if it is one of these."""
        fault = self._fault
        if not fault.replies or fault.what not in whats:
            return None
        self._fault = msgspec.structs.replace(fault, replies=fault.replies - 1)
        self._met += 1
        return fault

    async def _complete(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: Mapping[str, Any]
    ) -> bool:
        if fault := self._meets(*AT_START):
            return await _refuse(writer, fault)
        prompt, begun = _asked(body)
        author = "".join(random.choices(ascii_uppercase, k=4))  # noqa: S311 - a name
        chunks = _Reply(prompt, begun, author, chat="messages" in body, ids=bool(body.get("return_token_ids")))
        writer.write(STREAM)
        writer.write(chunk(b": hello\n\n"))
        for number in range(begun, begun + body["max_tokens"]):
            await asyncio.sleep(STEP_S)
            if number == begun:
                pass  # a fault comes after a token: what breaks without one may be the request's own fault
            elif (fault := self._meets(STALL)) is not None:
                writer.write(chunk(b": waiting\n\n"))
                await asyncio.sleep(fault.seconds)
            elif (fault := self._meets(*WORDS, *BREAKS)) is not None:
                return await _break(reader, writer, fault.what)
            writer.write(chunk(chunks.token(number)))
            await writer.drain()
        writer.write(chunk(chunks.finish()))
        writer.write(chunk(DONE))
        writer.write(LAST)
        return True


class _Reply:
    """Events of one reply."""

    def __init__(self, prompt: str, begun: int, author: str, *, chat: bool, ids: bool) -> None:
        self._prompt, self._begun, self._author, self._chat, self._ids = prompt, begun, author, chat, ids
        self._given = 0

    def token(self, number: int) -> bytes:
        self._given += 1
        return self._event(oracle.plain(self._prompt, number) + self._author, number, None)

    def finish(self) -> bytes:
        return self._event("", -1, "length")

    def _event(self, text: str, number: int, finish: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if self._chat else {"text": text}
        if self._ids and number >= 0:
            choice["token_ids"] = [FIRST_ID + number]
        prompt = oracle.prompt_tokens(self._prompt) + self._begun
        usage = {"prompt_tokens": prompt, "completion_tokens": self._given}
        return b"data: " + msgspec.json.encode({"id": "x", "choices": [choice], "usage": usage}) + b"\n\n"


def _asked(body: Mapping[str, Any]) -> tuple[str, int]:
    """The prompt of a request, and how many tokens of its answer there are."""
    if "messages" in body:
        first, *others = body["messages"]
        return oracle.chat(first["content"]), sum(1 for _ in oracle.tokens([turn["content"] for turn in others]))
    ids: Sequence[int] = body["prompt"]
    return "".join(chr(each) for each in ids if each < FIRST_ID), sum(each >= FIRST_ID for each in ids)


async def _refuse(writer: asyncio.StreamWriter, fault: UpstreamFault) -> bool:
    """A reply without a token. Returns whether the connection goes on."""
    if fault.what == "reset at once":
        return _reset(writer)
    if fault.what == "no head":
        await asyncio.sleep(fault.seconds)
        return False
    if fault.what == "nothing but [DONE]":
        writer.write(STREAM)
        writer.write(chunk(DONE))
        writer.write(LAST)
        return True
    body = b'{"error":{"message":"no room"}}'
    after = b"Retry-After: %d\r\n" % fault.seconds if fault.seconds else b""
    writer.write(JSON % (int(fault.what), after, len(body), body))
    return True


async def _break(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: str) -> bool:
    """The end of a reply in its middle. Returns whether the connection goes on."""
    if what == "reset":
        return _reset(writer)
    if what == "half-closed":
        writer.write_eof()
        await reader.read()  # it listens on, until the client closes
        return False
    if what == "cut":
        writer.write(b"ff\r\ndata: {")  # a chunk that does not come
        return False
    if words := WORDS[what]:
        writer.write(chunk(words))
    writer.write(LAST)
    return True


def _reset(writer: asyncio.StreamWriter) -> bool:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
    writer.transport.abort()
    return False


if __name__ == "__main__":
    asyncio.run(UpstreamServer(sys.argv[2]).serve(int(sys.argv[1])))
