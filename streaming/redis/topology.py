"""Redis topologies: a single server, the primary that Sentinels name, or the primaries of a cluster.

RedisClient asks for the place of a key and sends commands there; a place is an opaque name of a server. Nothing here
retries a command: RedisClient decides that.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any, TypeAlias, cast

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection, Connection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, MovedError, ReadOnlyError, RedisClusterException, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from streaming.redis.connection import Command, SharedConnection
from streaming.redis.settings import Address, parse_address

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

    async def place(self, key: str) -> str:
        """Return the server that holds a key now."""
        return ""

    async def places(self) -> list[str]:
        """Return every server that holds keys."""
        return [""]

    async def run(self, place: str, commands: Sequence[Command]) -> list[Any]:
        """Send several commands over a connection that no other task uses meanwhile; returns answers and error answers
        in their order."""
        pipeline = self.client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return await self._checked(list(await pipeline.execute(raise_on_error=False)))

    async def run_scripts(self, place: str, commands: Sequence[Command]) -> list[Any]:
        """The same over the shared connection, where a call costs least. For commands that do not block."""
        return await self._checked(await self._shared.run(commands))

    def send_scripts(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]] | None:
        """Send before returning, over the shared connection; None, and nothing is sent, if it is not open."""
        return self._shared.send(commands)

    async def _checked(self, answers: list[Any]) -> list[Any]:
        if any(_is_deposed(error) for error in _errors(answers)):
            # A new connection may lead to a primary that the Sentinels have named meanwhile.
            await self._shared.close()
            await self.client.connection_pool.disconnect(inuse_connections=False)
        return answers

    async def follow(self, moved: MovedError) -> None:
        """Update the slot map from a MOVED error."""
        raise RedisClusterException("this server is one of a cluster; redis.url must begin with redis+cluster://")

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[AbstractConnection]:
        """Lend an exclusive connection to any server (pub/sub messages reach them all); closes it at the end."""
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
    each = chain.from_iterable(answer if isinstance(answer, list) else (answer,) for answer in answers)
    return [answer for answer in each if isinstance(answer, ResponseError)]


def _is_deposed(error: ResponseError) -> bool:
    """Whether a server is no longer the primary: it answers READONLY once it is a replica, and NOREPLICAS for up to ten
    seconds before, while it does not know yet that it was replaced."""
    return isinstance(error, ReadOnlyError) or "NOREPLICAS" in (error.status_code, str(error).partition(" ")[0])


class Cluster:
    """Topology of a cluster's primaries, with the methods of OneServer. A place is a node's name.

    Scripts go to the node that holds their key, and ASK redirections are not followed: while a slot migrates, its keys
    lie on two nodes and a script would see half of them. The node answers ASK, RedisClient raises Unavailable for that
    partition, and work continues when the slot has moved.
    """

    def __init__(self, address: Address, timeout_s: float, options: dict[str, Any]) -> None:
        self._timeout_s = timeout_s
        self._connections: dict[str, SharedConnection] = {}
        self._cluster = ClusterClient(
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

    async def place(self, key: str) -> str:
        await self._cluster.initialize()
        slot = self._cluster.keyslot(key)
        return str(self._cluster.nodes_manager.get_node_from_slot(slot).name)

    async def places(self) -> list[str]:
        await self._cluster.initialize()
        return [str(node.name) for node in self._cluster.get_primaries()]

    async def run(self, place: str, commands: Sequence[Command]) -> list[Any]:
        pipeline = self._cluster.pipeline()
        for command in commands:
            pipeline.execute_command(*command, target_nodes=self._node(place))
        return await self._reloading(pipeline.execute(raise_on_error=False, allow_redirections=False))

    async def run_scripts(self, place: str, commands: Sequence[Command]) -> list[Any]:
        connection = self._connections.get(place)
        if connection is None:
            connection = self._connections[place] = self._connection_to(place)
        return await self._reloading(connection.run(commands))

    async def _reloading(self, answering: Awaitable[list[Any]]) -> list[Any]:
        """Wait for answers; reload the slot map with the next command if another node may hold the slot now."""
        try:
            answers = await answering
        except CONNECTION_ERRORS:
            self._cluster.reload_slots()
            raise
        if any(isinstance(answer, CONNECTION_ERRORS) for answer in answers):
            self._cluster.reload_slots()
        return answers

    def send_scripts(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]] | None:
        return None  # finding the node may need a round trip

    def _connection_to(self, place: str) -> SharedConnection:
        node = self._node(place)

        async def acquire() -> AbstractConnection:
            nonlocal node
            node = self._node(place)
            return await _connected(node)

        async def release(connection: AbstractConnection) -> None:
            node.release(cast(Connection, connection))

        return SharedConnection(acquire, release, self._timeout_s)

    def _node(self, place: str) -> ClusterNode:
        node = self._cluster.get_node(node_name=place)
        if node is None:
            raise RedisConnectionError(f"{place} has left the cluster")
        return node

    async def follow(self, moved: MovedError) -> None:
        await self._cluster.nodes_manager.move_slot(moved)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[AbstractConnection]:
        await self._cluster.initialize()
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


class ClusterClient(RedisCluster):
    """redis-py's cluster client, which can be told that a node was lost."""

    def reload_slots(self) -> None:
        """Reload the slot map with the next command, so that no lost node is asked again."""
        self._initialize = True


CONNECTION_ERRORS = (RedisConnectionError, RedisTimeoutError, ClusterDownError)
"""Errors after which another node may hold the slot."""
