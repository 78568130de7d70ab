"""Request guard: authenticates and authorizes every request before any endpoint runs.

It checks, in this order: proxy headers, the Host name, the origin, the route's row in the access table, the caller.
Endpoints read the caller from `scope["state"]["caller"]` and authenticate nobody themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.auth import access_errors, audit
from api.auth.access import Access, RouteMatch
from api.auth.access_errors import Refusals
from api.auth.console import TOKEN_HEADER
from api.auth.hosts import PROBES, Hosts, Origins
from api.auth.keys import Caller
from api.error_answers import error_response
from api.openai import errors
from api.openai.errors import ApiError
from api.routes import TABLE
from api.services import Services
from streaming.errors import Unavailable

PROXIED = frozenset((
    *(b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"cf-connecting-ip", b"true-client-ip", b"x-original-host"),
    *(b"x-forwarded-" + each for each in (b"for", b"host", b"proto", b"port", b"prefix", b"server", b"scheme")),
))  # fmt: skip
"""Headers that proxies add. A server without keys refuses them: behind a proxy, every request seems local."""


class RequestGuard:
    """ASGI middleware that runs the guard; it is wrapped by api/middleware.py."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app, self._services, self._keyring = app, services, services.keyring
        self._refusals = Refusals()
        settings, keyless = services.settings, self._keyring.open
        self._hosts = Hosts(settings.hosts, keyless=keyless)
        self._origins = Origins(settings.cors_origins, keyless=keyless)
        self._base_path = settings.base_path
        self._metrics = Access.ANYONE if settings.shows_metrics(keyless=keyless) else Access.ADMIN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["state"]["headers"]
        scope["state"]["cors"] = self._origins.cors_headers(scope["path"], headers)
        try:
            operator = await self._operator(headers) if TOKEN_HEADER in headers else None
            admitted = self._admit(scope, operator)
        except ApiError as error:
            self._refusals.log_once(error, scope["path"])
            scope["state"]["code"] = error.code
            await error_response(self._services, error)(scope, receive, send)
            return
        if isinstance(admitted, Response):
            await admitted(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if admitted.route.action:
                audit.acted(scope, admitted)

    async def _operator(self, headers: Mapping[bytes, bytes]) -> Caller | None:
        """Return the admin whose session of the console sent a request with its token; None for every other. Raises
        ApiError (503)."""
        if b"authorization" in headers:
            return None
        try:
            return await self._services.console.caller(headers)
        except Unavailable:
            raise errors.store_unavailable(read=True) from None

    def _admit(self, scope: Scope, operator: Caller | None) -> RouteMatch | Response:
        """Return the row of an allowed request, or the answer to a CORS preflight. Raises ApiError."""
        path, found = scope["path"], None
        try:
            found = TABLE.find(scope["method"], path)
            if found is not None:
                scope["state"]["route"], scope["state"]["endpoint"] = found.route.path, found.route.endpoint
                scope["path_params"] = found.params
            self._check_sender(scope)
            if found is None:
                return self._unlisted(scope)
            if (caller := self._caller(found.route.access, scope, operator)) is not None:
                scope["state"]["caller"] = caller
        except ApiError as error:
            if path.startswith("/admin"):
                audit.refused(scope, found, error)
            raise
        return found

    def _check_sender(self, scope: Scope) -> None:
        """Check proxy headers, Host and origin. Raises ApiError (403, 421)."""
        headers, path = scope["state"]["headers"], scope["path"]
        if self._keyring.open and path not in PROBES and not PROXIED.isdisjoint(headers):
            raise access_errors.proxy_without_keys()
        self._hosts.check(headers.get(b"host"), path, scope["http_version"])
        self._origins.check(scope["method"], path, headers)

    def _unlisted(self, scope: Scope) -> Response:
        """Return the answer to a CORS preflight; for anything else raise ApiError (403, 404, 405)."""
        methods = TABLE.methods(scope["path"])
        if not methods:
            raise errors.unknown_route(self._base_path, TABLE.meant(scope["method"], scope["path"]))
        if scope["method"] == "OPTIONS":
            preflight = self._origins.preflight(methods, scope["path"], scope["state"]["headers"])
            if preflight is not None:
                return preflight
        raise errors.method_not_allowed({*methods, "HEAD"} if "GET" in methods else methods)

    def _caller(self, access: Access, scope: Scope, operator: Caller | None) -> Caller | None:
        """Return the authenticated caller; None on a route open to anyone. Raises ApiError (401, 403)."""
        if access is Access.METRICS:
            access = self._metrics
        if access is Access.ANYONE:
            return None
        if operator is not None:
            return operator
        authorization = scope["state"]["headers"].get(b"authorization", b"").decode("latin-1")
        if access is Access.CALLER:
            return self._keyring.caller(authorization)
        if not self._keyring.open:
            scope["state"]["caller"] = self._keyring.caller(
                authorization
            )  # so that the audit log names the refused key
        return self._keyring.admin(authorization)
