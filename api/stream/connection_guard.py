"""Connection guard: limits the connections of one API process, in total and per client, and enforces their timeouts.

A connection beyond a limit is refused only once its request line is known, because health probes are always answered.
The guard keeps at most MAX_SURPLUS such connections; a new one evicts the oldest.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from typing import Protocol

from api.auth.hosts import is_loopback
from api.openai.errors import ApiError
from api.settings import ApiSettings
from api.stream import connection_errors
from api.stream.deadlines import DeadlineQueue

LINGER_TIMEOUT_S = 5.0
"""How long a refused client may keep sending (its bytes are dropped), so that it can read the refusal."""
ENDING_TIMEOUT_S = 1.0
"""How long a connection on which nothing was sent may hold up the end of the server."""
MAX_SURPLUS = 256
"""Connections beyond the limits that may wait for their request line; and, separately, health probes among them."""
MAX_EXPIRED_PER_SWEEP = 100
"""Connections expired in one iteration of the event loop; the others follow SWEEP_RESUME_DELAY_S later."""
SWEEP_RESUME_DELAY_S = 0.01
SWEEP_INTERVAL_S = 1.0
CLIENT_BITS = 64
"""Prefix length of an IPv6 client: it usually owns all addresses of its /64."""


class GuardedConnection(Protocol):
    """Interface of a connection to the guard: a method for each timeout."""

    @property
    def address(self) -> str:
        """The client's IP address; "" for a UNIX socket."""

    def head_overdue(self) -> None: ...

    def body_overdue(self) -> None: ...

    def idle_overdue(self) -> None: ...

    def linger_overdue(self) -> None: ...

    def write_overdue(self) -> None: ...

    def turn_away(self) -> None:
        """Close: a newer connection beyond the limits takes this one's place."""


class ConnectionGuard:
    """One per process. Its owner must run `keep_sweeping`.

    Args:
        settings: the limits and timeouts.
        count: called with the error code of every refusal.
    """

    def __init__(self, settings: ApiSettings, count: Callable[[str], None] = lambda code: None) -> None:
        self.settings, self.count = settings, count
        self.head = DeadlineQueue[GuardedConnection](settings.header_timeout_s, lambda it: it.head_overdue())
        self.body = DeadlineQueue[GuardedConnection](settings.body_timeout_s, lambda it: it.body_overdue())
        self.idle = DeadlineQueue[GuardedConnection](settings.idle_timeout_s, lambda it: it.idle_overdue())
        self.lingering = DeadlineQueue[GuardedConnection](LINGER_TIMEOUT_S, lambda it: it.linger_overdue())
        self.ending = DeadlineQueue[GuardedConnection](ENDING_TIMEOUT_S, lambda it: it.idle_overdue())
        self.writing = DeadlineQueue[GuardedConnection](
            settings.send_timeout_s, lambda connection: connection.write_overdue()
        )
        self._queues = (self.head, self.body, self.idle, self.lingering, self.ending, self.writing)
        self._trusted = settings.proxy_networks
        self._admitted: dict[GuardedConnection, str] = {}
        """The client that each connection counts for; "" if it counts in the total only."""
        self._per_client: dict[str, int] = {}
        self._surplus: dict[GuardedConnection, None] = {}
        self._probes: set[GuardedConnection] = set()

    def admit(self, connection: GuardedConnection) -> bool:
        """Count a connection; False if it is beyond a limit. May be called again later; `release` is due either way."""
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
        """Return the error for a connection beyond a limit; it names the limit and its setting."""
        most = self.settings.max_connections
        if len(self._admitted) >= most:
            return connection_errors.too_many_connections(most)
        return connection_errors.too_many_connections_of_a_client(self.settings.max_connections_per_client)

    def admit_probe(self, connection: GuardedConnection) -> bool:
        """Let a health probe beyond the limits be answered, safe from eviction. False if MAX_SURPLUS probes are being
        answered already."""
        if len(self._probes) >= MAX_SURPLUS:
            return False
        self._surplus.pop(connection, None)
        self._probes.add(connection)
        return True

    def release(self, connection: GuardedConnection) -> None:
        """Uncount a closed connection."""
        self._surplus.pop(connection, None)
        self._probes.discard(connection)
        client = self._admitted.pop(connection, "")
        if client:
            left = self._per_client[client] - 1
            if left:
                self._per_client[client] = left
            else:
                del self._per_client[client]

    async def keep_sweeping(self) -> None:
        """Sweep once a second, for ever."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self.sweep()

    def sweep(self) -> None:
        """Expire overdue connections, in portions: closing thousands at once would delay all streams."""
        loop = asyncio.get_running_loop()
        left = MAX_EXPIRED_PER_SWEEP
        for queue in self._queues:
            left -= queue.sweep(loop.time(), left)
        if not left:
            loop.call_later(SWEEP_RESUME_DELAY_S, self.sweep)

    def _client_of(self, address: str) -> str:
        """Return the client that a connection counts for: an IPv4 address (also an IPv4-mapped one) or an IPv6 network
        of CLIENT_BITS; "" for loopback, trusted proxies and UNIX sockets."""
        if not address or is_loopback(address):
            return ""
        client = ipaddress.ip_address(address.partition("%")[0])
        client = getattr(client, "ipv4_mapped", None) or client
        if any(client in network for network in self._trusted):
            return ""
        return str(ipaddress.ip_network((client, CLIENT_BITS), strict=False) if client.version == 6 else client)
