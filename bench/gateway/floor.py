"""`python -m bench.gateway.floor PORT SETTINGS`: the engine behind a bare socket server that speaks just enough HTTP.

No gateway can be cheaper: a token is one string put between two constants and one write. It checks nothing, keeps
nothing and answers one request at a time per connection. LiteLLM, the SGLang router and Penstock's engine `upstream`
use it as their engine server.
"""

from __future__ import annotations

import sys
import time

import msgspec

from bench.gateway.engine import MODEL, EngineConnection, serve
from bench.http import STREAM, chunk
from penstock.engine import Piece

DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"

OPENING = b'data: {"id":"chatcmpl-%d","object":"chat.completion.chunk","created":%d,"model":"%b","choices":[{"index":0,'
ROLE = b'"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'

PAGES = {
    b"/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}]},
    b"/get_model_info": {"model_path": MODEL, "is_generation": True},
    b"/model_info": {"model_path": MODEL, "is_generation": True},
    b"/get_server_info": {"model_path": MODEL, "served_model_name": MODEL},
    b"/server_info": {"model_path": MODEL, "served_model_name": MODEL},
}
"""What routers ask an engine server for; every other GET but LOADS is answered with {}."""
LOADS = b"/v1/loads"
"""Where an SGLang server says how many requests it runs at once."""


class _Message(msgspec.Struct):
    content: str


class _FloorRequest(msgspec.Struct):
    messages: list[_Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Its newer name, which the SGLang router puts in its place."""

    @property
    def tokens(self) -> int:
        return self.max_tokens or self.max_completion_tokens or 128


_REQUEST = msgspec.json.Decoder(_FloorRequest)


class FloorConnection(EngineConnection):
    """One client."""

    _running = ""

    def connection_lost(self, exc: Exception | None) -> None:
        self._tap.close(self._running)

    def asked(self, method: bytes, path: bytes, body: bytes) -> None:
        if method == b"POST":
            self._generate(body)
        else:
            self._page(path)

    def _generate(self, body: bytes) -> None:
        request = _REQUEST.decode(body)
        self._opening = OPENING % (id(request), int(time.time()), MODEL.encode())
        self._write(STREAM + chunk(self._opening + ROLE))
        self._running = self._tap.open(request.messages[-1].content, request.tokens, self._take)

    def _take(self, piece: Piece) -> None:
        text = b'%b"delta":{"content":"%b"},"finish_reason":null}]}\n\n' % (self._opening, piece.text.encode())
        if piece.last:
            end = b'%b"delta":{},"finish_reason":"%b"}]}\n\n' % (self._opening, piece.finish.encode())
            self._write(chunk(text) + chunk(end) + chunk(DONE) + LAST)
        else:
            self._write(chunk(text))

    def _page(self, path: bytes) -> None:
        loads = {"loads": [{"max_running_requests": self._tap.slots}]}
        page = msgspec.json.encode(loads if path == LOADS else PAGES.get(path, {}))
        self._write(PAGE % len(page) + page)


if __name__ == "__main__":
    serve(FloorConnection, *sys.argv[1:])
