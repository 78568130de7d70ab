"""Client of Penstock for other programs: submits jobs, waits for them, and streams them, each token once and in order.

    from penstock.client import PenstockClient

    with PenstockClient("http://10.0.0.1:8000,http://10.0.0.2:8000") as client:
        job = client.submit({"model": "llama-8b", "messages": [{"role": "user", "content": "hello"}]})
        for event in client.stream(job["id"]):
            print(event.text, end="", flush=True)

It survives the death of any API process, and of all of them for `patience_s`: a stream goes on behind its last event,
at whichever server answers, and a job is queued once however often its request had to be sent. `AsyncPenstockClient`
has the same methods for asyncio.

The methods raise these errors, all of them a PenstockError:

- InvalidAddress: the client was given something else as the address of a server
- InvalidRequest: the body is no JSON, or a key, an idempotency key or a cursor is not printable ASCII
- NoAnswer: no server answered for `patience_s`, or for `first_patience_s` if none was ever reached
- ApiRefusal: the server refused the request (`status`, `code`, `message`)
- JobFailed: the job ended in any state but completed
- StreamReset: the store lost part of a stream; discard what came, and go on with `stream(job_id, after=error.cursor)`
- EventsUnreadable: the server cannot read the job's events to their end, or sends one that is no JSON object
- WaitTimeout: the time of `wait` is over; the job goes on
"""

from __future__ import annotations

import asyncio
import math
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager
from ipaddress import ip_address
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx2

from penstock.client_protocol import (
    EMPTY,
    FINAL,
    ApiRefusal,
    Broken,
    Call,
    EventsUnreadable,
    HttpAnswer,
    InvalidAddress,
    InvalidRequest,
    JobFailed,
    Json,
    NoAnswer,
    Patience,
    Pause,
    PenstockError,
    Send,
    SentEvent,
    ServerList,
    StreamEvent,
    StreamReset,
    WaitTimeout,
    job_path,
)

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
    """Does the I/O of one call for a thread, which waits in it; holds the open response."""

    def __init__(self, http: httpx2.Client, on_retry: Callable[[Pause], object]) -> None:
        self._http, self._on_retry = http, on_retry
        self._open = ExitStack()
        self._events: Iterator[httpx2.ServerSentEvent] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    async def send(self, request: Send) -> HttpAnswer:
        self._open.close()
        with _breaks():
            options = _request_options(request)
            response = self._open.enter_context(self._http.stream(request.method, request.url, **options))
            if request.streamed and response.status_code == 200:
                self._events = iter(httpx2.EventSource(response, max_event_size=None))
                return _answer(response, b"")
            return _answer(response, response.read())

    async def read(self) -> SentEvent:
        with _breaks():
            return _sent(next(self._events, None))

    async def pause(self, pause: Pause) -> None:
        self._open.close()
        self._on_retry(pause)
        time.sleep(pause.seconds)  # noqa: ASYNC251 - the thread waits


class AsyncCallConnection:
    """Connection of one call for a task (`CallConnection` is for a thread)."""

    def __init__(self, http: httpx2.AsyncClient, on_retry: Callable[[Pause], object]) -> None:
        self._http, self._on_retry = http, on_retry
        self._open = AsyncExitStack()
        self._events: AsyncIterator[httpx2.ServerSentEvent] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def send(self, request: Send) -> HttpAnswer:
        await self._open.aclose()
        with _breaks():
            options = _request_options(request)
            stream = self._http.stream(request.method, request.url, **options)
            response = await self._open.enter_async_context(stream)
            if request.streamed and response.status_code == 200:
                self._events = aiter(httpx2.EventSource(response, max_event_size=None))
                return _answer(response, b"")
            return _answer(response, await response.aread())

    async def read(self) -> SentEvent:
        assert self._events is not None
        with _breaks():
            return _sent(await anext(self._events, None))

    async def pause(self, pause: Pause) -> None:
        await self._open.aclose()
        self._on_retry(pause)
        await asyncio.sleep(pause.seconds)


@contextmanager
def _breaks() -> Iterator[None]:
    """Raises Broken where the connection fails."""
    try:
        yield
    except BREAKS as error:
        cause, reached = str(error) or type(error).__name__, not isinstance(error, UNREACHED)
        raise Broken(cause, time.monotonic(), reached=reached) from error


def _request_options(request: Send) -> dict[str, Any]:
    timeout = httpx2.Timeout(request.timeout_s, connect=min(CONNECT_TIMEOUT_S, request.timeout_s))
    return {"headers": dict(request.headers), "content": request.body or None, "timeout": timeout}


def _sent(event: httpx2.ServerSentEvent | None) -> SentEvent:
    if event is None:
        raise Broken("the server ended the stream", time.monotonic())
    return SentEvent(event.event, event.id, event.data, time.monotonic())


def _answer(response: httpx2.Response, body: bytes) -> HttpAnswer:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpAnswer(response.status_code, headers, body, time.monotonic())


__all__ = [
    "FINAL",
    "ApiRefusal",
    "AsyncPenstockClient",
    "EventsUnreadable",
    "InvalidAddress",
    "InvalidRequest",
    "JobFailed",
    "NoAnswer",
    "Pause",
    "PenstockClient",
    "PenstockError",
    "StreamEvent",
    "StreamReset",
    "WaitTimeout",
]

URL, KEY = "PENSTOCK_URL", "PENSTOCK_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
PATIENCE_S = 60.0
FIRST_PATIENCE_S = 3.0
"""Patience before any server was reached: the address may be wrong, or nothing runs there."""

Result = TypeVar("Result")


class _Client:
    """What the two clients have in common.

    Args:
        urls: addresses of the API processes, as a list or with commas between them. Default: PENSTOCK_URL.
        key: the API key. Default: PENSTOCK_API_KEY.
        patience_s: how long to try again while no server answers.
        first_patience_s: the same before any server has accepted a connection. Raise it for a program that may start
            before Penstock does.
        on_retry: called before each wait for another try.
    """

    def __init__(
        self,
        urls: str | Sequence[str] = "",
        key: str | None = None,
        *,
        patience_s: float = PATIENCE_S,
        first_patience_s: float = FIRST_PATIENCE_S,
        on_retry: Callable[[Pause], object] = lambda pause: None,
    ) -> None:
        key = os.environ.get(KEY, "") if key is None else key
        self._servers = ServerList(urls or os.environ.get(URL) or DEFAULT_URL, key)
        self._patience, self.on_retry = Patience(patience_s, first_patience_s), on_retry

    @property
    def url(self) -> str:
        """The server that the client uses now."""
        return self._servers.url

    def _options(self) -> dict[str, Any]:
        """Options of the HTTP client; requests to this machine bypass the proxies of the environment."""
        hosts = {urlsplit(url).hostname or "" for url in self._servers.urls}
        return {
            "limits": httpx2.Limits(max_connections=None),
            "mounts": {f"all://{_in_url(host)}": None for host in hosts if _is_loopback(host)},
        }


class PenstockClient(_Client):
    """Client for threads. Close it, or use it as a context manager."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.http = httpx2.Client(**self._options())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def submit(self, body: Mapping[str, Any], *, idempotency_key: str = "") -> Json:
        """Put a job (the body of POST /v1/jobs) in the queue, exactly once. Returns the job object.

        Args:
            idempotency_key: calls with the same key and body lead to the same job, also from other processes.
        """
        return self._run(lambda call: call.submit(body, idempotency_key or uuid.uuid4().hex))

    def get(self, job_id: str) -> Json:
        """Return the job object, with its result once it has completed."""
        return self.request("GET", job_path(job_id), tries_again=True)

    def wait(self, job_id: str, timeout_s: float = math.inf) -> Json:
        """Return the job object once the job has completed. Raises JobFailed, WaitTimeout."""
        return _completed(self._run(lambda call: call.wait(job_id, timeout_s, time.monotonic())))

    def cancel(self, job_id: str) -> Json:
        """Cancel a job, queued or running, and return the job object."""
        return self.request("POST", f"{job_path(job_id)}/cancel", tries_again=True)

    def stream(self, job_id: str, after: str = "") -> Iterator[StreamEvent]:
        """Yield the job's events from the beginning, or after the event with this id, to its end. The job goes on if
        you leave the loop early: see `cancel`. Raises StreamReset, JobFailed (after the last event)."""
        with CallConnection(self.http, self.on_retry) as connection:
            events = Call(self._servers, self._patience, connection).stream(job_id, after)
            try:
                while True:
                    yield _done(anext(events))
            except StopAsyncIteration:
                return
            finally:
                _done(events.aclose())

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] = EMPTY,
        *,
        tries_again: bool = False,
    ) -> Json:
        """Send any other request of the API, and return the JSON object of its answer. Set `tries_again` only if the
        server may get it twice."""
        return self._run(lambda call: call.request(method, path, body, headers, tries_again=tries_again))

    def _run(self, work: Callable[[Call], Coroutine[Any, Any, Result]]) -> Result:
        with CallConnection(self.http, self.on_retry) as connection:
            return _done(work(Call(self._servers, self._patience, connection)))


class AsyncPenstockClient(_Client):
    """Client for asyncio, with the methods of PenstockClient."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.http = httpx2.AsyncClient(**self._options())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self.http.aclose()

    async def submit(self, body: Mapping[str, Any], *, idempotency_key: str = "") -> Json:
        """See PenstockClient."""
        return await self._run(lambda call: call.submit(body, idempotency_key or uuid.uuid4().hex))

    async def get(self, job_id: str) -> Json:
        """See PenstockClient."""
        return await self.request("GET", job_path(job_id), tries_again=True)

    async def wait(self, job_id: str, timeout_s: float = math.inf) -> Json:
        """See PenstockClient."""
        return _completed(await self._run(lambda call: call.wait(job_id, timeout_s, time.monotonic())))

    async def cancel(self, job_id: str) -> Json:
        """See PenstockClient."""
        return await self.request("POST", f"{job_path(job_id)}/cancel", tries_again=True)

    async def stream(self, job_id: str, after: str = "") -> AsyncIterator[StreamEvent]:
        """See PenstockClient. Where you leave the loop early, close it (`contextlib.aclosing`)."""
        async with AsyncCallConnection(self.http, self.on_retry) as connection:
            events = Call(self._servers, self._patience, connection).stream(job_id, after)
            async with aclosing(events):
                async for event in events:
                    yield event

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] = EMPTY,
        *,
        tries_again: bool = False,
    ) -> Json:
        """See PenstockClient."""
        return await self._run(lambda call: call.request(method, path, body, headers, tries_again=tries_again))

    async def _run(self, work: Callable[[Call], Coroutine[Any, Any, Result]]) -> Result:
        async with AsyncCallConnection(self.http, self.on_retry) as connection:
            return await work(Call(self._servers, self._patience, connection))


def _done(work: Awaitable[Result]) -> Result:
    """What this returns, whose I/O a CallConnection does: it never waits. Raises what it raises."""
    try:
        next(work.__await__())
    except StopIteration as end:
        result: Result = end.value
        return result
    raise AssertionError("a call for threads has waited")


def _completed(job: Json) -> Json:
    if job["status"] != "completed":
        raise JobFailed(job)
    return job


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
