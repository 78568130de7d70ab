"""Connections to Redis: a pipelined one per server that all tasks of a process share, subscriptions, and topologies.

A topology is a single server, the primary that Sentinels name, or the primaries of a cluster. RedisClient asks for the
server of a key, by an opaque name, and sends commands there. Nothing here retries a command.

Commands are sent, and answered, in the order of their calls. redis-py opens the connection (address, TLS, password,
which server is the primary), then this module takes over its transport: a call through redis-py's pool costs five to
ten times as much CPU (docs/decisions/0002-own-redis-connection.md). Blocking commands (WAIT, BLOCK) must not be sent
here: all others would wait.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, cast

import hiredis
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection, Connection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    InvalidResponse,
    MovedError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from streaming.errors import Unavailable
from streaming.redis.settings import Address, parse_address

Command: TypeAlias = tuple[str | bytes | int, ...]

KINDS: dict[str, type[ResponseError]] = {
    "CLUSTERDOWN": ClusterDownError,
    "MOVED": MovedError,
    "READONLY": ReadOnlyError,
}
"""Error replies that callers catch by their class."""


class SharedConnection:
    """Opens the connection when it is needed, and again after it was lost.

    Args:
        acquire: Opens a connection.
        release: Takes back a connection that is closed.
        timeout_s: For the answers of one call.
    """

    def __init__(
        self,
        acquire: Callable[[], Awaitable[AbstractConnection]],
        release: Callable[[AbstractConnection], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        self._acquire, self._release, self._timeout_s = acquire, release, timeout_s
        self._opening: asyncio.Task[PipelinedProtocol] | None = None
        self._connection: AbstractConnection | None = None
        self._talk: PipelinedProtocol | None = None

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands; returns answers and error answers. Raises redis-py's ConnectionError and TimeoutError, after
        which some of the commands may have run."""
        talk = self._talk
        if talk is None or talk.over:
            if self._opening is None:
                self._opening = asyncio.create_task(self._open())
                self._opening.add_done_callback(self._opened)
            opening = self._opening
            # All callers share one attempt to open. Neither a cancelled caller nor `close` cancels the others.
            await asyncio.wait({opening})
            if opening.cancelled():
                raise RedisConnectionError("the connection was closed while it was opened")
            talk = opening.result()
            if talk.over:  # lost again before this task was resumed
                raise RedisConnectionError("the connection was lost as soon as it was open")
        return await talk.send(commands)

    def send(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]] | None:
        """Send commands before this call returns; None, and nothing is sent, if the connection is not open."""
        talk = self._talk
        return None if talk is None or talk.over else talk.send(commands)

    async def _open(self) -> PipelinedProtocol:
        await self._give_back()
        with lost_if_closed():
            self._connection = await self._acquire()
        self._talk = PipelinedProtocol(self._connection, self._timeout_s)
        return self._talk

    def _opened(self, opening: asyncio.Task[PipelinedProtocol]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # marks it as retrieved: perhaps no caller waits any more

    async def close(self) -> None:
        """Close the connection; the next command opens another."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        if self._talk is not None:
            self._talk.end(RedisConnectionError("the connection was closed"))
        await self._give_back()

    async def _give_back(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.disconnect(nowait=True)
            await self._release(connection)


@dataclass(slots=True, eq=False)
class Sent:
    """Commands that were sent and are not fully answered."""

    count: int
    due: float
    """Loop time by which they must be answered."""
    done: asyncio.Future[list[Any]]
    answers: list[Any] = field(default_factory=list)


@contextmanager
def lost_if_closed() -> Iterator[None]:
    """uvloop raises RuntimeError for a transport that the peer has reset, and redis-py passes it on. Raises redis-py's
    ConnectionError instead."""
    try:
        yield
    except RuntimeError as error:
        raise RedisConnectionError(f"the connection is closed: {error}") from error


class TakenOver(asyncio.Protocol):
    """Protocol of a connection that redis-py has opened: takes over its transport and parses what the server sends."""

    def __init__(self, connection: AbstractConnection) -> None:
        """Raises redis-py's ConnectionError if the connection is closed already."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._reader = hiredis.Reader(protocolError=InvalidResponse, replyError=refusal)
        writer = connection._writer  # redis-py has no public access to it
        if writer is None or writer.transport.is_closing():
            raise RedisConnectionError("the connection was lost before it was used")
        with lost_if_closed():
            self._transport, self._former = writer.transport, writer.transport.get_protocol()
            self._transport.set_protocol(self)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, perhaps in parts. Error replies become redis-py's exceptions."""
        try:
            self._reader.feed(data)
            while (said := self._reader.gets()) is not False:
                self._take(said)
        except InvalidResponse as error:
            self.end(RedisConnectionError(f"what the server sent cannot be read: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the transport when the server, or `end`, has closed it."""
        self.end(RedisConnectionError(f"the connection was lost: {error or 'closed by the server'}"))
        self._former.connection_lost(error)

    def end(self, error: Exception) -> None:
        """Close the connection; whoever waits for the server gets `error`. Idempotent."""
        self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take(self, said: Any) -> None:
        raise NotImplementedError


class PipelinedProtocol(TakenOver):
    """Protocol of one open connection: writes commands, and matches answers to them by order."""

    def __init__(self, connection: AbstractConnection, timeout_s: float) -> None:
        super().__init__(connection)
        self._over = False
        self._timeout_s = timeout_s
        self._sent: deque[Sent] = deque()

    @property
    def over(self) -> bool:
        """Whether the connection is closed. The transport knows it one loop iteration before `connection_lost`."""
        return self._over or self._transport.is_closing()

    def send(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]]:
        """Send commands; the future gets their answers, or an error after the timeout. It may be cancelled."""
        # First: if it raises, nothing waits for an answer. hiredis' stub says tuple[X] for tuple[X, ...].
        data = [hiredis.pack_command(command) for command in commands]  # type: ignore[arg-type]
        sent = Sent(len(commands), self._loop.time() + self._timeout_s, self._loop.create_future())
        self._sent.append(sent)
        if self._timer is None:
            self._timer = self._loop.call_at(sent.due, self._look)
        try:
            self._transport.writelines(data)
        except RuntimeError as error:  # raised by uvloop, as in `lost_if_closed`
            self.end(RedisConnectionError(f"the connection is closed: {error}"))
        return sent.done

    def _take(self, said: Any) -> None:
        sent = self._sent[0]
        sent.answers.append(said)
        if len(sent.answers) == sent.count:
            self._sent.popleft()
            if not sent.done.done():
                sent.done.set_result(sent.answers)

    def _look(self) -> None:
        """Check the timeout of the oldest commands; one timer serves all, since the oldest are due first."""
        self._timer = None
        if self._sent and self._sent[0].due <= self._loop.time():
            self.end(RedisTimeoutError(f"no answer within {self._timeout_s:g} s"))
        elif self._sent:
            self._timer = self._loop.call_at(self._sent[0].due, self._look)

    def end(self, error: Exception) -> None:
        self._over = True
        super().end(error)
        while self._sent:
            sent = self._sent.popleft()
            if not sent.done.done():
                sent.done.set_exception(error)


def refusal(text: str) -> ResponseError:
    """Make redis-py's exception for the text of an error reply."""
    code, _, words = text.partition(" ")
    kind = KINDS.get(code)
    return ResponseError(text) if kind is None else kind(words, status_code=code)


PING_INTERVAL_S = 10.0
"""Between two PINGs, and the timeout of their answer."""


class Subscription(TakenOver):
    """Subscription to one channel: buffers messages until the caller takes them one by one with `message`, or passes
    them to a callback (`pour`).

    redis-py opens the connection; this protocol then takes over its transport, because redis-py wakes a task for each
    message, which raises the cost of a token measurably. The protocol sends PING at intervals, since a subscriber that
    only reads would never notice that its connection is dead. If the subscription ends, whoever waits gets redis-py's
    ConnectionError, of which `RedisClient.subscribe` makes Unavailable.
    """

    def __init__(self, connection: AbstractConnection, channel: str) -> None:
        super().__init__(connection)
        self._messages: deque[bytes] = deque()
        self._taker: Callable[[Sequence[bytes]], None] | None = None
        self._changed = asyncio.Event()
        self._begun = self._loop.create_future()
        self._fault: Exception | None = None
        self._heard = True
        """Whether the server has sent anything since the last PING."""
        self._send("SUBSCRIBE", channel)
        self._timer = self._loop.call_later(PING_INTERVAL_S, self._look)

    async def begun(self) -> None:
        """Wait until the server has confirmed the subscription."""
        await self._begun

    async def message(self) -> bytes:
        """Wait for the next message."""
        while not self._messages:
            await self._news()
        return self._messages.popleft()

    async def pour(self, take: Callable[[Sequence[bytes]], None]) -> NoReturn:
        """Call `take` with the messages of each read, without waking a task. Raises what `take` raises,
        too."""
        self._taker = take
        self._pass_on()
        while True:
            await self._news()

    async def _news(self) -> None:
        """Wait for a message, or raise the error that ended the subscription."""
        if self._fault is not None:
            raise self._fault
        self._changed.clear()
        await self._changed.wait()
        if self._fault is not None and not self._messages:
            raise self._fault

    def _send(self, *words: str) -> None:
        self._transport.write(hiredis.pack_command(words))  # type: ignore[arg-type]  # its stub has tuples of one

    def data_received(self, data: bytes) -> None:
        """Parse messages, and pass those of this read on together."""
        self._heard = True
        super().data_received(data)
        try:
            self._pass_on()
        except Exception as error:  # noqa: BLE001 - raised by `take`: `pour` raises it
            self.end(error)

    def _pass_on(self) -> None:
        if self._taker is not None and self._messages:
            messages, self._messages = self._messages, deque()
            self._taker(messages)
        elif self._messages:
            self._changed.set()

    def _take(self, said: Any) -> None:
        match said:
            case [b"message", _, data]:
                self._messages.append(data)
            case [b"subscribe", *_]:
                if not self._begun.done():
                    self._begun.set_result(None)
            case Exception():
                self.end(Unavailable(f"Redis refuses a subscription: {said}"))

    def _look(self) -> None:
        """End the subscription if the server has sent nothing since the last PING, else send another."""
        if not self._heard:
            self.end(
                RedisConnectionError(f"a subscription has heard nothing for {PING_INTERVAL_S:g} s, although it asked")
            )
            return
        self._heard = False
        self._send("PING")
        self._timer = self._loop.call_later(PING_INTERVAL_S, self._look)

    def end(self, error: Exception) -> None:
        super().end(error)
        if self._fault is None:
            self._fault = error
        if not self._begun.done():
            self._begun.set_exception(error)
        self._changed.set()


# --- topologies ------------------------------------------------------------------------------------------------------


MAX_CONNECTIONS = 64
MAX_CLUSTER_CONNECTIONS = 1024
"""Per node: at its limit the cluster client refuses a command, while the other clients wait for a connection."""


def open_topology(url: str, timeout_s: float) -> Topology:
    """Make the topology that a URL names; sends nothing yet. Raises ValueError."""
    address = parse_address(url)
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # A retried write may run twice: redis-py must never retry by itself.
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    match address.kind:
        case "server":
            pool = BlockingConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS, timeout=timeout_s, **options)
            return OneServer(Redis.from_pool(pool), timeout_s)
        case "sentinel":
            return _behind_sentinels(address, timeout_s, options)
        case "cluster":
            return Cluster(address, timeout_s, options)


def _behind_sentinels(address: Address, timeout_s: float, options: dict[str, Any]) -> OneServer:
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        address.hosts,
        sentinel_kwargs={
            **options,
            "ssl": address.tls,
            "username": address.sentinel_username,
            "password": address.sentinel_password,
        },
    )
    client: Redis = sentinel.master_for(
        address.service,
        connection_pool_class=PrimaryPool,
        max_connections=MAX_CONNECTIONS,
        timeout=timeout_s,
        ssl=address.tls,
        db=address.db,
        username=address.username,
        password=address.password,
        **options,
    )
    return OneServer(client, timeout_s, sentinel)


class PrimaryPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connection pool of the primary that Sentinels name; closes all connections when they name another."""

    master_address: tuple[str, int] | None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        # Two concurrent discoveries may corrupt redis-py's list of Sentinels for good.
        self._asking = asyncio.Lock()

    async def get_master_address(self) -> tuple[str, int]:
        """Ask the Sentinels. Connections to a former primary are closed: they would hang, or write what gets lost."""
        async with self._asking:
            try:
                address: tuple[str, int] = await self.sentinel_manager.discover_master(self.service_name)
            except MasterNotFoundError:  # whose words repeat all options of the clients
                raise MasterNotFoundError(f"no Sentinel names a primary of {self.service_name!r}") from None
        if address != self.master_address:
            self.master_address = address
            await self.disconnect()
        return address


class OneServer:
    """Topology of one server, or of the primary that Sentinels name at the moment."""

    def __init__(self, client: Redis, timeout_s: float, sentinel: Sentinel | None = None) -> None:
        self.client, self._sentinel = client, sentinel
        pool = client.connection_pool
        self._shared = SharedConnection(pool.get_connection, pool.release, timeout_s)

    async def server_of(self, key: str) -> str:
        """Return the name of the server that holds a key now."""
        return ""

    async def servers(self) -> list[str]:
        """Return the name of every server that holds keys."""
        return [""]

    async def run(self, server: str, commands: Sequence[Command]) -> list[Any]:
        """Send several commands over a connection that no other task uses meanwhile; returns answers and error answers
        in their order."""
        pipeline = self.client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        with lost_if_closed():
            answers = list(await pipeline.execute(raise_on_error=False))
        return await self._checked(answers)

    async def run_scripts(self, server: str, commands: Sequence[Command]) -> list[Any]:
        """The same over the shared connection, where a call costs least. For commands that do not block."""
        return await self._checked(await self._shared.run(commands))

    def send_scripts(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]] | None:
        """Send before returning, over the shared connection; None, and nothing is sent, if it is not open."""
        return self._shared.send(commands)

    async def _checked(self, answers: list[Any]) -> list[Any]:
        if any(map(_is_deposed, _errors(answers))):
            # A new connection may lead to a primary that the Sentinels have named meanwhile.
            await self._shared.close()
            await self.client.connection_pool.disconnect(inuse_connections=False)
        return answers

    async def note_moved(self, moved: MovedError) -> None:
        """Update the slot map from a MOVED error."""
        raise RedisClusterException("this server is one of a cluster; redis.url must begin with redis+cluster://")

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[AbstractConnection]:
        """Lend an exclusive connection to any server (pub/sub messages reach them all); closes it at the end."""
        with lost_if_closed():
            connection = await self.client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            yield connection
        finally:
            await connection.disconnect(nowait=True)
            await self.client.connection_pool.release(connection)

    async def close(self) -> None:
        """Close every connection."""
        await self._shared.close()
        await self.client.aclose()
        if self._sentinel is not None:
            await self._sentinel.aclose()


def _errors(answers: Sequence[Any]) -> list[ResponseError]:
    """Error replies among the answers; a script that ran several calls answers each in a list."""
    nested = [answer if isinstance(answer, list) else (answer,) for answer in answers]
    return [each for answer in nested for each in answer if isinstance(each, ResponseError)]


def _is_deposed(error: ResponseError) -> bool:
    """Whether a server is no longer the primary: it answers READONLY once it is a replica, and NOREPLICAS for up to ten
    seconds before, while it does not know yet that it was replaced."""
    return isinstance(error, ReadOnlyError) or "NOREPLICAS" in (error.status_code, str(error).partition(" ")[0])


class Cluster:
    """Topology of a cluster's primaries, with the methods of OneServer. A server's name is its node's.

    Scripts go to the node that holds their key, and ASK redirections are not followed: while a slot migrates, its keys
    lie on two nodes and a script would see half of them. The node answers ASK, RedisClient raises Unavailable for that
    partition, and work continues when the slot has moved.
    """

    def __init__(self, address: Address, timeout_s: float, options: dict[str, Any]) -> None:
        self._timeout_s = timeout_s
        self._connections: dict[str, SharedConnection] = {}
        self._cluster = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in address.hosts],
            max_connections=MAX_CLUSTER_CONNECTIONS,
            # A moved slot is patched in the slot map: reloading the whole map would close subscriptions.
            reinitialize_steps=0,
            ssl=address.tls,
            username=address.username,
            password=address.password,
            **options,
        )
        self.client = cast(Redis, self._cluster)

    async def server_of(self, key: str) -> str:
        await self._initialized()
        slot = self._cluster.keyslot(key)
        return str(self._cluster.nodes_manager.get_node_from_slot(slot).name)

    async def _initialized(self) -> None:
        with lost_if_closed():
            await self._cluster.initialize()

    async def servers(self) -> list[str]:
        await self._initialized()
        return [str(node.name) for node in self._cluster.get_primaries()]

    async def run(self, server: str, commands: Sequence[Command]) -> list[Any]:
        pipeline = self._cluster.pipeline()
        for command in commands:
            pipeline.execute_command(*command, target_nodes=self._node(server))
        return await self._reloading(pipeline.execute(raise_on_error=False, allow_redirections=False))

    async def run_scripts(self, server: str, commands: Sequence[Command]) -> list[Any]:
        connection = self._connections.get(server)
        if connection is None:
            connection = self._connections[server] = self._connection_to(server)
        return await self._reloading(connection.run(commands))

    async def _reloading(self, answering: Awaitable[list[Any]]) -> list[Any]:
        """Wait for answers; reload the slot map with the next command if another node may hold the slot now, so that no
        lost node is asked again."""
        try:
            with lost_if_closed():
                answers = await answering
        except CONNECTION_ERRORS:
            self._cluster._initialize = True
            raise
        if any(isinstance(answer, CONNECTION_ERRORS) for answer in answers):
            self._cluster._initialize = True
        return answers

    def send_scripts(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]] | None:
        return None  # finding the node may need a round trip

    def _connection_to(self, server: str) -> SharedConnection:
        node = self._node(server)

        async def acquire() -> AbstractConnection:
            nonlocal node
            node = self._node(server)
            return await _connected(node)

        async def release(connection: AbstractConnection) -> None:
            node.release(cast(Connection, connection))

        return SharedConnection(acquire, release, self._timeout_s)

    def _node(self, server: str) -> ClusterNode:
        node = self._cluster.get_node(node_name=server)
        if node is None:
            raise RedisConnectionError(f"{server} has left the cluster")
        return node

    async def note_moved(self, moved: MovedError) -> None:
        await self._cluster.nodes_manager.move_slot(moved)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[AbstractConnection]:
        await self._initialized()
        node = random.choice(self._cluster.get_primaries())  # noqa: S311 - spreads load, hides nothing
        connection = await _connected(node)
        try:
            yield connection
        finally:
            await connection.disconnect(nowait=True)
            node.release(connection)

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.close()
        await self._cluster.aclose()
        # A client that was about to reload its nodes counts as closed and leaves these open.
        await self._cluster.nodes_manager.aclose()
        await self._cluster.nodes_manager.aclose("startup_nodes")


Topology: TypeAlias = OneServer | Cluster


async def _connected(node: ClusterNode) -> Connection:
    """Acquire a connection of a node and reopen it: redis-py does not know whether an idle connection is alive."""
    connection = node.acquire_connection()
    try:
        await connection.disconnect(nowait=True)
        await connection.connect()  # type: ignore[no-untyped-call]
    except BaseException:
        node.release(connection)
        raise
    return connection


CONNECTION_ERRORS = (RedisConnectionError, RedisTimeoutError, ClusterDownError)
"""Errors after which another node may hold the slot."""
