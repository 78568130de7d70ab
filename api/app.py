"""ASGI application: calls endpoints, maps their exceptions to error answers, and puts the middleware around them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.admin.overview import LiveOverview
from api.auth.guard import RequestGuard
from api.chat import JobEndpoint
from api.error_answers import error_response
from api.middleware import Observed, decoded
from api.openai import errors
from api.openai.errors import ApiError
from api.openapi import document
from api.responses.endpoints import Responses
from api.services import Services
from streaming import errors as store

log = logging.getLogger(__name__)


def build_app(services: Services, on_ready: Callable[[], None] = lambda: None) -> ASGIApp:
    """Build the application. Its lifespan starts and stops `services`, and calls `on_ready` in between."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        await services.start()
        on_ready()
        yield
        await services.stop()

    app = Starlette(lifespan=lifespan)
    app.state.services = services
    app.state.overview = LiveOverview(services)
    app.state.document = cache(
        partial(document, services.version, services.settings.base_path)
    )  # built when it is first asked for
    return Observed(RequestGuard(Endpoints(app), services), services)


class Endpoints:
    """Calls the endpoint that the guard has found, with a decoded body, and turns its errors into answers.

    The framework has no part in a request: its layers would add half of a chat's own cost. Endpoints that answer with a
    job are ASGI applications; all others take a Request and return the answer.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self._app
        receive, endpoint = decoded(scope, receive), scope["state"]["endpoint"]
        try:
            if isinstance(endpoint, (JobEndpoint, Responses)):  # a union is made anew at each call
                await endpoint(scope, receive, send)
            else:
                await (await endpoint(Request(scope, receive, send)))(scope, receive, send)
        except Exception as error:  # one request must not stop the others
            started = "status" in scope["state"]
            handler = next((HANDLERS[kind] for kind in type(error).__mro__ if kind in HANDLERS and not started), _bug)
            response = await handler(Request(scope), error)
            if not started:
                await response(scope, receive, send)
            if handler is _bug:  # the server logs it and closes the connection
                raise


def _answer(request: Request, error: ApiError) -> Response:
    services: Services = request.app.state.services
    request.scope["state"]["code"] = error.code
    return error_response(services, error)


async def _client_gone(request: Request, _error: Exception) -> Response:
    """The client disconnected before the end of its request. Nobody reads this answer; metrics count its status."""
    log.debug(
        "a client disconnected in the middle of its request", extra={"request_id": request.scope["state"]["request_id"]}
    )
    return Response(status_code=CLIENT_GONE)


async def _unavailable(request: Request, error: Exception) -> Response:
    log.warning("refused, the store is down: %s", error)
    return _answer(request, errors.store_unavailable(read=request.method in ("GET", "HEAD")))


async def _refused(request: Request, error: Exception) -> Response:
    return _answer(request, next(REFUSED[kind] for kind in type(error).__mro__ if kind in REFUSED)(error))


async def _bug(request: Request, error: Exception) -> Response:
    """Log an unexpected exception, or any that breaks off an answer, and answer with the request id by which to find
    it in the log."""
    request_id = request.scope["state"]["request_id"]
    log.error("request failed", exc_info=error, extra={"request_id": request_id})
    return _answer(request, errors.internal_error(request_id))


CLIENT_GONE = 499
"""Status of a client that disconnected, as nginx logs it; no standard defines one."""

REFUSED: dict[type[Exception], Callable[[Any], ApiError]] = {
    ApiError: lambda error: error,
    store.UnknownJob: lambda _: errors.job_not_found(),
    store.UnknownFile: lambda _: errors.file_not_found(),
    store.UnknownBatch: lambda _: errors.batch_not_found(),
    store.UnknownMessage: lambda _: errors.webhook_not_found(),
    store.UnknownConversation: lambda _: errors.conversation_not_found(),
    store.ConversationChanged: lambda _: errors.conversation_locked(),
    store.QuotaExceeded: errors.quota_exceeded,
    store.StoreFull: lambda error: errors.store_full(str(error)),
    store.KeyReused: lambda _: errors.idempotency_key_reused(),
}
"""The answers to errors that mean the same at every endpoint, such as those of the store."""

HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ClientDisconnect: _client_gone,
    store.Unavailable: _unavailable,
    **dict.fromkeys(REFUSED, _refused),
}
