"""Guard of outgoing connections: a name leads to public addresses alone, or to allowed networks."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

import httpcore2

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

PUBLIC_6 = ipaddress.IPv6Network("2000::/3")
TUNNELS = (ipaddress.IPv6Network("2002::/16"), ipaddress.IPv6Network("2001::/32"))
"""6to4 and Teredo: these addresses embed an IPv4 address, to which a relay would connect."""
ERRORS = (
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.TimeoutException,
    httpcore2.UnsupportedProtocol,
    TimeoutError,
    OSError,
)
"""What a request of a guarded pool may raise."""
RESERVED = (ipaddress.IPv4Network("192.88.99.0/24"), ipaddress.IPv4Network("192.0.0.0/24"))


class Forbidden(httpcore2.ConnectError):
    """Raised instead of connecting to an address that is not public."""


def networks_of(words: Iterable[str]) -> tuple[Network, ...]:
    """Parse networks in CIDR notation. Raises ValueError."""
    return tuple(ipaddress.ip_network(word) for word in words)


def refusal(text: str, allowed: Sequence[Network]) -> str:
    """Return why this address may not be connected to; "" if it may."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address in network for network in allowed):
        return ""
    return "" if _public(address) else f"{address} is not a public address, and no `networks` names it"


def _public(address: Address) -> bool:
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        return address in PUBLIC_6 and not any(address in network for network in TUNNELS)
    return not any(address in network for network in RESERVED)


def guarded_pool(networks: Iterable[str], context: ssl.SSLContext) -> httpcore2.AsyncConnectionPool:
    """One connection for each request, so that its name is looked up and checked each time. Raises ValueError."""
    backend = GuardedBackend(networks_of(networks))
    return httpcore2.AsyncConnectionPool(ssl_context=context, max_keepalive_connections=0, network_backend=backend)


class GuardedBackend(httpcore2.AsyncNetworkBackend):
    """Network backend for httpcore that resolves a host name once, checks every address, and connects to a checked one.

    So a second look-up (DNS rebinding) cannot lead elsewhere. TLS still verifies the certificate against the name.
    Raises Forbidden, ConnectError, TimeoutError.
    """

    def __init__(self, allowed: Sequence[Network]) -> None:
        self._allowed, self._plain = allowed, httpcore2.AnyIOBackend()
        self._threads = ThreadPoolExecutor(8, "names")
        """Of its own: names that are slow to be looked up hold up no other work in threads."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's own signature
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to the first address of the name that answers; refuse if any of them is forbidden."""
        addresses = await self._addresses(host, port)
        for address in addresses:
            if reason := refusal(address, self._allowed):
                raise Forbidden(reason)
        problem: Exception = httpcore2.ConnectError(f"{host} has no address")
        for address in addresses:
            try:
                return await self._plain.connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore2.ConnectError as error:
                problem = error
        raise problem

    async def _addresses(self, host: str, port: int) -> list[str]:
        try:
            look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(f"{host} cannot be looked up: {error}") from error
        return list(dict.fromkeys(str(row[4][0]) for row in found))
