"""Host names: which ones mean this machine, and refusal of requests whose Host header names another server.

The refusal protects against DNS rebinding: a web page whose domain resolves to 127.0.0.1 has the same origin as this
server for a browser, and only the Host header shows the difference.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache

from api.auth import access_errors

HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::[0-9]{0,5})?")
PROBES = frozenset(("/healthz", "/readyz"))
"""Health probes: answered for any Host (with keys) and beyond the connection limits, because a cluster calls them by a
pod's address, which no setting can list. They reveal nothing about jobs."""


class Hosts:
    """Checks Host headers. Without keys the server answers to loopback names and the listed ones, on every path."""

    def __init__(self, allowed: Iterable[str], *, keyless: bool) -> None:
        self._allowed = frozenset(name.lower() for name in allowed)
        self._keyless = keyless
        self._any = not keyless and not self._allowed

    def check(self, value: bytes | None, path: str, http_version: str) -> None:
        """Check a Host header (`value`). Raises ApiError (421)."""
        if self._any:
            return
        if value is None and http_version == "1.0":
            return
        if value is not None and _is_loopback_host(value):
            return
        name = host_name(value or b"")
        if name in self._allowed or (path in PROBES and not self._keyless):
            return
        refusal = access_errors.foreign_host if self._keyless else access_errors.unlisted_host
        raise refusal(name or _as_text(value))


@lru_cache(maxsize=256)
def _is_loopback_host(value: bytes) -> bool:
    return is_loopback_name(host_name(value))


def host_name(value: bytes) -> str:
    """Return the name in a Host header, in lower case and without the port; "" if it is malformed."""
    match = HOST.fullmatch(value.decode("latin-1"))
    return match[1].lower().strip("[]") if match else ""


def _as_text(value: bytes | None) -> str:
    return "" if value is None else value.decode("latin-1")


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


def is_loopback_name(name: str) -> bool:
    """Like `is_loopback`, for names that a browser requested: browsers resolve *.localhost to this machine."""
    bare = name.lower().removesuffix(".")
    if bare == LOCALHOST or bare.endswith(".localhost"):
        return NAME.fullmatch(bare) is not None
    return is_loopback(name)
