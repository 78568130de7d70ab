"""Host names this server answers to.

A page whose own name was made to resolve to 127.0.0.1 (DNS rebinding) is of the server's origin in the eyes of a
browser; only the Host header shows that the request is meant for another server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from api.auth import access_errors
from api.auth.loopback import is_loopback_name

HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::[0-9]{0,5})?")
PROBES = frozenset(("/healthz", "/readyz"))
"""Answered to any Host (with keys), and beyond the caps of connections: a cluster asks these by a pod's address, which
nobody can list. They say nothing about anybody's work."""


class Hosts:
    """The Host check. Without keys only loopback names are served, on every path."""

    def __init__(self, allowed: Iterable[str], *, keyless: bool) -> None:
        self._allowed = frozenset(name.lower() for name in allowed)
        self._keyless = keyless
        self._any = not keyless and not self._allowed

    def check(self, value: bytes | None, path: str, http_version: str) -> None:
        """`value` is the Host header. Raises ApiError (421)."""
        if self._any:
            return
        if value is None and http_version == "1.0":
            return
        if value is not None and _is_loopback_host(value):
            return
        name = host_name(value or b"")
        if self._keyless:
            raise access_errors.foreign_host(name or _shown(value))
        if name not in self._allowed and path not in PROBES:
            raise access_errors.unlisted_host(name or _shown(value))


@lru_cache(maxsize=256)
def _is_loopback_host(value: bytes) -> bool:
    return is_loopback_name(host_name(value))


def host_name(value: bytes) -> str:
    """The name in a Host header, in lower case and without its port; "" if it is no such header."""
    match = HOST.fullmatch(value.decode("latin-1"))
    return match[1].lower().strip("[]") if match else ""


def _shown(value: bytes | None) -> str:
    return "" if value is None else value.decode("latin-1")
