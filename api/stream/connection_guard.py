"""Connection guard: what all connections of one API process share, so that none of them costs the others.

It counts connections, in total and per client, and holds their deadlines. A connection beyond a limit is not
refused when it is accepted but when its request line is known, because health probes are answered in any case. Few such
connections are kept: the newest one takes the place of the oldest.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from typing import Protocol

from api.auth.loopback import is_loopback
from api.openai.errors import ApiError
from api.settings import ApiSettings
from api.stream import connection_errors
from api.stream.deadlines import DeadlineQueue

IDLE_TIMEOUT_S = 75.0
"""A connection that was answered and sends nothing more is closed after so long."""
LINGER_TIMEOUT_S = 5.0
"""How long a client may go on sending what is dropped after its request was refused, so that it reads the refusal."""
MAX_SURPLUS = 256
"""Connections beyond the limits that are kept until their request line is known; and health probes among them that are
being answered."""
MAX_EXPIRED_AT_ONCE = 100
"""Connections that expire in one turn of the event loop; the others follow RESUME_SWEEP_S later."""
RESUME_SWEEP_S = 0.01
CLIENT_BITS = 64
"""Of an IPv6 address, those that say whose it is: a client has all addresses that begin with them."""


class GuardedConnection(Protocol):
    """A connection as the guard sees it: one method for each of its deadlines."""

    @property
    def address(self) -> str:
        """The client's IP address, "" if there is none."""

    def head_overdue(self) -> None: ...

    def body_overdue(self) -> None: ...

    def idle_overdue(self) -> None: ...

    def linger_overdue(self) -> None: ...

    def write_overdue(self) -> None: ...

    def turn_away(self) -> None:
        """Its place among the connections beyond the limits goes to another one."""


class ConnectionGuard:
    """Made once per process. `sweep` must be called about once a second.

    Args:
        settings: the limits and timeouts.
        count: called with the error code of every refusal.
    """

    def __init__(self, settings: ApiSettings, count: Callable[[str], None] = lambda code: None) -> None:
        self.settings, self.count = settings, count
        self.head = DeadlineQueue[GuardedConnection](settings.header_timeout_s, lambda it: it.head_overdue())
        self.body = DeadlineQueue[GuardedConnection](settings.body_timeout_s, lambda it: it.body_overdue())
        self.idle = DeadlineQueue[GuardedConnection](IDLE_TIMEOUT_S, lambda it: it.idle_overdue())
        self.lingering = DeadlineQueue[GuardedConnection](LINGER_TIMEOUT_S, lambda it: it.linger_overdue())
        self.writing = DeadlineQueue[GuardedConnection](
            settings.send_timeout_s, lambda connection: connection.write_overdue()
        )
        self._queues = (self.head, self.body, self.idle, self.lingering, self.writing)
        self._trusted = settings.proxy_networks
        self._admitted: dict[GuardedConnection, str] = {}
        """The client that each is counted for, "" if it is counted in the total only."""
        self._per_client: dict[str, int] = {}
        self._surplus: dict[GuardedConnection, None] = {}
        self._probes: set[GuardedConnection] = set()

    def admit(self, connection: GuardedConnection) -> bool:
        """Count a connection; False if it is beyond a limit. It may be tried again, and must be released."""
        settings = self.settings
        client = self._client_of(connection.address)
        if len(self._admitted) < settings.max_connections and (
            not client or self._per_client.get(client, 0) < settings.max_connections_per_client
        ):
            self._surplus.pop(connection, None)
            self._admitted[connection] = client
            if client:
                self._per_client[client] = self._per_client.get(client, 0) + 1
            return True
        if connection not in self._surplus:
            self._surplus[connection] = None
            if len(self._surplus) > MAX_SURPLUS:
                oldest = next(iter(self._surplus))
                del self._surplus[oldest]
                oldest.turn_away()
        return False

    def refusal(self) -> ApiError:
        """The answer to a connection beyond a limit, which names the limit and its setting."""
        most = self.settings.max_connections
        if len(self._admitted) >= most:
            return connection_errors.too_many_connections(most)
        return connection_errors.too_many_connections_of_a_client(self.settings.max_connections_per_client)

    def admit_probe(self, connection: GuardedConnection) -> bool:
        """Let a health probe beyond the limits be answered; no other connection may take its place then. False if
        MAX_SURPLUS are being answered already."""
        if len(self._probes) >= MAX_SURPLUS:
            return False
        self._surplus.pop(connection, None)
        self._probes.add(connection)
        return True

    def release(self, connection: GuardedConnection) -> None:
        """The connection is closed."""
        self._surplus.pop(connection, None)
        self._probes.discard(connection)
        client = self._admitted.pop(connection, "")
        if client:
            left = self._per_client[client] - 1
            if left:
                self._per_client[client] = left
            else:
                del self._per_client[client]

    def sweep(self) -> None:
        """Expire what is overdue, in portions: closing thousands of connections at once would hold up all streams."""
        loop = asyncio.get_running_loop()
        left = MAX_EXPIRED_AT_ONCE
        for queue in self._queues:
            left -= queue.sweep(loop.time(), left)
        if not left:
            loop.call_later(RESUME_SWEEP_S, self.sweep)

    def _client_of(self, address: str) -> str:
        """Whom a connection is counted for: an IPv4 address, also one that is written as IPv6, or an IPv6 network of
        CLIENT_BITS. "" for loopback, trusted proxies, and sockets without an IP address."""
        if not address or is_loopback(address):
            return ""
        client = ipaddress.ip_address(address.partition("%")[0])
        client = getattr(client, "ipv4_mapped", None) or client
        if any(client in network for network in self._trusted):
            return ""
        return str(ipaddress.ip_network((client, CLIENT_BITS), strict=False) if client.version == 6 else client)
