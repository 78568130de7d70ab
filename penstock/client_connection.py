"""I/O of the client: performs what a call of penstock/client_protocol.py yields, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Self

import httpx2

from penstock.client_protocol import Act, BodyPiece, Broken, HttpAnswer, Outcome, Pause, Read, Send

CONNECT_TIMEOUT_S = 5.0
BREAKS = (
    httpx2.TimeoutException,
    httpx2.NetworkError,
    httpx2.RemoteProtocolError,
    httpx2.ProxyError,
    httpx2.DecodingError,  # a compressed body that broke
)
UNREACHED = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
"""Of these, failures before a server has accepted the connection."""


class CallConnection:
    """Does what one call yields; holds its open response."""

    def __init__(self, http: httpx2.Client, on_retry: Callable[[Pause], object]) -> None:
        self._http, self._on_retry = http, on_retry
        self._open = ExitStack()
        self._pieces: Iterator[bytes] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def perform(self, act: Act) -> Outcome:
        try:
            match act:
                case Send():
                    return self._send(act)
                case Read():
                    return BodyPiece(next(self._pieces, b""), time.monotonic())
        except BREAKS as error:
            return _failure(error)
        assert isinstance(act, Pause), act
        self._open.close()
        self._on_retry(act)
        time.sleep(act.seconds)
        return None

    def _send(self, act: Send) -> HttpAnswer:
        self._open.close()
        response = self._open.enter_context(self._http.stream(*act[:2], **_request_options(act)))
        if act.streamed and response.status_code == 200:
            self._pieces, body = response.iter_bytes(), b""
        else:
            body = response.read()
        return _answer(response, body)


class AsyncCallConnection:
    """The same for asyncio."""

    def __init__(self, http: httpx2.AsyncClient, on_retry: Callable[[Pause], object]) -> None:
        self._http, self._on_retry = http, on_retry
        self._open = AsyncExitStack()
        self._pieces: AsyncIterator[bytes] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def perform(self, act: Act) -> Outcome:
        try:
            match act:
                case Send():
                    return await self._send(act)
                case Read():
                    assert self._pieces is not None
                    return BodyPiece(await anext(self._pieces, b""), time.monotonic())
        except BREAKS as error:
            return _failure(error)
        assert isinstance(act, Pause), act
        await self._open.aclose()
        self._on_retry(act)
        await asyncio.sleep(act.seconds)
        return None

    async def _send(self, act: Send) -> HttpAnswer:
        await self._open.aclose()
        response = await self._open.enter_async_context(self._http.stream(*act[:2], **_request_options(act)))
        if act.streamed and response.status_code == 200:
            self._pieces, body = response.aiter_bytes(), b""
        else:
            body = await response.aread()
        return _answer(response, body)


def _request_options(act: Send) -> dict[str, Any]:
    timeout = httpx2.Timeout(act.timeout_s, connect=min(CONNECT_TIMEOUT_S, act.timeout_s))
    return {"headers": dict(act.headers), "content": act.body or None, "timeout": timeout}


def _answer(response: httpx2.Response, body: bytes) -> HttpAnswer:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpAnswer(response.status_code, headers, body, time.monotonic())


def _failure(error: Exception) -> Broken:
    return Broken(str(error) or type(error).__name__, not isinstance(error, UNREACHED), time.monotonic())
