"""HTTP/1.1 over a bare socket: requests ready to send, and answers from behind their head."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from collections.abc import AsyncIterator, Mapping

import msgspec

HOST = "127.0.0.1"
MAX_LINE_BYTES = 1 << 20
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
"""Head of a stream of events."""
Headers = dict[str, str]
"""Names in lower case."""


class RequestRefused(RuntimeError):
    """A request was not answered with a 2xx."""


def request(
    method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None, host: str = HOST
) -> bytes:
    """A request, ready to send; `body` is encoded as JSON."""
    data = b"" if body is None else msgspec.json.encode(body)
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


def chunk(data: bytes) -> bytes:
    """A part of a body whose length nobody knows at its begin."""
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextlib.asynccontextmanager
async def answer_to(port: int, sent: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, Headers]]:
    """The answer's body and its headers; the connection is closed behind it. Raises RequestRefused, OSError."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=MAX_LINE_BYTES)
    try:
        writer.write(sent)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the connection was cut before an answer") from error
        if not head[0].startswith("HTTP/1.1 2"):
            raise RequestRefused(head[0])
        yield reader, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    finally:
        writer.close()


def fetch(
    port: int,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    host: str = HOST,
    timeout_s: float = 60.0,
) -> tuple[int, Headers, bytes]:
    """Status, headers and body of one answer, without asyncio. Raises OSError, HTTPException."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()
