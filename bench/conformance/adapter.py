"""Adapter for suites of the Durable Streams protocol: appends become deltas of jobs, reads go to the API unchanged.

A suite writes what it reads. The adapter writes with a worker of its own (stream_writer.py), and passes each read on to
`/v1/jobs/{id}/stream`; of the answer it changes the messages alone, which are events of a job, back into what was
appended. Status, offsets, cursors, ETags and caching headers are Penstock's.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from bench.conformance.stream_writer import LEASE_MS, StreamWriter, WrittenStream
from bench.ports import free_port
from bench.processes import Died
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

API_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
START_INTERVAL_S = 0.02

PASSED = (
    *("stream-next-offset", "stream-up-to-date", "stream-closed", "stream-cursor", "etag", "cache-control"),
    *("x-content-type-options", "cross-origin-resource-policy"),
)
"""Headers of a read that go to the suite as they are."""
JSON = "application/json"
SAFE = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "cross-origin"}


class StreamAdapter:
    """ASGI endpoint of every path. `api`: a client of the API."""

    def __init__(self, writer: StreamWriter, api: httpx2.AsyncClient) -> None:
        self._writer, self._api = writer, api
        self._streams: dict[str, WrittenStream] = {}

    async def __call__(self, request: Request) -> Response:
        """Answer any request of a suite."""
        stream = self._streams.get(request.url.path)
        if request.method == "PUT":
            return await self._create(request, stream)
        if stream is None:
            return Response("no such stream", 404, SAFE)
        if request.method == "POST":
            return await self._append(request, stream)
        if request.method == "DELETE":
            del self._streams[request.url.path]
            return Response(status_code=204, headers=SAFE)
        return await self._read(request, stream)

    async def _create(self, request: Request, known: WrittenStream | None) -> Response:
        kind = request.headers.get("content-type", "application/octet-stream")
        if known is not None and _plain(known.kind) != _plain(kind):
            return Response("another content type", 409, SAFE)
        if known is None:
            texts = _texts(await request.body(), kind, empty=True)
            if texts is None:
                return Response("not JSON", 400, SAFE)
            stream = self._streams[request.url.path] = await self._writer.open(kind)
            if texts:
                await self._writer.append(stream, texts)
            if request.headers.get("stream-closed", "").lower() == "true":
                await self._writer.close(stream)
        stream = self._streams[request.url.path]
        headers = SAFE | {"Location": str(request.url), "Content-Type": stream.kind, **await self._tail(stream)}
        return Response(status_code=201 if known is None else 200, headers=headers)

    async def _append(self, request: Request, stream: WrittenStream) -> Response:
        closes, body = request.headers.get("stream-closed", "").lower() == "true", await request.body()
        if stream.closed and (body or not closes):
            return Response("closed", 409, SAFE | await self._tail(stream))
        if body and "content-type" not in request.headers:
            return Response("no content type", 400, SAFE)
        if body and _plain(request.headers.get("content-type", "")) != _plain(stream.kind):
            return Response("another content type", 409, SAFE)
        texts = _texts(body, stream.kind, empty=closes)
        if texts is None or (not texts and not closes):
            return Response("nothing to append", 400, SAFE)
        if texts:
            await self._writer.append(stream, texts)
        if closes and not stream.closed:
            await self._writer.close(stream)
        return Response(status_code=204, headers=SAFE | await self._tail(stream))

    async def _tail(self, stream: WrittenStream) -> dict[str, str]:
        answer = await self._api.head(f"/v1/jobs/{stream.job}/stream")
        return {name: answer.headers[name] for name in PASSED[:3] if name in answer.headers}

    async def _read(self, request: Request, stream: WrittenStream) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        asked = self._api.build_request(
            request.method,
            f"/v1/jobs/{stream.job}/stream{query}",
            headers={name: request.headers[name] for name in ("if-none-match",) if name in request.headers},
        )
        answer = await self._api.send(asked, stream=True)
        headers = {name: answer.headers[name] for name in PASSED if name in answer.headers}
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            events = _rendered(answer, stream.kind)
            return StreamingResponse(
                events, answer.status_code, headers | {"content-type": answer.headers["content-type"]}
            )
        data = await answer.aread()
        await answer.aclose()
        if answer.status_code != 200:
            return Response(data if answer.status_code >= 400 else b"", answer.status_code, headers)
        headers["content-type"] = stream.kind
        if request.method == "HEAD":
            return Response(headers=headers)
        found = _appended(json.loads(data))
        if not found and "live" in request.query_params:  # only the end of the job, which a suite did not append
            return Response(status_code=204, headers=headers)
        return Response(_joined(found, stream.kind), headers=headers)


def _plain(kind: str) -> str:
    return kind.partition(";")[0].strip().lower()


def _texts(body: bytes, kind: str, *, empty: bool) -> list[str] | None:
    """What a body appends, one text a message; None if it is malformed. Each byte is a character of a stream that is no
    JSON, so that it may hold any."""
    if _plain(kind) != JSON:
        return [body.decode("latin-1")] if body else []
    try:
        value = json.loads(body) if body else []
    except ValueError:
        return None
    if value == [] and not empty:
        return None
    return [json.dumps(each) for each in (value if isinstance(value, list) else [value])]


def _appended(messages: Iterable[dict[str, Any]]) -> list[str]:
    return [message["data"]["text"] for message in messages if message["event"] == "delta"]


def _joined(texts: list[str], kind: str) -> bytes:
    if _plain(kind) == JSON:
        return f"[{','.join(texts)}]".encode()
    return "".join(texts).encode("latin-1")


async def _rendered(answer: httpx2.Response, kind: str) -> AsyncIterator[bytes]:
    """Render the server-sent events of a stream with what was appended instead of events of a job."""
    lines: list[str] = []
    try:
        async for line in answer.aiter_lines():
            if line:
                lines.append(line)
                continue
            event, lines = lines, []
            if event[:1] == ["event: data"]:
                found = _appended(json.loads("\n".join([each.removeprefix("data:") for each in event[1:]])))
                text = _joined(found, kind).decode("utf-8", "replace")
                event = ["event: data", *(f"data:{each}" for each in text.replace("\r", "\n").split("\n"))]
                event = event if found else []
            if event:
                yield ("\n".join(event) + "\n\n").encode()
    finally:
        await answer.aclose()


@contextmanager
def serving(app: Starlette) -> Iterator[int]:
    """Serve until the end of the context; the port on 127.0.0.1. Raises Died."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise Died("the adapter did not start")
            time.sleep(START_INTERVAL_S)
        yield port
    finally:
        server.should_exit = True
        thread.join(STOP_TIMEOUT_S)


@contextmanager
def serving_streams(redis_url: str, api_url: str) -> Iterator[str]:
    """Serve the adapter from a thread of its own, until the end of the context; its address. Raises Died."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        client = RedisClient.open(RedisSettings(url=redis_url, lease_ms=LEASE_MS, timeout_s=30))
        writer = StreamWriter(client)
        await writer.start()
        async with httpx2.AsyncClient(base_url=api_url, timeout=API_TIMEOUT_S) as api:
            app.state.adapter = StreamAdapter(writer, api)
            yield
        await client.close()

    async def answer(request: Request) -> Response:
        response: Response = await request.app.state.adapter(request)
        return response

    methods = ["GET", "HEAD", "PUT", "POST", "DELETE"]
    with serving(Starlette(routes=[Route("/{path:path}", answer, methods=methods)], lifespan=lifespan)) as port:
        yield f"http://127.0.0.1:{port}"
