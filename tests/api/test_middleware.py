"""What surrounds every request: the headers it looks up for all, and that nothing of a request stays behind."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, Mock

import pytest
from api_in_process import api_in_process
from flow import until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from api.admission import header
from api.app import Endpoints, Observed
from api.auth.keys import LOCAL_CALLER
from api.openai import errors
from api.services import Services
from api.settings import ApiSettings
from api.stream.connection import Connection
from streaming.redis.client import RedisClient
from telemetry.process import start_tracing

TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


class Exchange:
    """The server's side of one request, as uvicorn has it: what sends the answer also holds the scope."""

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.scope: Scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "state": {}}
        self.sent: list[Message] = []

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def receive(self) -> Message:
        raise AssertionError("nobody asks for the body")


def observed_services() -> Services:
    return cast(
        Services,
        SimpleNamespace(tracing=start_tracing("api", ""), metrics=Mock(), settings=ApiSettings(), large_bytes=0),
    )


async def answered(exchange: Exchange) -> dict[str, Any]:
    """The state as the application found it."""
    found: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.update(scope["state"], type=header(scope, b"content-type"), none=header(scope, b"prefer", "nothing"))
        del found["server_send"]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    await Observed(app, observed_services())(exchange.scope, exchange.receive, exchange.send)
    return found


async def test_headers_are_found_by_name_and_the_first_counts() -> None:
    names = [(b"content-type", b"one"), (b"content-type", b"two"), (b"x-request-id", b"mine"), (b"x-request-id", b"!")]
    found = await answered(Exchange(names))
    assert (found["type"], found["none"], found["request_id"]) == ("one", "nothing", "mine")


async def test_a_trace_that_is_sent_is_carried_on() -> None:
    state = [(b"traceparent", TRACE.encode()), (b"tracestate", b"k=v")]
    assert (await answered(Exchange(state)))["trace"] == {"traceparent": TRACE, "tracestate": "k=v"}
    assert (await answered(Exchange(state[1:])))["trace"]["traceparent"] != TRACE


@pytest.mark.parametrize(
    ("path", "route", "status", "error"),
    [
        ("/v1/jobs/job_1", "/v1/jobs/{job_id}", 200, None),
        ("/v1/models/gone", "/v1/models/{model:path}", 404, None),
        ("/admin/dlq", "/admin/dlq", 403, None),
        ("/elsewhere", "other", 503, "HTTP 503"),
    ],
)
async def test_a_request_is_told_by_its_route_and_status(path: str, route: str, status: int, error: str | None) -> None:
    """To traces and to metrics; only what is our fault is an error."""
    span, metrics, exchange = MagicMock(), Mock(), Exchange([])
    span.carrier.return_value = {}
    exchange.scope["path"] = path

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if route != "other":
            scope["state"]["route"] = route  # as the guard does
        await send({"type": "http.response.start", "status": status, "headers": []})

    tracing = SimpleNamespace(enter=Mock(return_value=span))
    services = cast(Services, SimpleNamespace(tracing=tracing, metrics=metrics, settings=ApiSettings(), large_bytes=0))
    await Observed(app, services)(exchange.scope, exchange.receive, exchange.send)
    tracing.enter.assert_called_once_with("GET", {})
    attributes = {"http.request.method": "GET", "http.response.status_code": status, "http.route": route}
    if status >= 400:
        attributes["error.type"] = str(status)
    span.end.assert_called_once_with(error=error, attributes=attributes, name=f"GET {route}")
    metrics.requests.labels.assert_called_once_with("", route, str(status))


@pytest.mark.parametrize("started", [False, True])
async def test_a_request_that_a_drain_cuts_off_is_told_so(started: bool) -> None:
    """With a complete answer, unless one has begun: that connection is closed."""
    services, exchange = observed_services(), Exchange([])

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise asyncio.CancelledError

    asked = Observed(app, services)(exchange.scope, exchange.receive, exchange.send)
    if started:
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert len(exchange.sent) == 1
        return
    await asked
    assert exchange.sent[0]["status"] == 503 and b'"draining"' in exchange.sent[1]["body"]


async def test_a_request_leaves_nothing_to_the_garbage_collector() -> None:
    """It would wait there with all it held, some thousand times a second, and every stream waits for a collection."""
    gc.disable()
    try:
        exchange = Exchange([])
        gone = weakref.ref(exchange)
        await answered(exchange)
        assert exchange.sent
        del exchange
        assert gone() is None
    finally:
        gc.enable()


async def test_a_client_that_leaves_while_the_store_is_asked_is_no_error(
    wire: RedisClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, left, lose = asyncio.Event(), asyncio.Event(), Connection.connection_lost
    async with api_in_process(RedisClient.open(wire.settings)) as api:
        recent = api.services.summaries.recent

        async def slow(*args: Any) -> Any:
            asked.set()
            await left.wait()
            return await recent(*args)

        def lost(connection: Connection, error: Exception | None) -> None:
            lose(connection, error)
            left.set()

        monkeypatch.setattr(api.services.summaries, "recent", slow)
        monkeypatch.setattr(Connection, "connection_lost", lost)
        asking = asyncio.create_task(api.client.get("/v1/jobs"))
        await asked.wait()
        asking.cancel()
        await until(lambda: b'endpoint="/v1/jobs"' in api.services.metrics.expose())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("error", "started"),
    [(RuntimeError("secret"), False), (RuntimeError("secret"), True), (errors.offset_gone(), True)],
)
async def test_a_bug_and_what_breaks_off_an_answer_are_in_the_log_with_the_request(
    error: Exception, started: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what would have been a refusal before the answer began. A client is told the id of the line, not the
    exception, and the server closes the connection."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if started:
            scope["state"]["status"] = 200
        raise error

    async def endpoint(_request: Request) -> Any:
        return answer

    app, exchange = Starlette(), Exchange([])
    app.state.services = SimpleNamespace(metrics=Mock(), large_bytes=0)
    exchange.scope["state"].update(request_id="r-8", headers={}, endpoint=endpoint)
    with pytest.raises(type(error)):
        await Endpoints(app)(exchange.scope, exchange.receive, exchange.send)
    (record,) = [each for each in caplog.records if each.message == "request failed"]
    assert vars(record)["request_id"] == "r-8" and record.exc_info is not None
    assert bool(exchange.sent) != started
    if not started:
        assert exchange.sent[0]["status"] == 500
        assert b"r-8" in exchange.sent[1]["body"] and b"secret" not in exchange.sent[1]["body"]


async def test_a_request_leaves_one_line_without_what_its_client_wrote(caplog: pytest.LogCaptureFixture) -> None:
    """The route of the table instead of the path; of a path without one, the words that routes have. No
    probe is logged, and a client's own id is searched for secrets."""
    given = [(b"x-request-id", b"sk-ant-api03-" + b"a" * 40), (b"authorization", b"Bearer sk-secret")]
    services = observed_services()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/v1/jobs/"):
            scope["state"].update(route="/v1/jobs/{job_id}")
        scope["state"].update(caller=LOCAL_CALLER, job="job_1")
        await send({"type": "http.response.start", "status": 404, "headers": []})

    async def ask(path: str, headers: list[tuple[bytes, bytes]], *, access_log: bool = True) -> None:
        exchange = Exchange(headers)
        exchange.scope |= {"path": path, "query_string": b"token=sk-query"}
        services.settings = ApiSettings(access_log=access_log)
        await Observed(app, services)(exchange.scope, exchange.receive, exchange.send)

    with caplog.at_level("INFO"):
        await ask("/v1/jobs/sk-path", given)
        await ask("/healthz", given)
        await ask("/v1/jobs/x", [], access_log=False)
    (line,) = [vars(record) for record in caplog.records if record.name == "api.access"]
    fields = ("method", "route", "status", "tenant", "job")
    assert [line[name] for name in fields] == ["GET", "/v1/jobs/{job_id}", 404, "local", "job_1"]
    assert line["ms"] >= 0 and "aaaa" not in str([line[name] for name in (*fields, "path", "request_id", "message")])
    caplog.clear()
    with caplog.at_level("INFO"):
        await ask("/v1/secret/completions", [])
        await ask("/b" * 10_000, [])
    typo, long = [vars(record) for record in caplog.records if record.name == "api.access"]
    assert (typo["route"], typo["path"], line["path"]) == (None, "/v1/.../completions", None)
    assert long["path"] == "/..." * 100
