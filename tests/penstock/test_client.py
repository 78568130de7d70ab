"""The client's decisions, without a server: what it sends, when and where it tries again, and what it tells."""

from __future__ import annotations

import asyncio
import http.server
import json
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from house import free_port
from http_serving import serving_http

from penstock.client import (
    FIRST_PATIENCE_S,
    MAX_DELAY_S,
    PATIENCE_S,
    SILENCE_S,
    ApiRefusal,
    AsyncPenstockClient,
    Broken,
    Call,
    Connection,
    EventsUnreadable,
    HttpAnswer,
    InvalidAddress,
    InvalidRequest,
    JobFailed,
    NoAnswer,
    Patience,
    Pause,
    PenstockClient,
    Send,
    SentEvent,
    ServerList,
    StreamEvent,
    StreamReset,
    WaitTimeout,
    retry_after_s,
)

A, B = "http://a", "http://b"
STREAMED = HttpAnswer(200, {"content-type": "text/event-stream; charset=utf-8"}, b"", 0.0)
BODY = {"model": "sim", "prompt": "é"}


class Calls:
    """Makes calls of a client on the connection that `Played` brings."""

    def __init__(self, servers: ServerList, patience: Patience) -> None:
        self._servers, self._patience = servers, patience

    def __getattr__(self, method: str) -> Callable[..., Callable[[Connection], Any]]:
        def on(connection: Connection) -> Call:
            return Call(self._servers, self._patience, connection)

        return lambda *args, **options: lambda connection: getattr(on(connection), method)(*args, **options)


def calls(*urls: str, patience_s: float = 60.0, first_s: float = 60.0, chance: float = 1.0) -> Calls:
    return Calls(ServerList(urls or (A,), "a-key"), Patience(patience_s, first_s, lambda: chance))


def ok(value: object, at: float = 0.0) -> HttpAnswer:
    return HttpAnswer(200, {}, json.dumps(value).encode(), at)


def refused(status: int, code: str = "some_code", at: float = 0.0, **headers: str) -> HttpAnswer:
    body = json.dumps({"error": {"message": "the reason", "code": code, "param": None}}).encode()
    return HttpAnswer(status, {name.replace("_", "-"): value for name, value in headers.items()}, body, at)


def event(name: str, event_id: str = "", at: float = 0.0, **data: Any) -> SentEvent:
    return SentEvent(name, event_id, json.dumps(data), at)


def ended(at: float = 0.0) -> Broken:
    return Broken("the server ended the stream", at)


def broken(at: float = 0.0, *, reached: bool = True) -> Broken:
    return Broken("cut", at, reached=reached)


class Played:
    """A call whose I/O is played from a script: `result` or `error` is how it ended."""

    def __init__(self, call: Callable[[Connection], Any], outcomes: Sequence[HttpAnswer | SentEvent | Broken]) -> None:
        self.sent: list[Send] = []
        self.pauses: list[Pause] = []
        self.events: list[StreamEvent] = []
        self.result: Any = None
        self.error: Exception | None = None
        self._script = iter(outcomes)
        try:
            asyncio.run(self._play(call(self)))
        except Exception as error:  # noqa: BLE001 - the tests look at it
            self.error = error
        assert next(self._script, None) is None, "the call ended before the script"

    async def _play(self, call: Any) -> None:
        if isinstance(call, AsyncGenerator):
            async for event in call:
                self.events.append(event)
        else:
            self.result = await call

    async def send(self, request: Send) -> HttpAnswer:
        self.sent.append(request)
        return self._next()

    async def read(self) -> SentEvent:
        return self._next()

    async def pause(self, pause: Pause) -> None:
        self.pauses.append(pause)

    def _next(self) -> Any:
        outcome = next(self._script)
        if isinstance(outcome, Broken):
            raise outcome
        return outcome


def test_a_submit_is_sent_again_under_its_key_at_the_next_server() -> None:
    """The answer was lost, so the job may be queued: the same bytes and key lead to the same job."""
    played = Played(calls(A, B).submit(BODY, "k"), [broken(), refused(503, retry_after="7"), ok({"id": "job_1"})])
    assert played.result == {"id": "job_1"}
    assert [send.url for send in played.sent] == [f"{A}/v1/jobs", f"{B}/v1/jobs", f"{A}/v1/jobs"]
    (send,) = {(send.method, send.body, *sorted(send.headers.items())) for send in played.sent}
    assert send[:2] == ("POST", json.dumps(BODY, ensure_ascii=False).encode())
    assert dict(send[2:]) == {
        "Authorization": "Bearer a-key", "Content-Type": "application/json", "Idempotency-Key": "k",
    }  # fmt: skip
    first, second = played.pauses
    assert 0 < first.seconds <= 0.1 and 7 <= second.seconds <= 1.25 * 7
    assert (first.url, first.cause, second.url, second.cause) == (A, "cut", B, "the reason")


@pytest.mark.parametrize(("status", "urls"), [(429, [A, A]), (409, [A, A]), (503, [A, B]), (502, [A, B])])
def test_a_refusal_of_one_process_leads_to_the_next_and_of_the_queue_does_not(status: int, urls: list[str]) -> None:
    played = Played(calls(A, B).submit(BODY, "k"), [refused(status, retry_after="3"), ok({})])
    assert [send.url.removesuffix("/v1/jobs") for send in played.sent] == urls
    assert (played.pauses[0].seconds >= 3) == (urls[1] == A)


@pytest.mark.parametrize(
    "answer",
    [refused(400), refused(404), refused(422), refused(500), refused(401), refused(429, x_should_retry="false"),
     refused(503, x_should_retry="false")],
)  # fmt: skip
def test_what_another_try_cannot_help_is_raised_at_once(answer: HttpAnswer) -> None:
    played = Played(calls(A, B).submit(BODY, "k"), [answer])
    assert isinstance(played.error, ApiRefusal) and not played.pauses
    assert (played.error.status, played.error.code, str(played.error)) == (answer.status, "some_code", "the reason")


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"\xff"])
def test_another_server_is_not_taken_for_penstock(body: bytes) -> None:
    played = Played(calls().submit(BODY, "k"), [HttpAnswer(200, {}, body, 0)])
    assert isinstance(played.error, NoAnswer) and played.error.url == A
    played = Played(calls().stream("job_1", ""), [HttpAnswer(200, {"content-type": "text/html"}, b"", 0)])
    assert isinstance(played.error, NoAnswer)


def test_delays_grow_to_a_limit_and_start_anew_after_an_answer() -> None:
    """Random up to a limit that doubles once every server has failed."""
    call = calls(A, B, patience_s=math.inf).stream("job_1", "")
    rounds = [broken() for _ in range(20)]
    played = Played(call, [*rounds, STREAMED, event("ping"), broken(), refused(404)])
    delays = [pause.seconds for pause in played.pauses]
    assert delays[:6] == [0.1, 0.1, 0.1, 0.2, 0.1, 0.4] and delays[19] == MAX_DELAY_S and delays[20] == 0.1
    half = Played(calls(patience_s=math.inf, chance=0.5).submit(BODY, "k"), [broken(), broken(), ok({})])
    assert [pause.seconds for pause in half.pauses] == [0.05, 0.1]


def test_it_gives_up_when_nobody_has_answered_for_too_long() -> None:
    """The time runs from the first failure; a Retry-After that reaches beyond it is not waited for."""
    call = calls(patience_s=10).submit(BODY, "k")
    played = Played(call, [broken(100), broken(105), broken(109.9)])
    assert isinstance(played.error, NoAnswer) and len(played.pauses) == 2
    played = Played(calls(patience_s=10).submit(BODY, "k"), [refused(503, "store_unavailable", retry_after="10")])
    assert isinstance(played.error, ApiRefusal) and played.error.code == "store_unavailable"


def test_an_address_that_never_answered_has_a_patience_of_its_own() -> None:
    """A connection that was accepted and then cut counts as an answer: some server is there."""
    some = calls(first_s=0)
    assert isinstance(Played(some.submit(BODY, "k"), [broken(reached=False)]).error, NoAnswer)
    assert Played(some.submit(BODY, "k"), [broken(), broken(reached=False), ok({})]).error is None
    assert Played(some.submit(BODY, "k"), [broken(reached=False), ok({})]).error is None


async def test_two_calls_that_lose_a_server_go_to_the_same_next_one() -> None:
    """The one that fails last finds that the other has left it."""
    urls, both_sent = list[str](), asyncio.Barrier(2)

    async def send(request: Send) -> HttpAnswer:
        urls.append(request.url)
        if len(urls) > 2:
            return ok({})
        await both_sent.wait()
        raise broken()

    shared, connection = calls(A, B), Mock(send=send, pause=AsyncMock())
    await asyncio.gather(*(shared.submit(BODY, key)(connection) for key in "kl"))
    assert urls == [f"{A}/v1/jobs"] * 2 + [f"{B}/v1/jobs"] * 2


def test_a_request_that_must_not_be_repeated_is_tried_once() -> None:
    """Where no server had accepted the connection, at each server."""
    for outcome in (broken(), refused(503, retry_after="1")):
        played = Played(calls(A, B).request("POST", "/x", {}, {}, tries_again=False), [outcome])
        assert len(played.sent) == 1 and played.error is not None
    played = Played(calls(A, B).request("POST", "/x", {}, {}, tries_again=False), [broken(reached=False)] * 2)
    assert len(played.sent) == 2 and isinstance(played.error, NoAnswer)
    assert Played(calls().request("GET", "/x", None, {}, tries_again=True), [broken(), ok({})]).error is None


def test_a_wait_polls_to_the_end_and_within_its_time() -> None:
    """Each poll asks for no more than the time that is left."""
    running, done = {"status": "in_progress"}, {"status": "failed"}
    played = Played(calls().wait("job_1", 40.0, now=0.0), [ok(running, 30.0), broken(31.0), ok(done, 39.0)])
    assert isinstance(played.error, JobFailed) and played.error.job == done
    assert [send.url.partition("=")[2] for send in played.sent] == ["30.000", "10.000", "8.900"]
    assert [round(send.timeout_s, 1) for send in played.sent] == [42.0, 12.0, 10.9]
    played = Played(calls().wait("job_1", 40.0, now=0.0), [ok(running, 30.0), ok(running, 40.0)])
    assert isinstance(played.error, WaitTimeout) and (played.error.job_id, played.error.job) == ("job_1", running)
    played = Played(calls().wait("job_1", 0.0, now=5.0), [ok(running, 5.0)])
    assert isinstance(played.error, WaitTimeout) and played.sent[0].url.endswith("=0.000")
    played = Played(calls().wait("job_1", 2.0, now=0.0), [broken(0.5), broken(1.95)])
    assert isinstance(played.error, WaitTimeout)
    played = Played(calls(A, B).wait("job_1", 50.0, now=0.0), [broken(45.0), broken(49.9)])
    assert isinstance(played.error, WaitTimeout) and [round(send.timeout_s, 1) for send in played.sent] == [45.0, 6.9]


@pytest.mark.parametrize("timeout_s", [0.0, 2.0])
def test_a_wait_that_reaches_no_server_does_not_say_that_the_job_goes_on(timeout_s: float) -> None:
    outcomes = [broken(0.5, reached=False), broken(1.95, reached=False)][: 1 if not timeout_s else 2]
    played = Played(calls().wait("job_1", timeout_s, now=0.0), outcomes)
    assert isinstance(played.error, NoAnswer) and played.error.cause == "cut"


def test_a_stream_goes_on_behind_its_last_whole_event() -> None:
    """Pings, places in the lane and what a gateway sends without data move no cursor, and each event is told once."""
    outcomes = [
        STREAMED, SentEvent("message", "", "", 0.0), event("queued", "0:1:-", position=3),
        event("queue.position", position=1), SentEvent("failed", "0:2:-", "", 0.0),
        broken(),
        refused(503, "draining"), STREAMED,
        event("delta", "0:3:r", text="a", index=1), event("ping"),
        ended(), STREAMED,
        event("delta", "0:4:r", text="b"), event("completed", "0:5:r", id="job_1"),
    ]  # fmt: skip
    played = Played(calls(A, B).stream("job_1", ""), outcomes)
    assert played.error is None and "".join(event.text for event in played.events) == "ab"
    assert [(event.name, event.id) for event in played.events] == [
        ("queued", "0:1:-"), ("queue.position", "0:1:-"),
        ("delta", "0:3:r"), ("delta", "0:4:r"), ("completed", "0:5:r"),
    ]  # fmt: skip
    assert played.events[2].choice == 1 and played.events[0].data == {"position": 3}
    assert [send.headers.get("Last-Event-ID") for send in played.sent] == [None, "0:1:-", "0:1:-", "0:3:r"]
    assert [send.url[:8] for send in played.sent] == [A, B, A, B]
    assert all(send.streamed and send.timeout_s == SILENCE_S for send in played.sent)


def test_a_connection_that_brings_nothing_is_no_progress() -> None:
    """A process that dies at each reader is not asked for ever, nor without a delay."""
    played = Played(calls().stream("job_1", ""), [STREAMED, ended(), STREAMED, ended(61)])
    assert isinstance(played.error, NoAnswer) and "ended the stream" in str(played.error)


def test_each_end_of_a_stream_is_told_as_what_it_is() -> None:
    failed = event("failed", "0:9:r", status="failed", error={"code": "worker_lost", "message": "three died"})
    played = Played(calls().stream("job_1", "0:1:-"), [STREAMED, failed])
    assert isinstance(played.error, JobFailed) and played.events[-1].name == "failed"
    assert (played.error.status, played.error.code, played.error.message) == ("failed", "worker_lost", "three died")
    assert played.sent[0].headers["Last-Event-ID"] == "0:1:-"
    played = Played(calls().stream("job_1", ""), [STREAMED, event("stream.reset", "2:0:-", epoch=2)])
    assert isinstance(played.error, StreamReset) and played.error.cursor == "2:0:-" and not played.events
    gone = event("error", error={"code": "events_expired", "message": "gone"})
    played = Played(calls().stream("job_1", ""), [STREAMED, gone])
    assert isinstance(played.error, EventsUnreadable) and played.error.code == "events_expired"
    played = Played(calls().stream("job/1", ""), [refused(404, "job_not_found")])
    assert isinstance(played.error, ApiRefusal) and played.sent[0].url == f"{A}/v1/jobs/job%2F1/events"


def test_a_server_that_is_too_old_for_a_job_sends_its_readers_to_another() -> None:
    """In an upgrade: by its answer, or by the last event of a stream, as long as the patience lasts."""
    old = {"message": "the reason", "code": "newer_version"}
    outcomes = [refused(503, "newer_version", x_should_retry="false"), ok({"status": "completed"})]
    played = Played(calls(A, B).wait("job_1", 60.0, now=0.0), outcomes)
    assert played.error is None and played.sent[1].url.startswith(B)
    outcomes = [STREAMED, event("queued", "0:1:-"), event("error", error=old)]
    last = [STREAMED, event("completed", "0:2:-")]
    played = Played(calls(A, B).stream("job_1", ""), [*outcomes, *last])
    assert [event.name for event in played.events] == ["queued", "completed"] and played.sent[1].url.startswith(B)
    late = [STREAMED, event("error", at=61, error=old)]
    played = Played(calls(A).stream("job_1", ""), [*outcomes, *late])
    assert isinstance(played.error, ApiRefusal) and played.error.code == "newer_version"


def test_a_request_that_must_not_queue_is_not_tried_again() -> None:
    """Where it is refused for that; a connection that breaks is another matter."""
    body = BODY | {"queue": {"do_not_queue": True}}
    played = Played(calls().submit(body, "k"), [broken(), refused(503, "no_capacity", retry_after="1")])
    assert isinstance(played.error, ApiRefusal) and len(played.sent) == 2
    assert Played(calls().submit(BODY, "k"), [refused(503, "no_capacity", retry_after="1"), ok({})]).error is None


def test_a_request_whose_time_is_too_short_is_not_tried_again() -> None:
    """To wait here for a shorter queue is what its limit forbids: the caller decides."""
    body = BODY | {"queue": {"max_queue_ms": 500}}
    played = Played(calls().submit(body, "k"), [refused(429, "deadline_unreachable", retry_after="1")])
    assert isinstance(played.error, ApiRefusal) and played.error.code == "deadline_unreachable"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0), ({"retry-after": "2"}, 2), ({"retry-after": "2", "retry-after-ms": "150"}, 0.15),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0), ({"retry-after": "-1"}, 0), ({"retry-after": "inf"}, 0),
        ({"retry-after": "nan"}, 0),
    ],
)  # fmt: skip
def test_a_retry_after_is_read_in_seconds(headers: dict[str, str], seconds: float) -> None:
    assert retry_after_s(headers) == seconds


@pytest.mark.parametrize("value", ["\u00e9", "a\nb", "a ", "a\r", "\x7f", "\ud800"])
def test_what_no_header_can_hold_is_refused_before_it_is_sent(value: str) -> None:
    """The error names the argument, and not its value, which may be the API key."""
    keyed = Calls(ServerList([A], value), Patience(0, 0)).submit(BODY, "k")
    each = {"key": keyed, "idempotency_key": calls().submit(BODY, value), "after": calls().stream("job_1", value)}
    for name, call in each.items():
        played = Played(call, [])
        assert isinstance(played.error, InvalidRequest) and not played.sent
        assert str(played.error) == f"{name} must be printable ASCII, without spaces around it"


@pytest.mark.parametrize("value", [math.nan, object(), "\ud800"])
def test_a_body_that_is_no_json_is_refused_before_it_is_sent(value: object) -> None:
    played = Played(calls().submit(BODY | {"metadata": value}, "k"), [])
    assert isinstance(played.error, InvalidRequest) and "the body is no JSON" in str(played.error)


@pytest.mark.parametrize("data", ["{", "<html>", "[1]"])
def test_an_event_that_is_no_json_is_unreadable(data: str) -> None:
    played = Played(calls().stream("job_1", ""), [STREAMED, SentEvent("delta", "0:1:r", data, 0)])
    assert isinstance(played.error, EventsUnreadable) and played.error.code == "invalid_event"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a", "", "http://", "http://[::1", "http://[x]", "http://a:99999", "http://:80"]
)
def test_what_is_no_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidAddress, match="is no address of a server; write it as http"):
        ServerList([url], "")
    assert ServerList("http://a/, http://b", "").urls == [A, B]


# --- input and output ------------------------------------------------------------------------------------------------


class Garbled(http.server.BaseHTTPRequestHandler):
    """Announces a compressed body and sends another."""

    def do_GET(self) -> None:
        kind = "text/event-stream" if self.path.endswith("/events") else "application/json"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", "7")
        self.end_headers()
        self.wfile.write(b"no gzip")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with serving_http(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Garbled)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


async def test_a_compressed_body_that_broke_is_a_broken_connection(url: str) -> None:
    with PenstockClient(url, patience_s=0) as client:
        with pytest.raises(NoAnswer):
            client.get("job_1")
        with pytest.raises(NoAnswer):
            list(client.stream("job_1"))
    async with AsyncPenstockClient(url, patience_s=0) as other:
        with pytest.raises(NoAnswer):
            await other.get("job_1")
        with pytest.raises(NoAnswer):
            [event async for event in other.stream("job_1")]


@pytest.mark.slow
def test_an_address_where_nothing_runs_is_told_soon() -> None:
    """With the default patience, which is for servers that were there before."""
    pauses: list[Pause] = []
    url = f"http://127.0.0.1:{free_port()}"
    with PenstockClient(url, on_retry=pauses.append) as client, pytest.raises(NoAnswer) as told:
        client.submit({"model": "m"})
    assert str(told.value).startswith(f"no penstock answers at {url}: ") and "refused" in told.value.cause
    assert len(pauses) > 1 and sum(pause.seconds for pause in pauses) < FIRST_PATIENCE_S < PATIENCE_S / 10
