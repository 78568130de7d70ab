"""Login and logout of the console, and the link that `penstock console` opens."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.admission import caller_of, read_body, services_of
from api.auth import access_errors, audit
from api.auth.console import ConsoleAccess, link_path, set_cookie
from api.auth.keys import Caller
from api.jobs import as_json
from api.openai import errors
from api.openai.json_body import read_object
from streaming.fleet.processes import LINK_S, SESSION_S

MAX_BODY_BYTES = 4096


async def login(request: Request) -> Response:
    """POST /console/session with {"link": ...} or {"key": ...}: open a session. Sets its cookie; the answer has its
    token. 401 for a used or unknown link or key, 403 for a key that may not administer."""
    services, headers = services_of(request), request.scope["state"]["headers"]
    body = read_object(await read_body(request.scope, request.receive, MAX_BODY_BYTES))
    try:
        caller = await _caller(request, body)
    except errors.ApiError as error:
        audit.logged_in(request.scope, error)
        raise
    request.scope["state"]["caller"] = caller
    cookie, token = await ConsoleAccess(services.keyring, services.console_sessions).begin(caller)
    audit.logged_in(request.scope, None)
    answer = {"object": "console.session", "token": token, "expires_at": int(time.time()) + SESSION_S}
    return as_json(answer, headers={"Set-Cookie": set_cookie(headers, cookie), "Cache-Control": "no-store"})


async def show(request: Request) -> Response:
    """GET /admin/console/session: show who asks, and which version this is."""
    services, caller = services_of(request), caller_of(request)
    return as_json(
        {
            "object": "console.session",
            "name": caller.name or None,
            "tenant": caller.tenant,
            "highest_lane": caller.ceiling.value,
            "has_keys": not services.keyring.open,
            "version": services.version,
        }
    )


async def logout(request: Request) -> Response:
    """DELETE /admin/console/session: end the session that sent this."""
    services, headers = services_of(request), request.scope["state"]["headers"]
    await ConsoleAccess(services.keyring, services.console_sessions).end(headers)
    answer = {"object": "console.session", "deleted": True}
    return as_json(answer, headers={"Set-Cookie": set_cookie(headers, "", 0)})


async def link(request: Request) -> Response:
    """POST /admin/console/links: make a link that opens a session of this admin, once, within an hour; 201."""
    services, caller = services_of(request), caller_of(request)
    secret = await ConsoleAccess(services.keyring, services.console_sessions).link(caller)
    expires_at = int(time.time()) + LINK_S
    path = services.settings.base_path + link_path(secret)
    answer = {"object": "console.link", "path": path, "expires_at": expires_at}
    return as_json(answer, 201, {"Cache-Control": "no-store"})


async def _caller(request: Request, body: dict[str, Any]) -> Caller:
    """Return the admin who logs in. Raises ApiError."""
    services = services_of(request)
    given, key = body.get("link"), body.get("key")
    if given is None and isinstance(key, str):
        return services.keyring.admin(f"Bearer {key}")
    if key is not None or not isinstance(given, str):
        raise errors.invalid_request('Send either "link" or "key", a text.', "key")
    caller = await ConsoleAccess(services.keyring, services.console_sessions).redeem(given)
    if caller is None:
        raise access_errors.used_link()
    return caller
