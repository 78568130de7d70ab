"""GET /console: the console's page and its files, with a strict content security policy.

The page is the same for every address below /console, but for its relative links; its scripts read the address. Files
are served below a hash of all of them, so a browser keeps them for ever and never mixes two versions. Here too are its
login and logout, and the link that `penstock console` opens.
"""

from __future__ import annotations

import hashlib
import re
import time
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.admission import caller_of, read_body, services_of
from api.auth.console import link_path, set_cookie
from api.auth.keys import Caller
from api.jobs import as_json
from api.openai import errors
from api.openai.json_body import read_object
from streaming.fleet.processes import LINK_S, SESSION_S

TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
FOREVER = "public, max-age=31536000, immutable"
REVALIDATED = "no-cache"


async def page(request: Request) -> Response:
    """GET /console and every address below it: the page."""
    data = _page("../" * (request.scope["path"].count("/") - 1))
    return _cached(request, data, "text/html; charset=utf-8", REVALIDATED)


async def asset(request: Request) -> Response:
    """GET /console/assets/{build}/{name}: a file of the console; 404 if there is none of that name.

    A page of another version gets this version's file, which it must not keep.
    """
    name, build = request.path_params["name"], request.path_params["build"]
    data = assets().get(name)
    if data is None:
        raise errors.unknown_route()
    kept = FOREVER if build == build_hash() else REVALIDATED
    return _cached(request, data, f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8", kept)


@cache
def assets() -> dict[str, bytes]:
    """Read every file of the console but its page, by name."""
    folder = files("api.console") / "static"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in TYPES}


@cache
def build_hash() -> str:
    """Return a hash of all files."""
    digest = hashlib.sha256()
    for name, data in sorted(assets().items()):
        digest.update(name.encode() + b"\0" + data)
    return digest.hexdigest()[:16]


@lru_cache(maxsize=16)
def _page(root: str) -> bytes:
    """`root`: the way from the page's address to that of the API; a proxy may serve both below a path of its own."""
    text = (files("api.console") / "static" / "index.html").read_text(encoding="utf-8")
    scripts = sorted(name for name in assets() if name.endswith(".js"))
    links = "\n".join(f'<link rel="modulepreload" href="/console/assets/{{build}}/{name}">' for name in scripts)
    text = text.replace("{modules}", links).replace("{build}", build_hash())
    return re.sub(r'(href|src)="/', rf'\1="{root}', text).encode()


def _cached(request: Request, data: bytes, kind: str, kept: str) -> Response:
    """Return a file, or 304 if the browser has it."""
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag, "Cache-Control": kept}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=kind)


# --- login, logout, and the link that opens the console ---------------------------------------------------------------


MAX_BODY_BYTES = 4096


async def login(request: Request) -> Response:
    """POST /console/session with {"link": ...} or {"key": ...}: open a session. Sets its cookie; the answer has its
    token. 401 for a used or unknown link or key, 403 for a key that may not administer."""
    services, headers = services_of(request), request.scope["state"]["headers"]
    body = read_object(await read_body(request.scope, request.receive, MAX_BODY_BYTES))
    try:
        caller = await _caller(request, body)
        cookie, token = await services.console.begin(caller)
    except errors.ApiError as error:
        services.audit.logged_in(request.scope, error)
        raise
    request.scope["state"]["caller"] = caller
    services.audit.logged_in(request.scope, None)
    answer = {"object": "console.session", "token": token, "expires_at": int(time.time()) + SESSION_S}
    return as_json(answer, headers={"Set-Cookie": set_cookie(headers, cookie), "Cache-Control": "no-store"})


async def show(request: Request) -> Response:
    """Show who you are to the console.

    GET /admin/console/session: show who asks, and which version this is.
    """
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
    """End the console's session that sends this.

    DELETE /admin/console/session: end the session that sent this.
    """
    services, headers = services_of(request), request.scope["state"]["headers"]
    await services.console.end(headers)
    answer = {"object": "console.session", "deleted": True}
    return as_json(answer, headers={"Set-Cookie": set_cookie(headers, "", 0)})


async def link(request: Request) -> Response:
    """Make a link that opens the console once.

    POST /admin/console/links: make a link that opens a session of this admin, once, within an hour; 201.
    """
    services, caller = services_of(request), caller_of(request)
    secret = await services.console.link(caller)
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
    caller = await services.console.redeem(given)
    if caller is None:
        again = "Make a new one where Penstock runs: penstock console"
        raise errors.invalid_api_key(f"This link was used or is older than an hour. {again}")
    return caller
