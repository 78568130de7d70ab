"""Connection guard: limits the connections of one API process, in total and per client, and enforces their timeouts.

A connection beyond a limit is refused only once its request line is known, because health probes are always answered.
The guard keeps at most MAX_SURPLUS such connections; a new one evicts the oldest. DrainingServer stops uvicorn
without resetting connections whose request is on its way.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import selectors
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from http import HTTPStatus
from types import FrameType
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import uvicorn

from api.anthropic import errors as anthropic
from api.auth.hosts import Addresses
from api.openai.errors import ApiError, retry_after
from api.openai.rendering import error_body, to_json
from api.settings import ApiSettings
from penstock.loops import coalesced, wait

Item = TypeVar("Item")


class DeadlineQueue(Generic[Item]):
    """Items that expire `timeout_s` after they entered.

    All items of a queue have the same timeout, so they expire in the order in which they entered, and a sweep reads
    only the expired ones. That is cheaper than a timer of the event loop for each connection.

    Args:
        timeout_s: how long an item may stay.
        on_expired: called by `sweep` with each item that stayed longer; the item has left the queue by then.
    """

    __slots__ = ("_entered", "_on_expired", "timeout_s")

    def __init__(self, timeout_s: float, on_expired: Callable[[Item], None]) -> None:
        self.timeout_s = timeout_s
        self._on_expired = on_expired
        self._entered: dict[Item, float] = {}

    def __len__(self) -> int:
        return len(self._entered)

    def enter(self, item: Item, now_s: float) -> None:
        """Start the item's timeout. An item that is in the queue must leave it first."""
        self._entered[item] = now_s

    def leave(self, item: Item) -> None:
        """End the item's timeout. Idempotent."""
        self._entered.pop(item, None)

    def sweep(self, now_s: float, at_most: int) -> int:
        """Expire up to `at_most` items whose timeout has passed; returns how many expired."""
        overdue = itertools.takewhile(lambda entry: entry[1] <= now_s - self.timeout_s, self._entered.items())
        expired = [item for item, _ in itertools.islice(overdue, at_most)]
        for item in expired:
            del self._entered[item]
        for item in expired:
            self._on_expired(item)
        return len(expired)


CONNECTION_RETRY_S = 5
"""Retry-After for a client that was refused a connection."""


def invalid_http(reason: str) -> ApiError:
    return ApiError(400, "invalid_http", f"The request is not valid HTTP: {reason}.")


def headers_too_large(max_bytes: int, max_fields: int) -> ApiError:
    message = (
        f"The request line and header fields have more than {max_bytes} bytes or {max_fields} fields "
        "([api] max_header_bytes, max_headers). Large cookies of other local sites are a common cause; send fewer."
    )
    return ApiError(431, "headers_too_large", message)


def request_timeout(what: str, setting: str) -> ApiError:
    """`what` did not arrive in the time that a setting of [api] gives it."""
    message = f"The request's {what} did not arrive in time ([api] {setting}). Nothing was accepted."
    return ApiError(408, "request_timeout", message)


def too_many_connections(most: int, setting: str) -> ApiError:
    """`most`: the connections that a setting of [api] allows, in all or from one address."""
    message = (
        f"This server takes {most} connections and has them ([api] {setting}). Close some, or try later; if yours come "
        "through a proxy, add it to [api] trusted_proxies."
    )
    return ApiError(503, "too_many_connections", message, headers=retry_after(CONNECTION_RETRY_S))


def answer_of(
    error: ApiError, count: Callable[[str], object], url: bytes = b"", fields: Iterable[tuple[bytes, bytes]] = ()
) -> bytes:
    """A whole HTTP answer, the last one of its connection, which `count` counts. `url` and header `fields`: of its
    request, as far as they are known."""
    body = error_body(error, count)
    if anthropic.is_asked(url.decode("latin-1"), dict(fields)):
        body = to_json(anthropic.error_object(error))
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers | error.headers).items())
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{lines}\r\n"
    return head.encode("latin-1") + body


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


class ConnectionGuard:
    """The limits and timeouts of one process's connections. Its owner must run `keep_sweeping`.

    Args:
        settings: the limits and timeouts.
        count: called with the error code of every refusal.
    """

    def __init__(self, settings: ApiSettings, count: Callable[[str], None] = lambda code: None) -> None:
        self.settings, self.count = settings, count
        self.head: DeadlineQueue[Connection] = DeadlineQueue(settings.header_timeout_s, lambda it: it.head_overdue())
        self.body: DeadlineQueue[Connection] = DeadlineQueue(settings.body_timeout_s, lambda it: it.body_overdue())
        self.idle: DeadlineQueue[Connection] = DeadlineQueue(settings.idle_timeout_s, lambda it: it.idle_overdue())
        self.lingering: DeadlineQueue[Connection] = DeadlineQueue(LINGER_TIMEOUT_S, lambda it: it.linger_overdue())
        self.ending: DeadlineQueue[Connection] = DeadlineQueue(ENDING_TIMEOUT_S, lambda it: it.idle_overdue())
        self.writing: DeadlineQueue[Connection] = DeadlineQueue(settings.send_timeout_s, lambda it: it.write_overdue())
        self._queues = (self.head, self.body, self.idle, self.lingering, self.ending, self.writing)
        self._client_of = Addresses(settings.proxy_networks).client_of
        self.handshakes: set[asyncio.Task[bool]] = set()
        """Connections before TLS is agreed on."""
        self._admitted: dict[Counted, str] = {}
        """The client that each connection counts for; "" if it counts in the total only."""
        self._per_client: Counter[str] = Counter()
        self._surplus: dict[Counted, None] = {}
        self._probes: set[Counted] = set()

    def admit(self, connection: Counted) -> bool:
        """Count a connection; False if it is beyond a limit. May be called again later; `release` is due either way."""
        settings = self.settings
        client = self._client_of(connection.address)
        if len(self._admitted) < settings.max_connections and (
            not client or self._per_client[client] < settings.max_connections_per_client
        ):
            self._surplus.pop(connection, None)
            self._admitted[connection] = client
            if client:
                self._per_client[client] += 1
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
        setting = "max_connections"
        if len(self._admitted) < self.settings.max_connections:
            setting = "max_connections_per_client"
        return too_many_connections(getattr(self.settings, setting), setting)

    def admit_probe(self, connection: Connection) -> bool:
        """Let a health probe beyond the limits be answered, safe from eviction. False if MAX_SURPLUS probes are being
        answered already."""
        if len(self._probes) >= MAX_SURPLUS:
            return False
        self._surplus.pop(connection, None)
        self._probes.add(connection)
        return True

    def release(self, connection: Counted) -> None:
        """Uncount a closed connection."""
        self._surplus.pop(connection, None)
        self._probes.discard(connection)
        client = self._admitted.pop(connection, "")
        if client:
            self._per_client[client] -= 1
            if not self._per_client[client]:
                del self._per_client[client]

    async def keep_sweeping(self) -> None:
        """Sweep once a second, for ever."""
        while True:
            await asyncio.sleep(coalesced(SWEEP_INTERVAL_S))
            self.sweep()

    def sweep(self) -> None:
        """Expire overdue connections, in portions: closing thousands at once would delay all streams."""
        loop = asyncio.get_running_loop()
        left = MAX_EXPIRED_PER_SWEEP
        for queue in self._queues:
            left -= queue.sweep(loop.time(), left)
        if not left:
            loop.call_later(SWEEP_RESUME_DELAY_S, self.sweep)


RESERVED_FILES = 2 * MAX_SURPLUS + 256
"""Open files besides the counted connections: refused connections, Redis, logs, uploads."""


def allowed_connections(wanted: int) -> int:
    """Return how many connections this process may have open, at most `wanted`.

    Raises the soft limit as far as needed and as the hard limit allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return allowed_by(max(limit, soft), wanted)


def allowed_by(limit: int, wanted: int) -> int:
    """Return how many connections fit into a limit of `limit` open files, at most `wanted`."""
    return max(1, min(wanted, limit - RESERVED_FILES))


# --- the draining server ----------------------------------------------------------------------------------------------


TICK_INTERVAL_S = 1.0
"""Interval at which the date in the heads of answers is renewed. uvicorn ticks ten times as often; each tick wakes a
process whose caches are cold: 3.5 % of the CPU per token at 16 streams (`bench gateway --base`, 2026-11-26)."""
RENEW = 0
"""The library's count of a tick that renews the date."""

TURNS = 4
"""Turns of the event loop from accepting a connection to reading its first bytes."""
MAX_TURNS = 1000


class DrainingServer(uvicorn.Server):
    """Closing a listening socket resets the connections that wait in its queue, with the requests that their clients
    have sent already. This server accepts them first. Create it in the event loop that serves."""

    def __init__(self, config: uvicorn.Config, handshakes: Collection[asyncio.Task[bool]] = ()) -> None:
        super().__init__(config)
        self._handshakes = handshakes
        self._loop, self._told = asyncio.get_running_loop(), asyncio.Event()

    async def main_loop(self) -> None:
        """Tick until the server is told to stop."""
        while not await self.on_tick(RENEW):
            await wait(self._told, coalesced(TICK_INTERVAL_S))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop: called for a signal, which may come in the middle of any callback."""
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._told.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        listeners = [*(sockets or ()), *(each for server in self.servers for each in server.sockets)]
        with selectors.DefaultSelector() as selector:
            for number in {each.fileno() for each in listeners}:
                selector.register(number, selectors.EVENT_READ)
            await _until_quiet(selector)
        if self._handshakes:
            await asyncio.wait(self._handshakes, timeout=ENDING_TIMEOUT_S)
        await super().shutdown(sockets)


async def _until_quiet(selector: selectors.BaseSelector) -> None:
    """Let the event loop accept connections until none has waited for some turns; under a flood, for MAX_TURNS."""
    quiet = 0
    for _ in range(MAX_TURNS):
        await asyncio.sleep(0)
        quiet = 0 if selector.select(0) else quiet + 1
        if quiet == TURNS:
            return


if TYPE_CHECKING:
    from api.stream.connection import Connection
    from api.stream.handshake import Handshake

    Counted: TypeAlias = Connection | Handshake
