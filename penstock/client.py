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

A `Call` decides what to send, when and where to try again, and where a stream resumes; a `Connection` does the I/O: one
for threads, one for asyncio, and one in the tests. A POST that may be sent twice carries an Idempotency-Key, and every
try of it the same one.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import ssl
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import httpx2

Json = dict[str, Any]

NEWER_VERSION = "newer_version"
"""Code of a server that cannot read a job: one that is upgraded already may."""
NO_CAPACITY = "no_capacity"
"""Code of the answer to a request that must not queue; also of a store that has no room now."""
DEADLINE_UNREACHABLE = "deadline_unreachable"
"""Code of the answer to a request that would not start in the time that it allows. A client that waited before the next
try would only move the wait out of the queue."""


class PenstockError(Exception):
    """Base class of this client's errors."""


class InvalidAddress(PenstockError, ValueError):
    """Raised when a text is not the address of a server."""


class InvalidRequest(PenstockError, ValueError):
    """Raised when a request cannot be sent as it is."""


class NoAnswer(PenstockError):
    """Raised when no server has answered for as long as the client was told to try."""

    def __init__(self, url: str, cause: str) -> None:
        self.url, self.cause = without_login(url), cause
        super().__init__(f"no penstock answers at {self.url}: {cause}")


class ApiRefusal(PenstockError):
    """Raised when a server refuses a request, and another try cannot help or did not help in time."""

    def __init__(self, status: int, code: str, message: str, *, param: str = "", request_id: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.param, self.request_id = param, request_id


class JobFailed(PenstockError):
    """Raised when a job has ended in any state but completed; `job` is the job object."""

    def __init__(self, job: Json) -> None:
        error = job.get("error") or {}
        self.job, self.status = job, str(job["status"])
        self.code, self.message = str(error.get("code") or self.status), str(error.get("message") or "")
        super().__init__(f"the job ended as {self.status}" + (f": {self.message}" if self.message else ""))


class StreamReset(PenstockError):
    """Raised when the store lost tokens of a stream and others replaced them: the two texts must not be joined.

    Discard what came before. `stream(job_id, after=error.cursor)` then has all events from the new beginning.
    """

    def __init__(self, job_id: str, event: StreamEvent) -> None:
        super().__init__(f"the store lost part of the stream of {job_id}, which begins again")
        self.job_id, self.event, self.cursor = job_id, event, event.id


class EventsUnreadable(PenstockError):
    """Raised when the server cannot read a job's events to their end, or sends one that is no JSON object."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class WaitTimeout(PenstockError):
    """Raised when the time of a wait is over; the job goes on. `job` is the job object as last seen, if it was."""

    def __init__(self, job_id: str, timeout_s: float, job: Json | None) -> None:
        super().__init__(f"{job_id} has not ended after {timeout_s:g} s; it goes on")
        self.job_id, self.job = job_id, job


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a job: `queued`, `queue.position`, `started`, `interrupted`, `delta`, or the end, named after its
    final state."""

    name: str
    id: str
    """The cursor to resume after this event."""
    data: Json

    @property
    def text(self) -> str:
        """The text of a delta; "" of every other event."""
        return str(self.data["text"]) if self.name == "delta" else ""

    @property
    def choice(self) -> int:
        """The index of the choice that a delta belongs to."""
        return int(self.data.get("index", 0))


class SentEvent(NamedTuple):
    """One server-sent event. `id` is the last id of the stream so far; `at` is monotonic time in seconds."""

    name: str
    id: str
    data: str
    at: float


def refusal_of(status: int, body: bytes, request_id: str) -> ApiRefusal:
    """The error for an answer of 400 or more, whoever wrote it."""
    try:
        error = json.loads(body)["error"]
        message, code, param = str(error["message"]), str(error["code"]), str(error.get("param") or "")
    except (ValueError, KeyError, TypeError):  # a proxy's own page
        message, code, param = f"the server answered {status}", "http_error", ""
    return ApiRefusal(status, code, message, param=param, request_id=request_id)


VALUE = re.compile(r"([!-~]([ -~]*[!-~])?)?")
ARGUMENTS = {"Authorization": "key", "Idempotency-Key": "idempotency_key", "Last-Event-ID": "after"}
"""The argument of the client that becomes a header."""


def is_address(url: str) -> bool:
    """Whether this can be the address of a server."""
    try:
        parts = urlsplit(url)
        return url.startswith(("http://", "https://")) and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, or a port that is none
        return False


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises InvalidRequest, which does not show the value: it may be the API key."""
    for name, value in headers.items():
        if not VALUE.fullmatch(value):
            argument = ARGUMENTS.get(name, f"the header {name}")
            raise InvalidRequest(f"{argument} must be printable ASCII, without spaces around it")


def json_bytes(body: Any) -> bytes:
    """Raises InvalidRequest."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:  # an object of another type; NaN, or half a surrogate pair
        raise InvalidRequest(f"the body is no JSON: {error}") from None


FINAL = ("completed", "failed", "cancelled", "expired", "incomplete")
"""The states in which a job stays, and the names of its last event."""
LONG_POLL_S = 30.0
ANSWER_TIMEOUT_S = 30.0
"""How long a server may send nothing before its answer."""
LATE_S = 15.0
"""The same of a long poll, after the time that it asks for."""
OVERTIME_S = 2.0
"""How long a wait goes on behind its end for an answer that may be on its way."""
SILENCE_S = 45.0
"""How long a stream may bring nothing: a server sends something every [api] keep_alive_s (10 s, at most 20 s)."""
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 3.0
"""Limits of the first delay, and of all: each is random, so that clients that were cut off together come back apart."""
RETRY_AFTER_SPREAD = 0.25
"""A Retry-After is exceeded by up to this part of it, for the same reason."""

EMPTY: Mapping[str, str] = MappingProxyType({})

RETRIED = frozenset({408, 409, 429, 502, 503, 504})
"""Answers after which another try may help, unless they say `x-should-retry: false`."""
ELSEWHERE = frozenset({502, 503, 504})
"""Of these, answers that another server may not give."""


class Send(NamedTuple):
    """A request to send."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes
    timeout_s: float
    """How long the server may send nothing."""
    streamed: bool = False
    """Whether `Connection.read` gives the body of a 200."""


class Pause(NamedTuple):
    """Wait before the next try."""

    seconds: float
    url: str
    """The server that failed."""
    cause: str
    status: int = 0
    """Of its refusal; 0: the connection broke."""


class HttpAnswer(NamedTuple):
    """A server's answer, with its whole body unless it is streamed."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    at: float
    """Monotonic time, in seconds."""


class Broken(Exception):
    """Raised when the connection failed; `at` is monotonic time in seconds. `reached`: a server had accepted it, so it
    may have seen the request."""

    def __init__(self, cause: str, at: float, *, reached: bool = True) -> None:
        super().__init__(cause)
        self.cause, self.at, self.reached = cause, at, reached


class Refused(Exception):
    """Raised for an answer of 400 or more, before it is decided whether another try may help."""

    def __init__(self, answer: HttpAnswer) -> None:
        super().__init__(answer.status)
        self.answer, self.at = answer, answer.at


class Connection(Protocol):
    """Does the I/O of one call. That of the client for threads does it at once: nothing is ever awaited."""

    async def send(self, request: Send) -> HttpAnswer:
        """Send a request, and return its answer. Raises Broken."""

    async def read(self) -> SentEvent:
        """Read the next event in the body of the last request. Raises Broken, also at its end."""

    async def pause(self, pause: Pause) -> None:
        """Wait before the next try."""


def without_login(url: str) -> str:
    """An address as it may be shown."""
    return re.sub(r"//[^/]*@", "//***@", url)


class ServerList:
    """The servers of a client, and the one that it uses now."""

    def __init__(self, urls: str | Sequence[str], key: str) -> None:
        self.urls = [url.strip().rstrip("/") for url in (urls.split(",") if isinstance(urls, str) else urls)]
        for url in self.urls:
            if not is_address(url):
                raise InvalidAddress(
                    f"{without_login(url)!r} is no address of a server; write it as http://127.0.0.1:8000"
                )
        self.key, self.reached = key, False
        self._at = 0

    @property
    def url(self) -> str:
        """The server to send to."""
        return self.urls[self._at]

    def leave(self, url: str) -> None:
        """Use the next server, unless another call of this client has left this one already."""
        if url == self.url:
            self._at = (self._at + 1) % len(self.urls)


class Patience(NamedTuple):
    """How long to try again after a failure, in seconds."""

    s: float
    first_s: float
    """The same before any server has accepted a connection: the address may be wrong."""
    chance: Callable[[], float] = random.random
    """Draws the delays, from 0 to 1."""


class RetryState:
    """Decides after each failure of one call whether to try again, when, and at which server."""

    def __init__(
        self, servers: ServerList, patience: Patience, *, until: float = math.inf, final_codes: Collection[str] = ()
    ) -> None:
        self._servers, self._patience, self._until, self._final_codes = servers, patience, until, final_codes
        self._failures = 0
        self._since = 0.0
        self._url = servers.url

    def server(self) -> str:
        """The server for the next try."""
        self._url = self._servers.url
        return self._url

    def progress(self) -> None:
        """A server has answered: what failed before is forgotten."""
        self._servers.reached = True
        self._failures = 0

    def after(self, failure: Broken | Refused) -> Pause:
        """Return the delay before the next try. Raises NoAnswer, ApiRefusal, TimeoutError."""
        if isinstance(failure, Refused):
            return self._after_refusal(failure.answer)
        self._servers.reached |= failure.reached
        self._servers.leave(self._url)
        pause = Pause(self._delay(failure.at, 0.0, all_alike=False), self._url, failure.cause)
        is_in_time = failure.at + pause.seconds < self._until
        if not failure.reached and self._failures < len(self._servers.urls) and is_in_time:
            return pause  # every server is tried once, however short the patience
        return self._pause(pause, failure.at, NoAnswer(self._url, failure.cause))

    def _after_refusal(self, answer: HttpAnswer) -> Pause:
        """Return the delay before the next try. Raises ApiRefusal, TimeoutError."""
        refusal = refusal_of(answer.status, answer.body, answer.headers.get("x-request-id", ""))
        self._servers.reached = True
        final = answer.status not in RETRIED or answer.headers.get("x-should-retry") == "false"
        if refusal.code in self._final_codes or (final and refusal.code != NEWER_VERSION):
            raise refusal
        is_elsewhere = answer.status in ELSEWHERE
        if is_elsewhere:
            self._servers.leave(self._url)
        delay_s = self._delay(answer.at, retry_after_s(answer.headers), all_alike=not is_elsewhere)
        return self._pause(Pause(delay_s, self._url, refusal.message, answer.status), answer.at, refusal)

    def _delay(self, at: float, asked_s: float, *, all_alike: bool) -> float:
        """Return a random delay. It grows, and honours `asked_s`, once every server has failed or if all are alike."""
        if not self._failures:
            self._since = at
        self._failures += 1
        rounds, others = divmod(self._failures - 1, len(self._servers.urls))
        if others < len(self._servers.urls) - 1 and not all_alike:
            return FIRST_DELAY_S * self._patience.chance()
        longest_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(rounds, 10))
        chance = self._patience.chance
        return max(longest_s * chance(), asked_s * (1 + RETRY_AFTER_SPREAD * chance()))

    def _pause(self, pause: Pause, at: float, error: ApiRefusal | NoAnswer) -> Pause:
        """Return the pause, or raise if it would last too long."""
        patience_s = self._patience.s if self._servers.reached else self._patience.first_s
        ends = at + pause.seconds
        if ends >= self._until and self._servers.reached:
            raise TimeoutError from error
        if ends >= self._until or ends - self._since >= patience_s:
            raise error
        return pause


def retry_after_s(headers: Mapping[str, str]) -> float:
    """The delay that a server asks for; 0 if it asks for none in seconds."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            delay_s = float(headers[name]) * unit_s
        except (KeyError, ValueError):
            continue
        if 0 <= delay_s < math.inf:
            return delay_s
    return 0.0


class Call:
    """One call of a client."""

    def __init__(self, servers: ServerList, patience: Patience, connection: Connection) -> None:
        self._servers, self._patience, self._connection = servers, patience, connection

    async def request(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], *, tries_again: bool
    ) -> Json:
        """Send a request and return the JSON object of its answer."""
        retry = self._retry() if tries_again else self._retry(Patience(0, 0))
        return await self._answer(retry, method, path, body, headers)

    async def submit(self, body: Mapping[str, Any], idempotency_key: str) -> Json:
        """Put a job in the queue, once however often it must be sent."""
        headers = {"Idempotency-Key": idempotency_key}
        queue = body.get("queue")
        refuses_to_wait = isinstance(queue, Mapping) and queue.get("do_not_queue")
        final_codes = (DEADLINE_UNREACHABLE, NO_CAPACITY) if refuses_to_wait else (DEADLINE_UNREACHABLE,)
        return await self._answer(self._retry(final_codes=final_codes), "POST", "/v1/jobs", dict(body), headers)

    async def wait(self, job_id: str, timeout_s: float, now: float) -> Json:
        """Return the job once it has completed. Raises JobFailed, WaitTimeout."""
        until, job = now + timeout_s, None
        retry = self._retry(until=until)
        while job is None or now < until:
            left_s = max(0.0, until - now)
            poll_s = min(LONG_POLL_S, left_s)
            path = f"{job_path(job_id)}?{urlencode({'wait': f'{poll_s:.3f}'})}"
            silence_s = min(poll_s + LATE_S, left_s + OVERTIME_S)
            try:
                got = await self._try(retry, Send("GET", path, EMPTY, b"", silence_s))
            except (Broken, Refused) as failure:
                try:
                    pause = retry.after(failure)
                except TimeoutError:
                    break
                await self._connection.pause(pause)
                now = failure.at + pause.seconds
                continue
            retry.progress()
            job, now = self._json(got), got.at
            if job["status"] == "completed":
                return job
            if job["status"] in FINAL:
                raise JobFailed(job)
        raise WaitTimeout(job_id, timeout_s, job)

    async def stream(self, job_id: str, after: str) -> AsyncGenerator[StreamEvent, None]:
        """Yield the job's events after a cursor to its end, whatever connection brings them."""
        retry, path = self._retry(), f"{job_path(job_id)}/events"
        while True:
            headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": after} if after else {})
            try:
                got = await self._try(retry, Send("GET", path, headers, b"", SILENCE_S, streamed=True))
                if not got.headers.get("content-type", "").startswith("text/event-stream"):
                    raise NoAnswer(self._servers.url, "its answer is no event stream")
                while True:
                    sent = await self._connection.read()
                    if not sent.data:  # a gateway's own, such as a bare `retry:`
                        continue
                    event = _event(job_id, sent, sent.id or after)
                    retry.progress()
                    after = event.id
                    if event.name == "ping":
                        continue
                    yield event
                    if event.name in FINAL:
                        if event.name != "completed":
                            raise JobFailed(event.data)
                        return
            except (Broken, Refused) as failure:
                await self._connection.pause(retry.after(failure))

    async def _answer(self, retry: RetryState, method: str, path: str, body: Any, headers: Mapping[str, str]) -> Json:
        """Return the JSON object of a good answer, after as many tries as it takes and may take."""
        request = Send(method, path, headers, b"" if body is None else json_bytes(body), ANSWER_TIMEOUT_S)
        while True:
            try:
                got = await self._try(retry, request)
            except (Broken, Refused) as failure:
                await self._connection.pause(retry.after(failure))
            else:
                retry.progress()
                return self._json(got)

    async def _try(self, retry: RetryState, request: Send) -> HttpAnswer:
        """Send a request, whose URL is a path, to one server, with the headers of each. Raises Broken, Refused."""
        own = {"Content-Type": "application/json"} if request.body else {}
        if self._servers.key:
            own["Authorization"] = f"Bearer {self._servers.key}"
        own.update(request.headers)
        check_headers(own)
        answer = await self._connection.send(request._replace(url=retry.server() + request.url, headers=own))
        if answer.status >= 400:
            raise Refused(answer)
        return answer

    def _json(self, answer: HttpAnswer) -> Json:
        try:
            value = json.loads(answer.body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise NoAnswer(self._servers.url, "its answer is no JSON object")
        return value

    def _retry(self, patience: Patience | None = None, **limits: Any) -> RetryState:
        return RetryState(self._servers, patience or self._patience, **limits)


def _event(job_id: str, sent: SentEvent, cursor: str) -> StreamEvent:
    """Raises StreamReset, EventsUnreadable; Refused if the server is too old for the job."""
    if sent.name == "ping":
        return StreamEvent(sent.name, cursor, {})
    try:
        data = json.loads(sent.data)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise EventsUnreadable("invalid_event", f"the data of an event {sent.name} is no JSON object")
    if sent.name == "stream.reset":
        raise StreamReset(job_id, StreamEvent(sent.name, cursor, data))
    if sent.name == "error":
        error = data.get("error") or {}
        if error.get("code") == NEWER_VERSION:
            raise Refused(HttpAnswer(503, EMPTY, sent.data.encode(), sent.at))
        raise EventsUnreadable(str(error.get("code")), str(error.get("message")))
    return StreamEvent(sent.name, cursor, data)


def job_path(job_id: str) -> str:
    """The path of a job in the API."""
    return f"/v1/jobs/{quote(job_id, safe='')}"


# --- input and output ------------------------------------------------------------------------------------------------


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
    """Does the I/O of one call for a thread, which waits in it. `opened`: holds the open response."""

    def __init__(self, http: httpx2.Client, on_retry: Callable[[Pause], object], opened: ExitStack) -> None:
        self._http, self._on_retry, self._open = http, on_retry, opened
        self._events: Iterator[httpx2.ServerSentEvent] = iter(())

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

    def __init__(self, http: httpx2.AsyncClient, on_retry: Callable[[Pause], object], opened: AsyncExitStack) -> None:
        self._http, self._on_retry, self._open = http, on_retry, opened
        self._events: AsyncIterator[httpx2.ServerSentEvent] | None = None

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
        trust: which certificates of https:// addresses to believe. Default: those that the authorities of this machine
            have signed, or those in the file that SSL_CERT_FILE names.
    """

    def __init__(
        self,
        urls: str | Sequence[str] = "",
        key: str | None = None,
        *,
        patience_s: float = PATIENCE_S,
        first_patience_s: float = FIRST_PATIENCE_S,
        on_retry: Callable[[Pause], object] = lambda pause: None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        key = os.environ.get(KEY, "") if key is None else key
        self._servers = ServerList(urls or os.environ.get(URL) or DEFAULT_URL, key)
        self._patience, self.on_retry = Patience(patience_s, first_patience_s), on_retry
        self._trust = trust

    @property
    def url(self) -> str:
        """The server that the client uses now."""
        return self._servers.url

    def _options(self) -> dict[str, Any]:
        """Options of the HTTP client; requests to this machine bypass the proxies of the environment."""
        hosts = {urlsplit(url).hostname or "" for url in self._servers.urls}
        return {
            "verify": self._trust or True,
            "limits": httpx2.Limits(max_connections=None),
            "mounts": {f"all://{f'[{host}]' if ':' in host else host}": None for host in hosts if _is_loopback(host)},
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
        return self._run(lambda call: call.wait(job_id, timeout_s, time.monotonic()))

    def cancel(self, job_id: str) -> Json:
        """Cancel a job, queued or running, and return the job object."""
        return self.request("POST", f"{job_path(job_id)}/cancel", tries_again=True)

    def stream(self, job_id: str, after: str = "") -> Iterator[StreamEvent]:
        """Yield the job's events from the beginning, or after the event with this id, to its end. The job goes on if
        you leave the loop early: see `cancel`. Raises StreamReset, JobFailed (after the last event)."""
        with ExitStack() as opened:
            connection = CallConnection(self.http, self.on_retry, opened)
            events = Call(self._servers, self._patience, connection).stream(job_id, after)
            try:
                while True:
                    yield _done(events.asend(None))
            except StopAsyncIteration:
                return
            finally:
                _done(events.aclose())

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = EMPTY, *, tries_again: bool = False
    ) -> Json:
        """Send any other request of the API, and return the JSON object of its answer. Set `tries_again` only if the
        server may get it twice."""
        return self._run(lambda call: call.request(method, path, body, headers, tries_again=tries_again))

    def _run(self, work: Callable[[Call], Coroutine[Any, Any, Result]]) -> Result:
        with ExitStack() as opened:
            connection = CallConnection(self.http, self.on_retry, opened)
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
        return await self._run(lambda call: call.wait(job_id, timeout_s, time.monotonic()))

    async def cancel(self, job_id: str) -> Json:
        """See PenstockClient."""
        return await self.request("POST", f"{job_path(job_id)}/cancel", tries_again=True)

    async def stream(self, job_id: str, after: str = "") -> AsyncIterator[StreamEvent]:
        """See PenstockClient. Where you leave the loop early, close it (`contextlib.aclosing`)."""
        async with AsyncExitStack() as opened:
            connection = AsyncCallConnection(self.http, self.on_retry, opened)
            events = Call(self._servers, self._patience, connection).stream(job_id, after)
            async with aclosing(events):
                async for event in events:
                    yield event

    async def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = EMPTY, *, tries_again: bool = False
    ) -> Json:
        """See PenstockClient."""
        return await self._run(lambda call: call.request(method, path, body, headers, tries_again=tries_again))

    async def _run(self, work: Callable[[Call], Coroutine[Any, Any, Result]]) -> Result:
        async with AsyncExitStack() as opened:
            connection = AsyncCallConnection(self.http, self.on_retry, opened)
            return await work(Call(self._servers, self._patience, connection))


def _done(work: Coroutine[Any, Any, Result]) -> Result:
    """What this returns, whose I/O a CallConnection does: it never waits. Raises what it raises."""
    try:
        next(work.__await__())
    except StopIteration as end:
        result: Result = end.value
        return result
    raise AssertionError("a call for threads has waited")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False
