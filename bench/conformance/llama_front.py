"""Front for the tests of llama.cpp's server: its own addresses and names become those of OpenAI's API, before Penstock.

That server has one model and answers whatever name a request has, also without `/v1`; its own `/completion` has other
names for what `/v1/completions` does. Status, text, counts, errors, headers and the order of a stream are Penstock's.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from bench.conformance.served import serving

TIMEOUT_S = 300.0
LIMIT = 64
"""Tokens of an answer whose request names no limit: with this one those tests start their server."""

BARE = frozenset(("/chat/completions", "/responses", "/embeddings", "/rerank", "/models"))
"""Addresses that their server also has without `/v1`."""
OWN_COMPLETIONS = frozenset(("/completion", "/completions"))
TOKENS = frozenset(("/tokenize", "/detokenize"))
SENT_ON = ("authorization", "x-api-key", "origin", "access-control-request-method", "access-control-request-headers")
LEFT_OUT = frozenset(("content-length", "content-encoding", "transfer-encoding", "connection", "date", "server"))


@dataclass(frozen=True, slots=True)
class LlamaFront:
    """One server behind it. `model` is put into every body; `key`, if any, is the caller's where it sends none."""

    api: httpx2.AsyncClient
    model: str
    key: str = ""

    async def __call__(self, request: Request) -> Response:
        """Answer any request of the tests."""
        path = request.url.path
        asked = self.api.build_request(
            request.method, address(path), headers=self._headers(request),
            content=body_for(path, await request.body(), self.model),
        )  # fmt: skip
        answer = await self.api.send(asked, stream=True)
        headers = {name: value for name, value in answer.headers.items() if name not in LEFT_OUT}
        if headers.get("content-type", "").startswith("text/event-stream"):
            return StreamingResponse(_events(answer, path in OWN_COMPLETIONS), answer.status_code, headers)
        data = await answer.aread()
        await answer.aclose()
        return Response(answer_to(path, answer.status_code, data), answer.status_code, headers)

    def _headers(self, request: Request) -> dict[str, str]:
        found = {name: request.headers[name] for name in SENT_ON if name in request.headers}
        if self.key:
            found.setdefault("authorization", f"Bearer {self.key}")
        return found | {"content-type": "application/json"}


def address(path: str) -> str:
    """Where Penstock has what their server has at `path`."""
    if path in OWN_COMPLETIONS:
        return "/v1/completions"
    return f"/v1{path}" if path in BARE else path


def body_for(path: str, data: bytes, model: str) -> bytes:
    """A body in the words of OpenAI's API; one that is no object goes on as it is."""
    try:
        body = json.loads(data)
    except ValueError:
        return data
    if not isinstance(body, dict):
        return data
    body["model"] = model
    if path in OWN_COMPLETIONS:
        _rename(body, {"n_predict": "max_tokens"})
        if body.setdefault("max_tokens", LIMIT) < 0:
            del body["max_tokens"]
        if isinstance(body.get("logit_bias"), list):
            body["logit_bias"] = dict(body["logit_bias"])
    elif path in TOKENS:
        _rename(body, {"content": "prompt", "add_special": "add_special_tokens"})
    return json.dumps(body).encode()


def answer_to(path: str, status: int, data: bytes) -> bytes:
    """A whole answer in the words of their server; an error goes on as it is."""
    if status != 200:
        return data
    if path in OWN_COMPLETIONS:
        texts = [_own(each) for each in json.loads(data)["choices"]]
        return json.dumps(texts[0] if len(texts) == 1 else texts).encode()
    if path in TOKENS:
        document = json.loads(data)
        _rename(document, {"prompt": "content"})
        return json.dumps(document).encode()
    return _with_build(data)


def _rename(document: dict[str, Any], names: dict[str, str]) -> None:
    for name, other in names.items():
        if name in document:
            document[other] = document.pop(name)


def _own(choice: dict[str, Any]) -> dict[str, Any]:
    return {"content": choice["text"], "stop": choice["finish_reason"] is not None}


def _with_build(data: bytes) -> bytes:
    """Their fingerprints begin with the `b` of a build."""
    return data.replace(b'"system_fingerprint":"fp_', b'"system_fingerprint":"b')


async def _events(answer: httpx2.Response, own: bool) -> AsyncIterator[bytes]:
    try:
        async for line in answer.aiter_lines():
            if own and line.startswith("data: {"):
                line = f"data: {json.dumps(_own(json.loads(line[6:])['choices'][0]))}"  # noqa: PLW2901
            yield _with_build(f"{line}\n".encode())
    finally:
        await answer.aclose()


@contextmanager
def serving_llama(url: str, model: str, key: str = "") -> Iterator[int]:
    """Serve the front of a Penstock until the end of the context; its port. Raises Died."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S) as api:
            app.state.front = LlamaFront(api, model, key)
            yield

    async def answer(request: Request) -> Response:
        response: Response = await request.app.state.front(request)
        return response

    methods = ["GET", "POST", "DELETE", "OPTIONS"]
    with serving(Starlette(routes=[Route("/{path:path}", answer, methods=methods)], lifespan=lifespan)) as port:
        yield port
