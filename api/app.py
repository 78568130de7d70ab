"""ASGI application: calls endpoints, maps their exceptions to error answers, and puts the middleware around them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
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
from api.responses import Responses
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
        scope["app"], state = self._app, scope["state"]
        receive, endpoint = decoded(scope, receive), state["endpoint"]
        try:
            if isinstance(endpoint, (JobEndpoint, Responses)):  # a union is made anew at each call
                await endpoint(scope, receive, send)
            else:
                await (await endpoint(Request(scope, receive, send)))(scope, receive, send)
        except Exception as error:  # one request must not stop the others
            answer = None if "status" in state else self._answer_to(error, scope)
            if answer is not None:
                await answer(scope, receive, send)
                return
            # A bug, or anything that breaks off an answer. The server closes the connection.
            log.error("request failed", exc_info=error, extra={"request_id": state["request_id"]})
            answer = self._refused(errors.internal_error(state["request_id"]), scope)
            if "status" not in state:
                await answer(scope, receive, send)
            raise

    def _answer_to(self, error: Exception, scope: Scope) -> Response | None:
        """Return the answer to an exception; None to one that is a bug."""
        if isinstance(error, ClientDisconnect):  # nobody reads this answer; metrics count its status
            log.debug("a client disconnected in its request", extra={"request_id": scope["state"]["request_id"]})
            return Response(status_code=CLIENT_GONE)
        if isinstance(error, store.Unavailable):
            log.warning("refused, the store is down: %s", error)
            return self._refused(errors.store_unavailable(read=scope["method"] in ("GET", "HEAD")), scope)
        refusal = next((REFUSED[kind] for kind in type(error).__mro__ if kind in REFUSED), None)
        return None if refusal is None else self._refused(refusal(error), scope)

    def _refused(self, error: ApiError, scope: Scope) -> Response:
        scope["state"]["code"] = error.code
        return error_response(self._app.state.services, error)


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
