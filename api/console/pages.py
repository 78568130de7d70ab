"""GET /console: the console's page and its files, with a strict content security policy.

The page is the same for every address below /console, but for its relative links; its scripts read the address. Files
are served below a hash of all of them, so a browser keeps them for ever and never mixes two versions.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache, lru_cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from api.openai import errors

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
