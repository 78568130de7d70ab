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
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment

ENVIRONMENT = "environment"
"""The setting that takes the proxy from the variables."""
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


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
        return f"{'https' if self.secure else 'http'}://{bracketed(self.host)}:{self.port}"

    async def connect(self, host: str, port: int, context: ssl.SSLContext | None) -> asyncio.Transport:
        """Open a tunnel to a server, encrypted with `context`. Raises OSError, in words that name the proxy."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        own = ssl.create_default_context() if self.secure else None
        transport: asyncio.Transport | None
        try:
            transport, protocol = await loop.create_connection(
                lambda: asyncio.StreamReaderProtocol(reader), self.host, self.port, ssl=own
            )
        except OSError as error:
            raise OSError(f"no connection to the proxy {self.name}: {error.strerror or error}") from None
        target, tunnel = f"{bracketed(host)}:{port}", transport
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}", "User-Agent: penstock"]
        lines += [f"Proxy-Authorization: {self.authorization}"] if self.authorization else []
        head = b""
        try:
            tunnel.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
            with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
                head = await reader.readuntil(b"\r\n\r\n")  # the server says nothing before it is spoken to
            if (found := STATUS.match(head)) is None:
                raise OSError(f"the proxy {self.name} gave no valid reply to CONNECT {target}")
            if (status := int(found[1])) not in range(200, 300):
                reason = "needs other credentials" if status == 407 else f"refuses CONNECT {target}"
                raise OSError(f"the proxy {self.name} {reason} (HTTP {status})")
            if context is not None:
                transport = await loop.start_tls(tunnel, protocol, context, server_hostname=host)
            if transport is None:
                raise OSError(f"the proxy {self.name} closed the tunnel")
        except BaseException:  # a time limit too
            tunnel.abort()
            raise
        return transport


def address_problem(url: str, example: str) -> str:
    """Why something is no address such as the example, with or without a path; "" if it is. A password in it is not
    repeated."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # whose words may repeat a part of a password
        return f"not an address such as {example}"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return f"expected an address such as {example}, got {parts.scheme or 'no scheme'}"
    return "an address ends with its path, without ? and #" if parts.query or parts.fragment else ""


def proxy_problem(url: str) -> str:
    """Why a setting names no proxy; "" if it does, or is ENVIRONMENT or empty."""
    if url in ("", ENVIRONMENT):
        return ""
    has_path = '"environment", or an address that ends with its port'
    return address_problem(url, "http://proxy:3128") or (has_path if urlsplit(url).path.strip("/") else "")


def proxy_for(setting: str, host: str, port: int, *, secure: bool) -> Proxy | None:
    """The proxy that leads to a server; None: there is none. Raises ValueError for a variable that names none.

    Args:
        setting: "", ENVIRONMENT, or the address of a proxy.
    """
    url = setting
    if setting == ENVIRONMENT:
        proxies = getproxies_environment()
        if _is_excluded(host, port, proxies.get("no", "")):
            return None
        url = (proxies.get("https" if secure else "http") or proxies.get("all", "")).strip()
        url = url if "://" in url or not url else f"http://{url}"
        if problem := proxy_problem(url):
            raise ValueError(f"the environment names no proxy for {host}: {problem}")
    if not url:
        return None
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    authorization = ""
    if parts.username:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode()
    return Proxy(parts.hostname or "", parts.port or (443 if secure else 80), secure, authorization)


def _is_excluded(host: str, port: int, rules: str) -> bool:
    """Whether NO_PROXY excludes a server: by its name or its domain, each with or without a port, or by its address or
    network; `*` excludes all."""
    host = host.lower().rstrip(".")
    given = [rule.rstrip(".") for rule in rules.lower().replace(",", " ").split()]
    names = [rule.removeprefix("*").removeprefix(".") or rule for rule in given]
    bare, whole = f".{bracketed(host)}", f".{bracketed(host)}:{port}"
    by_name = any(name == "*" or bare.endswith(f".{name}") or whole.endswith(f".{name}") for name in names)
    return by_name or any(_is_within(host, port, name) for name in names)


def _is_within(host: str, port: int, rule: str) -> bool:
    """Whether a rule is an address or a network of the host's, with or without its port."""
    network, _, at = rule.rpartition(":")
    for each in (rule, network if at == str(port) else ""):
        with suppress(ValueError):  # one of them is a name
            if ipaddress.ip_address(host) in ipaddress.ip_network(each.strip("[]"), strict=False):
                return True
    return False


def bracketed(host: str) -> str:
    """A host in an address: one of version 6 is put into brackets."""
    return f"[{host}]" if ":" in host else host
