"""Web pages of other origins: refused at a server without keys, and let in by a list (CORS).

A browser adds `Origin` and `Sec-Fetch-Site` by itself, and no page can change them. Other programs send neither, so
they are not concerned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from starlette.responses import Response
from starlette.types import Message, Scope, Send

from api.auth import access_errors
from api.auth.loopback import is_loopback_name
from api.openai import errors
from api.settings import ORIGIN

ANY_ORIGIN = "*"
CORS_PATH_PREFIX = "/v1/"
"""CORS concerns the routes of callers alone, never /admin."""
OWN_SITES = (b"same-origin", b"none")
"""What Sec-Fetch-Site says of a page of this server, and of an address that somebody typed."""

EXPOSED = (
    *("X-Job-Id", "X-Request-Id", "Retry-After", "retry-after-ms", "x-should-retry", "Location"),
    *("X-Queue-Position", "X-Queue-ETA-Ms", "X-Ignored-Fields", "Preference-Applied", "openai-processing-ms"),
)
"""Headers of answers that a page may read."""
MAX_REQUEST_HEADERS = 2048
HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
MAX_AGE_S = 600


class Origins:
    """The origin policy of one server. One with keys refuses no origin: a page has no key to send."""

    def __init__(self, allowed: Iterable[str], *, keyless: bool) -> None:
        self._allowed = frozenset(origin.encode() for origin in allowed)
        self._keyless = keyless

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Refuse what a page of another origin sent to a server without keys. Raises ApiError (403)."""
        if not self._keyless:
            return
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is not None:
            if self.allows(origin, path):
                return
            if not _is_loopback_origin(origin):
                raise _foreign(origin)
        if site is not None and site not in OWN_SITES and not _is_visit(method, path, headers):
            raise access_errors.foreign_site(site.decode("latin-1")) if origin is None else _foreign(origin)

    def allows(self, origin: bytes | None, path: str) -> bool:
        """Whether pages of this origin may use the path and read its answer."""
        if not self._allowed or origin is None or not path.startswith(CORS_PATH_PREFIX):
            return False
        return origin in self._allowed or ANY_ORIGIN.encode() in self._allowed

    def preflight(self, methods: Iterable[str], path: str, headers: Mapping[bytes, bytes]) -> Response | None:
        """The answer to a browser that asks before it sends; None for any other OPTIONS.

        Args:
            methods: those of the route.

        Raises:
            ApiError: 403, for a page of an origin that is not listed.
        """
        origin = headers.get(b"origin")
        if b"access-control-request-method" not in headers or origin is None or not path.startswith(CORS_PATH_PREFIX):
            return None
        if not self.allows(origin, path):
            raise access_errors.unlisted_origin(origin.decode("latin-1"))
        asked = headers.get(b"access-control-request-headers", b"")
        if len(asked) > MAX_REQUEST_HEADERS or (asked and not HEADER_NAMES.fullmatch(asked)):
            return None
        told = {"Access-Control-Allow-Methods": ", ".join(sorted(methods)), "Access-Control-Max-Age": str(MAX_AGE_S)}
        if asked:
            told["Access-Control-Allow-Headers"] = asked.decode("latin-1")
        return Response(status_code=204, headers=told)

    def marking(self, scope: Scope, send: Send) -> Send:
        """`send`, with the headers of CORS on the head of the answer where an origin may be concerned."""
        if not self._allowed or not scope["path"].startswith(CORS_PATH_PREFIX):
            return send
        origin: bytes | None = scope["state"]["headers"].get(b"origin")
        added = [(b"vary", b"Origin")]
        if origin is not None and self.allows(origin, scope["path"]):
            added += [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", ", ".join(EXPOSED).encode()),
            ]

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        return marked


@lru_cache(maxsize=256)
def _is_loopback_origin(origin: bytes) -> bool:
    """A page of this machine, on whatever port; "null" (a sandboxed frame, a file, a redirect) is not."""
    match = ORIGIN.fullmatch(origin.decode("latin-1"))
    return match is not None and match["scheme"] in ("http", "https") and is_loopback_name(match["host"])


def _foreign(origin: bytes) -> errors.ApiError:
    text = origin.decode("latin-1")
    return access_errors.foreign_origin(text, can_be_listed=ORIGIN.fullmatch(text) is not None)


def _is_visit(method: str, path: str, headers: Mapping[bytes, bytes]) -> bool:
    """A link to the front page that somebody followed: it has no effect, and the page that had the link reads nothing.
    In a frame it is refused."""
    return (
        method in ("GET", "HEAD")
        and path == "/"
        and headers.get(b"sec-fetch-mode") == b"navigate"
        and headers.get(b"sec-fetch-dest") == b"document"
    )
