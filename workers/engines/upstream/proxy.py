"""Outgoing proxy: which one leads to a server by the settings or by the environment, and how a connection goes through.

A connection to any server is a tunnel (CONNECT), so that the proxy sees neither requests nor keys of an https server,
and connections are kept as without a proxy.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import re
import ssl
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment

ENVIRONMENT = "environment"
"""The setting that takes the proxy from the variables."""


MAX_PROXY_HEAD_BYTES = 64 << 10


TUNNEL_OPEN, NO_REPLY = range(200, 300), 0


STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


class ProxyError(OSError):
    """The proxy opens no tunnel."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy."""

    host: str
    port: int
    secure: bool
    """Whether the connection to the proxy itself is encrypted."""
    authorization: str = field(default="", repr=False)
    """Header with user and password; shown by nothing."""

    @property
    def name(self) -> str:
        """Its address without user and password."""
        return f"{'https' if self.secure else 'http'}://{_bracketed(self.host)}:{self.port}"

    async def connect(self, host: str, port: int) -> asyncio.Transport:
        """Open a tunnel to a server. Raises OSError, in words that name the proxy."""
        context = ssl.create_default_context() if self.secure else None
        try:
            transport, tunnel = await asyncio.get_running_loop().create_connection(
                _Tunnel, self.host, self.port, ssl=context
            )
        except OSError as error:
            raise ProxyError(f"no connection to the proxy {self.name}: {error.strerror or error}") from None
        target = f"{_bracketed(host)}:{port}"
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}", "User-Agent: penstock"]
        lines += [f"Proxy-Authorization: {self.authorization}"] if self.authorization else []
        try:
            transport.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
            status = await tunnel.status
            if status == NO_REPLY:
                raise ProxyError(f"the proxy {self.name} gave no valid reply to CONNECT {target}")
            if status not in TUNNEL_OPEN:
                reason = "needs other credentials" if status == 407 else f"refuses CONNECT {target}"
                raise ProxyError(f"the proxy {self.name} {reason} (HTTP {status})")
        except BaseException:  # a time limit too
            transport.abort()
            raise
        return transport


class _Tunnel(asyncio.Protocol):
    """Reads the proxy's reply to CONNECT. The server says nothing before it is spoken to."""

    def __init__(self) -> None:
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._head = b""

    def data_received(self, data: bytes) -> None:
        self._head += data
        if b"\r\n\r\n" in self._head or len(self._head) > MAX_PROXY_HEAD_BYTES:
            found = STATUS.match(self._head)
            self._settle(int(found[1]) if found else NO_REPLY)

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle(NO_REPLY)

    def _settle(self, status: int) -> None:
        if not self.status.done():
            self.status.set_result(status)


def proxy_problem(url: str) -> str:
    """Why a setting names no proxy; "" if it does, or is ENVIRONMENT or empty. A password in it is not repeated."""
    if url in ("", ENVIRONMENT):
        return ""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "not an address"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return f'expected "environment" or an address such as http://proxy:3128, got {parts.scheme or "no scheme"}'
    if parts.path.strip("/") or parts.query or parts.fragment:
        return "the address of a proxy ends with its port"
    return ""


def proxy_for(setting: str, host: str, port: int, *, secure: bool) -> Proxy | None:
    """The proxy that leads to a server; None: there is none. Raises ValueError for a variable that names none.

    Args:
        setting: "", ENVIRONMENT, or the address of a proxy.
    """
    if setting != ENVIRONMENT:
        return _proxy_at(setting) if setting else None
    proxies = getproxies_environment()
    if _is_excluded(host, port, proxies.get("no", "")):
        return None
    found = (proxies.get("https" if secure else "http") or proxies.get("all", "")).strip()
    if not found:
        return None
    url = found if "://" in found else f"http://{found}"
    if proxy_problem(url):
        raise ValueError(f"the environment names no proxy for {host}: {proxy_problem(url)}")
    return _proxy_at(url)


def _proxy_at(url: str) -> Proxy:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    authorization = ""
    if parts.username:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode()
    return Proxy(parts.hostname or "", parts.port or (443 if secure else 80), secure, authorization)


def _is_excluded(host: str, port: int, rules: str) -> bool:
    """Whether NO_PROXY excludes a server: by its name, its domain, its address or network, each with or without a port;
    `*` excludes all."""
    host = host.lower().rstrip(".")
    address = _address(host)
    for rule in rules.replace(",", " ").lower().split():
        name, at = _split_port(rule)
        if rule == "*":
            return True
        if at is not None and at != port:
            continue
        if address is not None and (network := _network(name)) is not None:
            if address.version == network.version and address in network:
                return True
        elif host == (domain := name.removeprefix("*").strip(".")) or (domain and host.endswith("." + domain)):
            return True
    return False


def _split_port(rule: str) -> tuple[str, int | None]:
    name, _, port = rule.rpartition(":")
    if not port.isdecimal() or not name or (":" in name and not name.endswith("]")):
        return rule.strip("[]"), None  # no port, or an address of version 6
    return name.strip("[]"), int(port)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _network(name: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(name, strict=False)
    except ValueError:
        return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
