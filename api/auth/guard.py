"""Request guard: authenticates and authorizes every request before any endpoint runs.

It checks, in this order: headers that come twice, proxy headers, the Host name, the origin, the route's row in the
access table, the caller, and whether the sender was refused too often.
Endpoints read the caller from `scope["state"]["caller"]` and authenticate nobody themselves.
"""

from __future__ import annotations

import logging
import time

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.anthropic.errors import body_of
from api.auth.console import TOKEN_HEADER
from api.auth.floods import REFUSED, Floods
from api.auth.hosts import Addresses, Senders
from api.auth.keys import Caller, token_of
from api.openai import errors
from api.openai.errors import ApiError
from api.routes import TABLE, Access, RouteMatch, endpoint_of
from api.services import Services
from api.stream.connection_guard import invalid_http
from streaming.errors import Unavailable

log = logging.getLogger(__name__)

LOGGED = frozenset(("foreign_origin", "misdirected_request", "proxy_without_keys"))
"""The browser shows only a CORS or network error for these, so the operator needs the reason in the log."""
MAX_LOGGED = 64
"""Reasons that one process logs: senders choose the origins and hosts in them, so the number must be bounded."""
MAX_PATH = 128
"""Characters of a path that are logged."""


KEY_HEADER = b"x-api-key"
"""Has the key alone, where the Authorization header has none."""
SINGLE = frozenset((b"host", b"authorization", KEY_HEADER, b"origin", b"sec-fetch-site", TOKEN_HEADER))
"""Headers that decide who may do what. Of two of a name, a proxy in front may have judged by the other one."""


def _check_single(scope: Scope) -> None:
    """Refuse a request that has one of the SINGLE headers twice. Raises ApiError (400)."""
    names = [name for name, _ in scope["headers"] if name in SINGLE]
    for name in SINGLE:
        if names.count(name) > 1:
            raise invalid_http(f"it has the header {name.decode()} {names.count(name)} times, send it once")


def error_response(services: Services, error: ApiError, scope: Scope) -> Response:
    """Return the JSON answer to a refused request, which counts as an error told to a client."""
    body = body_of(error, services.metrics.count_error, scope)
    return Response(body, error.status, error.headers, media_type="application/json")


class RequestGuard:
    """ASGI middleware that runs the guard; api/app.py wraps it."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app, self._services, self._keyring = app, services, services.keyring
        self._adapt()
        self._floods = Floods(services.settings, Addresses(services.settings.proxy_networks))
        self._logged: set[str] = set()
        """The refusals that this process has logged: each origin and host has one of its own."""

    def _adapt(self) -> None:
        """Read whether the server has keys, which the first created one changes."""
        settings, self._keyless = self._services.settings, self._keyring.open
        self._senders = Senders(settings, keyless=self._keyless)
        self._metrics = Access.ANYONE if settings.shows_metrics(keyless=self._keyless) else Access.ADMIN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._keyring.open is not self._keyless:
            self._adapt()
        state = scope["state"]
        found = TABLE.find(scope["method"], scope["path"])
        if found is not None:
            state.update(route=found.route.path, endpoint=found.route.endpoint)
            scope["path_params"] = found.params
        if (answer := await self._judged(scope, found)) is not None:
            await answer(scope, receive, send)
            return
        caller: Caller | None = state.get("caller")
        try:
            if caller is None or caller.created is None:
                await self._app(scope, receive, send)
            else:
                if caller.created.id:
                    self._services.used_keys[caller.name] = int(time.time() * 1000)
                with self._services.open_answers.of(caller.created):
                    await self._app(scope, receive, send)
        finally:
            if state.get("status") in REFUSED:
                self._floods.count(scope)
            if found is not None and found.route.action:
                self._services.audit.acted(scope, found)

    async def _judged(self, scope: Scope, found: RouteMatch | None) -> Response | None:
        """Return the answer to a request that no endpoint gets; None if it may go on."""
        state, path = scope["state"], scope["path"]
        state["cors"] = self._senders.cors_headers(path, state["headers"])
        try:
            if len(state["headers"]) != len(scope["headers"]):
                _check_single(scope)
            self._senders.check(scope["method"], path, state["headers"], scope["http_version"])
            if found is None:
                return self._unlisted(scope)
            await self._authenticate(found.route.access, scope)
            only = caller.endpoints if (caller := state.get("caller")) is not None else ()
            if only and (name := endpoint_of(found.route.path)) not in only:
                raise errors.outside_of_key("endpoints", name)
            if self._floods.buckets.full_at:
                self._floods.check(scope)
        except ApiError as error:  # no other variable may keep it: with its traceback it would be a cycle
            error = (self._floods.count(scope) if error.status < 429 else None) or error
            if path.startswith("/admin"):
                self._services.audit.refused(scope, found, error)
            self.log_once(error, path, state["address"])
            state["code"] = error.code
            return error_response(self._services, error, scope)
        return None

    def _unlisted(self, scope: Scope) -> Response:
        """Return the answer to a CORS preflight; for anything else raise ApiError (403, 404, 405)."""
        method, path = scope["method"], scope["path"]
        methods = TABLE.methods(path)
        if not methods:
            raise errors.unknown_route(self._services.settings.base_path, TABLE.meant(method, path))
        preflight = self._senders.preflight(methods, path, scope["state"]["headers"]) if method == "OPTIONS" else None
        if preflight is None:
            raise errors.method_not_allowed({*methods, "HEAD"} if "GET" in methods else methods)
        return preflight

    async def _authenticate(self, access: Access, scope: Scope) -> None:
        """Note the caller in the scope, unless the route is open to anyone: the holder of a key or, with the token of a
        console's page, its admin. Raises ApiError (401, 403, 503)."""
        state, keyring = scope["state"], self._keyring
        if access is Access.METRICS:
            access = self._metrics
        if access is Access.ANYONE:
            return
        if not keyring.known:
            raise errors.store_unavailable(read=scope["method"] in ("GET", "HEAD"))
        headers = state["headers"]
        if TOKEN_HEADER in headers and b"authorization" not in headers and KEY_HEADER not in headers:
            try:
                state["caller"] = await self._services.console.caller(headers)
            except Unavailable:
                raise errors.store_unavailable(read=True) from None
            if state["caller"] is not None:
                return
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        if KEY_HEADER in headers and not token_of(authorization):
            authorization = "Bearer " + headers[KEY_HEADER].decode("latin-1")
        if keyring.issuer is not None:
            await keyring.issuer.ready(authorization)
        is_keyless = keyring.open or keyring.is_admin_token(authorization)
        if access is Access.CALLER or not is_keyless:  # so that the audit log names a refused key, too
            state["caller"] = keyring.caller(authorization)
        if access is Access.ADMIN:
            state["caller"] = keyring.admin(authorization)

    def log_once(self, error: ApiError, path: str, address: str) -> None:
        """Log a new reason with its fix as one warning; after MAX_LOGGED of them, log once that no more follow."""
        if error.code not in LOGGED or error.message in self._logged or len(self._logged) > MAX_LOGGED:
            return
        self._logged.add(error.message)
        if len(self._logged) > MAX_LOGGED:
            log.warning("more origins and hosts are refused; this process logs no more of them")
            return
        # The sender's values are quoted, so that they cannot forge a log line.
        words = (error.code, path[:MAX_PATH], error.message)
        log.warning("refused (%s) a request for %r: %s", *words, extra={"code": error.code, "address": address})
