"""ASGI application: the route table, the mapping of exceptions to error answers, and the middleware around them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from api import batches, chat, events, files, health, jobs, models, timing
from api.admin import dead_letters as admin
from api.admin import pools, tenants, webhooks
from api.auth.guard import RequestGuard, answer
from api.middleware import Observed
from api.openai import errors
from api.openai.errors import ApiError
from api.services import Services
from streaming.errors import Unavailable, UnknownBatch, UnknownFile, UnknownJob, UnknownMessage

log = logging.getLogger(__name__)

COMPLETIONS: dict[str, ASGIApp] = {
    "/v1/chat/completions": chat.Completions("chat"),
    "/v1/completions": chat.Completions("completion"),
}

ROUTES = [
    *(Route(path, endpoint, methods=["POST"]) for path, endpoint in COMPLETIONS.items()),
    Route("/v1/models", models.listing),
    Route("/v1/models/{model:path}", models.show),
    Route("/v1/jobs", jobs.create, methods=["POST"]),
    Route("/v1/jobs", jobs.listing),
    Route("/v1/jobs/{job_id}", jobs.show),
    Route("/v1/jobs/{job_id}/result", jobs.result),
    Route("/v1/jobs/{job_id}/events", events.events),
    Route("/v1/jobs/{job_id}/timing", timing.show),
    Route("/v1/jobs/{job_id}/cancel", jobs.cancel, methods=["POST"]),
    Route("/v1/files", files.create, methods=["POST"]),
    Route("/v1/files", files.listing),
    Route("/v1/files/{file_id}", files.show),
    Route("/v1/files/{file_id}", files.delete, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", files.content),
    Route("/v1/batches", batches.create, methods=["POST"]),
    Route("/v1/batches", batches.listing),
    Route("/v1/batches/{batch_id}", batches.show),
    Route("/v1/batches/{batch_id}/output", batches.output),
    Route("/v1/batches/{batch_id}/errors", batches.failures),
    Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
    Route("/v1/batches/{batch_id}/pause", batches.pause, methods=["POST"]),
    Route("/v1/batches/{batch_id}/resume", batches.resume, methods=["POST"]),
    Route("/admin/dlq", admin.listing),
    Route("/admin/dlq/{letter_id}", admin.show),
    Route("/admin/dlq/{letter_id}", admin.drop, methods=["DELETE"]),
    Route("/admin/dlq/{letter_id}/replay", admin.replay, methods=["POST"]),
    Route("/admin/webhooks", webhooks.listing),
    Route("/admin/webhooks/{message_id}", webhooks.show),
    Route("/admin/webhooks/{message_id}/replay", webhooks.replay, methods=["POST"]),
    Route("/admin/tenants", tenants.listing),
    Route("/admin/tenants/{tenant:path}", tenants.show),
    Route("/admin/pools", pools.listing),
    Route("/admin/pools/{model:path}", pools.show),
    Route("/admin/pools/{model:path}", pools.override, methods=["PUT"]),
    Route("/admin/pools/{model:path}", pools.resume, methods=["DELETE"]),
    Route("/healthz", health.healthz),
    Route("/readyz", health.readyz),
    Route("/version", health.version),
    Route("/metrics", health.metrics),
    Route("/openapi.json", health.openapi),
    Route("/", health.root),
]


def build_app(services: Services, on_ready: Callable[[], None] = lambda: None) -> ASGIApp:
    """Build the application. Its lifespan starts and stops `services`, and calls `on_ready` in between."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        await services.start()
        on_ready()
        yield
        await services.stop()

    app = Starlette(
        routes=ROUTES,
        exception_handlers={**HANDLERS, Exception: _bug},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect would go to any host that the request names
    app.state.services = services
    return Observed(RequestGuard(Shortcut(app), services), services)


class Shortcut:
    """Fast path for completions: calls their endpoint without the framework's layers, which would add half of the
    endpoint's own cost. Errors are answered by the same handlers."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = COMPLETIONS.get(scope.get("path", ""))
        if endpoint is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        scope["app"] = self._app
        try:
            await endpoint(scope, receive, send)
        except Exception as error:  # one request must not stop the others
            handler = next((HANDLERS[kind] for kind in type(error).__mro__ if kind in HANDLERS), _bug)
            started = "status" in scope["state"]
            if not started:
                response = await handler(Request(scope), error)
                await response(scope, receive, send)
            if started or handler is _bug:  # the server logs it and closes the connection
                raise


def _answer(request: Request, error: ApiError) -> Response:
    services: Services = request.app.state.services
    return answer(services, error)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(request, error)


async def _client_gone(request: Request, _error: Exception) -> Response:
    """The client disconnected before the end of its request. Nobody reads this answer; metrics count its status."""
    log.debug(
        "a client disconnected in the middle of its request", extra={"request_id": request.scope["state"]["request_id"]}
    )
    return Response(status_code=CLIENT_GONE)


async def _unavailable(request: Request, error: Exception) -> Response:
    log.warning("refused, the store is down: %s", error)
    return _answer(request, errors.store_unavailable())


async def _not_found(request: Request, error: Exception) -> Response:
    return _answer(request, NOT_FOUND[type(error)]())


async def _bug(request: Request, error: Exception) -> Response:
    """Log an unexpected exception, and answer with the request id by which to find it in the log."""
    request_id = request.scope["state"]["request_id"]
    log.error("request failed", exc_info=error, extra={"request_id": request_id})
    return _answer(request, errors.internal_error(request_id))


CLIENT_GONE = 499
"""Status of a client that disconnected, as nginx logs it; no standard defines one."""

NOT_FOUND: dict[type[Exception], Callable[[], ApiError]] = {
    UnknownJob: errors.job_not_found,
    UnknownFile: errors.file_not_found,
    UnknownBatch: errors.batch_not_found,
    UnknownMessage: errors.webhook_not_found,
}

HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _api_error,
    ClientDisconnect: _client_gone,
    Unavailable: _unavailable,
    **dict.fromkeys(NOT_FOUND, _not_found),
}
