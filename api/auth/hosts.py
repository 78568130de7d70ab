"""Hosts and origins: which host names mean this machine, and refusal of other servers' names and other sites' pages.
Also from which address a request comes.

Refusal by the Host header protects against DNS rebinding: for a browser, a web page whose domain resolves to 127.0.0.1
has the same origin as this server, and only the header shows the difference.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from starlette.responses import Response
from starlette.types import Scope

from api.anthropic.errors import RATES, REQUEST_ID
from api.openai import errors
from api.settings import ORIGIN, ApiSettings

HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::[0-9]{0,5})?")
PROBES = frozenset(("/healthz", "/readyz"))
"""Health probes: answered for any Host (with keys) and beyond the connection limits, because a cluster calls them by a
pod's address, which no setting can list. They reveal nothing about jobs."""


@lru_cache(maxsize=256)
def host_name(value: bytes) -> str:
    """Return the name in a Host header, in lower case and without the port; "" if it is malformed."""
    match = HOST.fullmatch(value.decode("latin-1"))
    return match[1].lower().strip("[]") if match else ""


LOCALHOST = "localhost"
NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on or to call is this machine's: localhost, 127.0.0.0/8, ::1 (also in brackets or
    IPv4-mapped). Any other name could resolve to any address."""
    bare = host.strip("[]").lower()
    if bare == LOCALHOST:
        return True
    try:
        address = ipaddress.ip_address(bare.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@lru_cache(maxsize=256)
def is_loopback_name(name: str) -> bool:
    """Like `is_loopback`, for names that a browser requested: browsers resolve *.localhost to this machine."""
    bare = name.lower().removesuffix(".")
    if bare == LOCALHOST or bare.endswith(".localhost"):
        return NAME.fullmatch(bare) is not None
    return is_loopback(name)


CLIENT_BITS = 64
"""Prefix length of an IPv6 client: it usually owns all addresses of its /64."""


class Addresses:
    """Tells senders apart, also behind proxies. `trusted`: the networks of the proxies."""

    def __init__(self, trusted: Sequence[IPv4Network | IPv6Network]) -> None:
        self._trusted = trusted

    def client_of(self, address: str) -> str:
        """Return the client that an address belongs to: an IPv4 address (also an IPv4-mapped one) or an IPv6 network of
        CLIENT_BITS; "" for loopback, trusted proxies and UNIX sockets."""
        client = None if is_loopback(address) else _parsed(address)
        if client is None or self._is_trusted(client):
            return ""
        network = ipaddress.ip_network((client, CLIENT_BITS), strict=False) if client.version == 6 else client
        return str(network)

    def of(self, scope: Scope) -> str:
        """Return the address that a request comes from: of a connection, or, as its proxy says, the last one in
        X-Forwarded-For that is no proxy's. "" for a UNIX socket."""
        peer: str = (scope.get("client") or ("", 0))[0]
        if not self._trusted or (found := _parsed(peer)) is None or not self._is_trusted(found):
            return peer
        said = b",".join([value for name, value in scope["headers"] if name == b"x-forwarded-for"]).decode("latin-1")
        for word in reversed(said.split(",")):
            if (found := _parsed(word.strip())) is None:
                return peer
            if not self._is_trusted(found):
                return str(found)
        return peer

    def _is_trusted(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self._trusted)


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an address, which may have a port; an IPv4-mapped one is an IPv4 address. None for anything else."""
    for form in (text.partition("%")[0], host_name(text.encode("latin-1", "replace"))):
        with suppress(ValueError):
            address = ipaddress.ip_address(form)
            return getattr(address, "ipv4_mapped", None) or address
    return None


PROXIED = frozenset((
    *(b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"cf-connecting-ip", b"true-client-ip", b"x-original-host"),
    *(b"x-forwarded-" + each for each in (b"for", b"host", b"proto", b"port", b"prefix", b"server", b"scheme")),
))  # fmt: skip
"""Headers that proxies add. A server without keys refuses them: behind a proxy, every request seems local."""
ANY_ORIGIN = "*"
CORS_PATH_PREFIX = "/v1/"
"""CORS applies only to the routes of callers, never to /admin."""
OWN_SITES = (b"same-origin", b"none")
"""Allowed values of Sec-Fetch-Site: from a page of this server, and from an address that a user typed."""

EXPOSED = (
    *("X-Job-Id", "X-Request-Id", "Retry-After", "retry-after-ms", "x-should-retry", "Location"),
    *(REQUEST_ID, *RATES, *RATES.values()),
    *("X-Queue-Position", "X-Queue-ETA-Ms", "X-Ignored-Fields", "X-Served-By", "Preference-Applied"),
    "openai-processing-ms",
    *("Stream-Url", "Stream-Next-Offset", "Stream-Up-To-Date", "Stream-Closed", "Stream-Cursor", "ETag"),
)
"""Answer headers that a page may read."""
MAX_REQUEST_HEADERS_BYTES = 2048
HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
PREFLIGHT_MAX_AGE_S = 600


class Senders:
    """Whom one server serves: by the headers of proxies, the name in the Host header, and the origin of the page."""

    def __init__(self, settings: ApiSettings, *, keyless: bool) -> None:
        self._hosts = frozenset(name.lower() for name in settings.hosts)
        self._origins = frozenset(origin.encode() for origin in settings.cors_origins)
        self._keyless = keyless

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes], http_version: str = "1.1") -> None:
        """Refuse a request that is not served, whoever calls. With keys any origin is served: a foreign page has no key
        to send. Raises ApiError (403, 421)."""
        if self._keyless and path not in PROBES and not PROXIED.isdisjoint(headers):
            raise errors.proxy_without_keys()
        if self._keyless or self._hosts:
            self._check_host(headers.get(b"host"), path, http_version)
        if self._keyless:
            self._check_origin(method, path, headers)

    def _check_host(self, value: bytes | None, path: str, http_version: str) -> None:
        """Without keys the server answers to loopback names and the listed ones, on every path."""
        if value is None and http_version == "1.0":
            return
        name = host_name(value or b"")
        if not (is_loopback_name(name) or name in self._hosts or (path in PROBES and not self._keyless)):
            raise errors.foreign_host(name or (value or b"").decode("latin-1"))

    def _check_origin(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Refuse what a page of another origin sent. Browsers set `Origin` and `Sec-Fetch-Site`, and no page can change
        them; other programs send neither and always pass."""
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is not None:
            if self.allows(origin, path):
                return
            # The Host was checked before, so a page with the same one is this server's own.
            if not _is_loopback_origin(origin) and origin.partition(b"://")[2] != headers.get(b"host"):
                raise errors.foreign_origin(origin.decode("latin-1"))
        if site is not None and site not in OWN_SITES and not _is_visit(method, path, headers):
            raise errors.foreign_origin((origin or b"Sec-Fetch-Site: " + site).decode("latin-1"))

    def allows(self, origin: bytes | None, path: str) -> bool:
        """Whether pages of this origin may request the path and read its answer."""
        if not self._origins or origin is None or not path.startswith(CORS_PATH_PREFIX):
            return False
        return origin in self._origins or ANY_ORIGIN.encode() in self._origins

    def preflight(self, methods: Iterable[str], path: str, headers: Mapping[bytes, bytes]) -> Response | None:
        """Return the answer to a CORS preflight; None for any other OPTIONS request.

        Args:
            methods: the methods of the route.

        Raises:
            ApiError: 403, if the origin is not listed.
        """
        origin = headers.get(b"origin")
        if b"access-control-request-method" not in headers or origin is None or not path.startswith(CORS_PATH_PREFIX):
            return None
        if not self.allows(origin, path):
            raise errors.foreign_origin(origin.decode("latin-1"))
        asked = headers.get(b"access-control-request-headers", b"")
        if len(asked) > MAX_REQUEST_HEADERS_BYTES or (asked and not HEADER_NAMES.fullmatch(asked)):
            return None
        answer_headers = {
            "Access-Control-Allow-Methods": ", ".join(sorted(methods)),
            "Access-Control-Max-Age": str(PREFLIGHT_MAX_AGE_S),
        }
        if asked:
            answer_headers["Access-Control-Allow-Headers"] = asked.decode("latin-1")
        return Response(status_code=204, headers=answer_headers)

    def cors_headers(self, path: str, headers: Mapping[bytes, bytes]) -> Sequence[tuple[bytes, bytes]]:
        """Return the CORS headers of an answer; none where the path or the settings allow no origin."""
        if not self._origins or not path.startswith(CORS_PATH_PREFIX):
            return ()
        vary, origin = (b"vary", b"Origin"), headers.get(b"origin")
        if origin is None or not self.allows(origin, path):
            return (vary,)
        exposed = (b"access-control-expose-headers", ", ".join(EXPOSED).encode())
        return (vary, (b"access-control-allow-origin", origin), exposed)


@lru_cache(maxsize=256)
def _is_loopback_origin(origin: bytes) -> bool:
    """Whether a page comes from this machine, on any port; "null" (a sandboxed frame, a file, a redirect) does not."""
    match = ORIGIN.fullmatch(origin.decode("latin-1"))
    return match is not None and match["scheme"] in ("http", "https") and is_loopback_name(match["host"])


def _is_visit(method: str, path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a user followed a link to "/" or to a page of the console: it changes nothing, and the linking page
    cannot read the answer. The same request from a frame is refused."""
    return (
        method in ("GET", "HEAD")
        and (path in ("/", "/console") or path.startswith("/console/"))
        and headers.get(b"sec-fetch-mode") == b"navigate"
        and headers.get(b"sec-fetch-dest") == b"document"
    )
