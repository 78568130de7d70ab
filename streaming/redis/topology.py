"""Which server holds what: one server, the primary that Sentinels name, or the primaries of a cluster.

The wire asks for the place of a key and sends commands there; what a place is, only this file knows. Nothing here
repeats a command: a server that did not run one says so, and the wire decides.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import chain
from typing import Any, Protocol, cast

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode, ClusterPipeline
from redis.asyncio.connection import AbstractConnection, Connection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, MovedError, ReadOnlyError, RedisClusterException, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from streaming.address import Address, parse_address
from streaming.redis.connection import Command, SharedConnection

MAX_CONNECTIONS = 64
MAX_CLUSTER_CONNECTIONS = 1024
"""Per node: the cluster client refuses the next command where the others let it wait for a connection."""


class Topology(Protocol):
    """Where keys are, and how to send commands there."""

    client: Redis
    """For single commands and for pipelines that may be repeated: it finds the server of each key by itself."""

    async def place(self, key: str) -> str:
        """The server that holds a key now."""

    async def places(self) -> list[str]:
        """Every server that holds keys."""

    async def run(self, place: str, commands: Sequence[Command]) -> list[Any]:
        """Send commands over one connection, in order; answers and error answers in the same order."""

    async def run_scripts(self, place: str, commands: Sequence[Command]) -> list[Any]:
        """The same over the connection that all share, where a call costs least: for what does not make it wait."""

    def send_scripts(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]] | None:
        """Sent at once over that connection; None, and nothing is sent, if it is not open or there are several."""

    async def follow(self, moved: MovedError) -> None:
        """Learn from a server where the keys it was asked for are."""

    def lent(self) -> AbstractAsyncContextManager[AbstractConnection]:
        """A connection of one's own, to any server: messages reach them all. It is closed at the end."""

    async def close(self) -> None:
        """Close every connection."""


def open_topology(url: str, timeout_s: float) -> Topology:
    """Nothing is sent yet. Raises ValueError."""
    address = parse_address(url)
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # A repeated write may be a second write: the client must never repeat by itself.
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
    """Connections to the primary that Sentinels name; all of them end when they name another."""

    master_address: tuple[str, int] | None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        # Two that ask at the same time may put one Sentinel in another's place in the library's list, for good.
        self._asking = asyncio.Lock()

    async def get_master_address(self) -> tuple[str, int]:
        """Whoever still waits for the former primary waits in vain, or writes what will be thrown away."""
        async with self._asking:
            address: tuple[str, int] = await self.sentinel_manager.discover_master(self.service_name)
        if address != self.master_address:
            self.master_address = address
            await self.disconnect()
        return address


class OneServer:
    """One server, or the primary that Sentinels name at the moment."""

    def __init__(self, client: Redis, timeout_s: float, sentinel: Sentinel | None = None) -> None:
        self.client, self._sentinel = client, sentinel
        self._line = SharedConnection(client.connection_pool.get_connection, client.connection_pool.release, timeout_s)

    async def place(self, key: str) -> str:
        return ""

    async def places(self) -> list[str]:
        return [""]

    async def run(self, place: str, commands: Sequence[Command]) -> list[Any]:
        return await self._checked(await self._answers(commands))

    async def run_scripts(self, place: str, commands: Sequence[Command]) -> list[Any]:
        return await self._checked(await self._line.run(commands))

    def send_scripts(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]] | None:
        return self._line.send(commands)

    async def _checked(self, answers: list[Any]) -> list[Any]:
        if any(_is_deposed(error) for error in _errors(answers)):
            # The next connection may lead to the primary that the Sentinels have named meanwhile.
            await self._line.close()
            await self.client.connection_pool.disconnect(inuse_connections=False)
        return answers

    async def _answers(self, commands: Sequence[Command]) -> list[Any]:
        if len(commands) == 1:
            try:
                return [await self.client.execute_command(*commands[0])]  # type: ignore[no-untyped-call]
            except ResponseError as error:
                return [error]
        pipeline = self.client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(await pipeline.execute(raise_on_error=False))

    async def follow(self, moved: MovedError) -> None:
        raise RedisClusterException("this server is one of a cluster; redis.url must begin with redis+cluster://")

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[AbstractConnection]:
        connection = await self.client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            yield connection
        finally:
            await connection.disconnect(nowait=True)
            await self.client.connection_pool.release(connection)

    async def close(self) -> None:
        await self._line.close()
        await self.client.aclose()
        if self._sentinel is not None:
            await self._sentinel.aclose()


def _errors(answers: Sequence[Any]) -> list[ResponseError]:
    """A script that was given several calls answers each in a list."""
    each = chain.from_iterable(answer if isinstance(answer, list) else (answer,) for answer in answers)
    return [answer for answer in each if isinstance(answer, ResponseError)]


def _is_deposed(error: ResponseError) -> bool:
    """A server that has become a replica says so; one that was deposed and not yet told so has lost its replicas, and
    stays so for up to ten seconds."""
    return isinstance(error, ReadOnlyError) or "NOREPLICAS" in (error.status_code, str(error).partition(" ")[0])


class Cluster:
    """The primaries of a cluster. A place is a node's name.

    Scripts go to the node that holds their key and are never sent on to one that is about to: while a slot moves key
    by key, its keys lie on two nodes and a script would see half of them. The node refuses (ASK), the wire is
    Unavailable for that partition, and work goes on when the slot has moved.
    """

    def __init__(self, address: Address, timeout_s: float, options: dict[str, Any]) -> None:
        self._timeout_s = timeout_s
        self._lines: dict[str, SharedConnection] = {}
        self._cluster = ClusterClient(
            startup_nodes=[ClusterNode(host, port) for host, port in address.hosts],
            max_connections=MAX_CLUSTER_CONNECTIONS,
            # Where one slot has moved is patched; to look at all of them anew would cut subscriptions.
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
        return await pipeline.execute(raise_on_error=False, allow_redirections=False)

    async def run_scripts(self, place: str, commands: Sequence[Command]) -> list[Any]:
        line = self._lines.get(place)
        if line is None:
            line = self._lines[place] = self._line_to(place)
        try:
            answers = await line.run(commands)
        except LOST:
            self._cluster.look_again()
            raise
        if any(isinstance(answer, LOST) for answer in answers):
            self._cluster.look_again()
        return answers

    def send_scripts(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]] | None:
        return None  # which node it is may have to be asked

    def _line_to(self, place: str) -> SharedConnection:
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
        for line in self._lines.values():
            await line.close()
        await self._cluster.aclose()
        # A client that was about to look for its nodes anew counts as closed and leaves these open.
        await self._cluster.nodes_manager.aclose()
        await self._cluster.nodes_manager.aclose("startup_nodes")


async def _connected(node: ClusterNode) -> Connection:
    """A connection of the node's, opened anew: whether one that has lain there lives, the library does not know."""
    connection = node.acquire_connection()
    try:
        await connection.disconnect(nowait=True)
        await connection.connect()  # type: ignore[no-untyped-call]
    except BaseException:
        node.release(connection)
        raise
    return connection


class ClusterClient(RedisCluster):
    """The library's client, whose pipelines too look for the primaries anew after a failure."""

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> ClusterPipeline:
        return HealingPipeline(self)  # type: ignore[abstract]

    def look_again(self) -> None:
        """With the next command: which node holds what."""
        self._initialize = True


LOST = (RedisConnectionError, RedisTimeoutError, ClusterDownError)
"""After these it may be another node that has to be asked."""


class HealingPipeline(ClusterPipeline):
    """The library's own goes on asking a node that is gone."""

    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        """As the library's."""
        client = cast(ClusterClient, self.cluster_client)
        try:
            answers = await super().execute(raise_on_error, allow_redirections)
        except LOST:
            client.look_again()
            raise
        if any(isinstance(answer, LOST) for answer in answers):
            client.look_again()
        return answers
