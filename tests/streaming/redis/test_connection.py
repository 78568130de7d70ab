"""The connection that all tasks share: order, errors, answers nobody waits for any more, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import hiredis
import pytest
import uvloop
from flow import a_lease, until
from house import free_port, redis_process
from redis import Redis
from redis.asyncio import BlockingConnectionPool, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from streaming.errors import Unavailable
from streaming.jobs.lease import Lease
from streaming.redis import connection as subject
from streaming.redis.client import RedisClient
from streaming.redis.connection import SharedConnection, _connected, open_topology, refusal
from streaming.redis.settings import RedisSettings


@pytest.fixture
async def line(redis_url: str) -> AsyncIterator[SharedConnection]:
    pool = BlockingConnectionPool.from_url(redis_url, protocol=2)
    line = SharedConnection(pool.get_connection, pool.release, 5)
    yield line
    await line.close()
    await pool.aclose()


async def test_many_tasks_share_it_and_each_gets_its_own_answers(line: SharedConnection) -> None:
    """In any number, small and large, begun before there is a connection."""

    async def ask(number: int) -> None:
        text = f"{number}" * (1 + number * number)
        answers = await line.run([("ECHO", text), ("PING",), ("ECHO", number)])
        assert answers == [text.encode(), b"PONG", str(number).encode()]

    await asyncio.gather(*(ask(number) for number in range(100)))
    assert len(await line.run([("CLIENT", "LIST", "TYPE", "normal")])) == 1


async def test_an_error_is_an_answer_like_others(line: SharedConnection) -> None:
    """What follows it in the same round trip is run and answered."""
    error, pong = await line.run([("FCALL", "nothing", 0), ("PING",)])
    assert isinstance(error, ResponseError) and pong == b"PONG"
    nested, pong = await line.run([("EVAL", "return {1, redis.error_reply('OOM no')}", 0), ("PING",)])
    assert isinstance(nested[1], ResponseError) and str(nested[1]) == "OOM no" and pong == b"PONG"


class Closed:
    """The transport of a connection that is closed and has not said so: what uvloop's is for a moment."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self.abort = transport.abort

    def is_closing(self) -> bool:
        return False

    def writelines(self, _: object) -> None:
        raise RuntimeError("unable to perform operation; the handler is closed")


async def test_one_that_is_closed_without_a_word_counts_as_lost(line: SharedConnection) -> None:
    """Whoever sends just then is told that the server does not answer, and the next one gets a new connection."""
    await line.run([("PING",)])
    assert line._talk is not None
    line._talk._transport = Closed(line._talk._transport)  # type: ignore[assignment]
    with pytest.raises(RedisConnectionError, match="closed"):
        await line.run([("PING",)])
    assert await line.run([("PING",)]) == [b"PONG"]


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
def test_one_that_the_server_has_reset_counts_as_lost(scheme: str) -> None:
    """Also in redis-py's hands, whose own commands uvloop then refuses with another error. The next call is served, in
    a cluster after the slot map was asked for again."""
    uvloop.run(_reset_and_ask(scheme))


async def _reset_and_ask(scheme: str) -> None:
    lines: list[asyncio.StreamWriter] = []
    asked: list[bytes] = []
    answers = {b"COMMAND": b"*0\r\n"}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append(writer)
        commands = hiredis.Reader()
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                commands.feed(data)
                while command := commands.gets():
                    if command[0] == b"QUIT":
                        writer.close()
                        return
                    asked.append(command[0])
                    writer.write(answers.get(command[0], b"+PONG\r\n"))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        answers[b"CLUSTER"] = b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.1\r\n:%d\r\n$1\r\nn\r\n" % port
        topology = open_topology(f"{scheme}://127.0.0.1:{port}", 2.0)
        try:
            (name,) = await topology.servers()
            assert await topology.run(name, [("PING",)]) == [True]
            known = asked.count(b"CLUSTER")
            for line in lines:  # as a host does that was away and knows nothing of it
                raw = line.transport.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                line.transport.abort()
            await asyncio.sleep(0.05)
            with pytest.raises(RedisConnectionError):
                await topology.run(name, [("PING",)])
            assert await topology.servers() == [name]
            assert await topology.run(name, [("PING",)]) == [True]
            assert asked.count(b"CLUSTER") == 2 * known
            with suppress(RedisConnectionError):  # which a cluster's client returns as the answer
                await topology.run(name, [("QUIT",)])
            assert await topology.servers() == [name]
            assert asked.count(b"CLUSTER") == 3 * known
        finally:
            await topology.close()
            await asyncio.sleep(0.05)  # until both ends are closed


@pytest.mark.parametrize(
    ("scheme", "opener", "name"),
    [("redis", BlockingConnectionPool, "get_connection"), ("redis+cluster", RedisCluster, "initialize")],
)
async def test_a_subscription_that_meets_a_reset_connection_counts_as_lost(
    opened: Callable[..., RedisClient], monkeypatch: pytest.MonkeyPatch, scheme: str, opener: type, name: str
) -> None:
    """Its reader subscribes again, for the store is only away."""

    async def refused(*_: object) -> None:
        raise RuntimeError("unable to perform operation; the handler is closed")

    monkeypatch.setattr(opener, name, refused)
    with pytest.raises(Unavailable, match="closed"):
        async with opened(f"{scheme}://127.0.0.1:1").subscribe("here"):
            pass


async def test_a_sentinel_that_has_reset_counts_as_lost() -> None:
    """It is asked when a connection is opened. The caller is told that the store is away, not that it has a fault."""

    async def acquire() -> AbstractConnection:
        raise RuntimeError("unable to perform operation; the handler is closed")

    async def release(_: AbstractConnection) -> None:
        raise AssertionError("nothing was acquired")

    with pytest.raises(RedisConnectionError, match="closed"):
        await SharedConnection(acquire, release, 5).run([("PING",)])


async def test_a_command_that_cannot_be_sent_is_an_error_of_its_caller_alone(line: SharedConnection) -> None:
    """Nobody else's answer is taken for its own."""
    await line.run([("PING",)])
    with pytest.raises(UnicodeEncodeError):
        await line.run([("PING",), ("ECHO", "\ud800")])
    assert await line.run([("ECHO", "later")]) == [b"later"]


async def test_who_leaves_disturbs_nobody(line: SharedConnection) -> None:
    """The answers of a cancelled task are dropped, those behind them are not."""
    await line.run([("PING",)])
    for number in range(50):
        leaving = asyncio.create_task(line.run([("ECHO", "gone"), ("ECHO", "gone too")]))
        staying = asyncio.create_task(line.run([("ECHO", number)]))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await staying == [str(number).encode()]
        with pytest.raises(asyncio.CancelledError):
            await leaving


async def test_who_waits_while_it_is_closed_goes_on(redis_url: str) -> None:
    """With an error like any other of the connection, not cancelled with its opening: a task in the background that
    asks again and again would end without a word. The next command opens another."""
    pool = BlockingConnectionPool.from_url(redis_url, protocol=2)
    slow = asyncio.Event()

    async def acquire() -> AbstractConnection:
        await slow.wait()
        return await pool.get_connection()

    line = SharedConnection(acquire, pool.release, 5)
    waiting = [asyncio.create_task(line.run([("PING",)])) for _ in range(3)]
    leaving = waiting.pop()
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    await line.close()
    for task in waiting:
        with pytest.raises(RedisConnectionError):
            await task
    slow.set()
    assert await line.run([("PING",)]) == [b"PONG"]
    await line.close()
    await pool.aclose()


@pytest.fixture
async def node(redis_url: str) -> AsyncIterator[ClusterNode]:
    address = parse_url(redis_url)
    node = ClusterNode(address["host"], address["port"], protocol=2)
    yield node
    await node.disconnect()


async def _a_lost_one(node: ClusterNode, redis_url: str) -> AbstractConnection:
    """Ended by the server, which the transport has noticed and the library has not."""
    lost = await _connected(node)
    with Redis.from_url(redis_url) as client:
        client.client_kill_filter(_type="normal", skipme=True)

    async def noticed() -> bool:
        assert lost._writer is not None
        lost._writer.write(b"PING\r\n")
        return lost._writer.transport.is_closing()

    await until(noticed)
    return lost


async def test_one_that_was_lost_before_it_was_used_is_not_waited_for(node: ClusterNode, redis_url: str) -> None:
    """Nobody tells of its end any more: it fails at once, not when an answer is due; the next command opens another."""
    at_hand = [await _a_lost_one(node, redis_url)]

    async def acquire() -> AbstractConnection:
        return at_hand.pop() if at_hand else await _connected(node)

    async def release(connection: AbstractConnection) -> None:
        node.release(connection)  # type: ignore[arg-type]

    line = SharedConnection(acquire, release, 60)
    with pytest.raises(RedisConnectionError, match="before it was used"):
        await asyncio.wait_for(line.run([("PING",)]), 20)
    assert await line.run([("PING",)]) == [b"PONG"]
    await line.close()


async def test_a_lost_connection_fails_what_is_under_way_and_the_next_is_new(
    line: SharedConnection, redis_url: str
) -> None:
    """Nothing is repeated by itself."""
    await line.run([("PING",)])
    with Redis.from_url(redis_url) as client:
        for _ in range(3):
            waiting = asyncio.create_task(line.run([("INCR", "count"), ("BLPOP", "nothing", 0)]))
            await until(lambda: any(other["cmd"] == "blpop" for other in client.client_list()))
            client.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(RedisConnectionError):
                await waiting
            assert await line.run([("PING",)]) == [b"PONG"]
        assert client.get("count") == b"3"


async def test_a_lost_connection_is_given_back_before_the_next_is_taken(redis_url: str) -> None:
    """However often that happens, no more than one is out of the pool."""
    pool = BlockingConnectionPool.from_url(redis_url, protocol=2)
    out: list[AbstractConnection] = []
    most = 0

    async def acquire() -> AbstractConnection:
        nonlocal most
        out.append(await pool.get_connection())
        most = max(most, len(out))
        return out[-1]

    async def release(connection: AbstractConnection) -> None:
        out.remove(connection)
        await pool.release(connection)

    line = SharedConnection(acquire, release, 5)
    with Redis.from_url(redis_url) as client:
        for _ in range(3):
            assert await line.run([("PING",)]) == [b"PONG"]
            client.client_kill_filter(_type="normal", skipme=True)
            await until(lambda: line._talk is not None and line._talk.over)
    assert await line.run([("PING",)]) == [b"PONG"]
    await line.close()
    assert most == 1 and not out
    await pool.aclose()


async def test_a_server_that_does_not_answer_is_given_up_in_time(
    opened: Callable[..., RedisClient], tmp_path: Path
) -> None:
    """Stopped, it keeps the connection open: all who wait hear of it at once, and work goes on when it does."""
    with redis_process(tmp_path) as url, Redis.from_url(url) as client:
        pid = client.info()["process_id"]
        lease = await a_lease(opened(url, timeout_s=0.5))
        os.kill(pid, signal.SIGSTOP)
        try:
            calls = [asyncio.create_task(lease.beat(0)) for _ in range(20)]
            done, _ = await asyncio.wait(calls, timeout=20)
            assert len(done) == 20
            for call in calls:
                with pytest.raises(Unavailable, match="no answer within"):
                    call.result()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await lease.beat(0) == {}


async def test_a_server_that_is_gone_is_asked_once_for_all(opened: Callable[..., RedisClient], tmp_path: Path) -> None:
    """However many wait for the connection, each hears that there is none; later there is one again."""
    port = free_port()
    lease = Lease(opened(f"redis://127.0.0.1:{port}/0"), "m")
    answers = await asyncio.gather(*(lease.beat(0) for _ in range(100)), return_exceptions=True)
    assert all(isinstance(answer, Unavailable) for answer in answers)
    with redis_process(tmp_path, port):
        await lease.register()
        assert await lease.beat(0) == {}


async def test_a_timeout_ends_the_connection(line: SharedConnection) -> None:
    """Late answers are never taken for those of later commands."""
    line._timeout_s = 0.2
    with pytest.raises(RedisTimeoutError):
        await line.run([("BLPOP", "nothing", 0)])
    assert await line.run([("ECHO", "later")]) == [b"later"]


def test_refusals_are_known_by_their_code() -> None:
    """As the library makes them: those somebody asks for by class, and the code either in the text or beside it."""
    assert isinstance(refusal("READONLY You can't write"), ReadOnlyError)
    assert (str(refusal("READONLY You can't")), refusal("READONLY x").status_code) == ("You can't", "READONLY")
    moved = refusal("MOVED 3999 127.0.0.1:6381")
    assert (moved.slot_id, moved.node_addr) == (3999, ("127.0.0.1", 6381))  # type: ignore[attr-defined]
    assert str(refusal("OOM command not allowed")) == "OOM command not allowed"


# --- A subscription: every message once and in order, however it is taken, and an end that is always told ---

SOME = [b"%d" % number for number in range(500)]


async def test_messages_come_one_by_one_or_poured(wire: RedisClient) -> None:
    """Those that came before the pouring too, large ones in parts, and nothing of other channels."""
    large = b"x" * 1_000_000
    got: list[bytes] = []
    async with wire.subscribe("here") as subscription:
        for data in SOME:
            await wire.redis.publish("here", data)
        assert [await subscription.message() for _ in SOME[:-1]] == SOME[:-1]
        pouring = asyncio.create_task(subscription.pour(got.extend))
        for data in (large, b"last"):
            await wire.redis.publish("there", b"not this")
            await wire.redis.publish("here", data)
        await until(lambda: got[-1:] == [b"last"], 20)
        pouring.cancel()
        with suppress(asyncio.CancelledError):
            await pouring
    assert got == [SOME[-1], large, b"last"]


async def test_it_leaves_no_connection_behind(wire: RedisClient, redis_url: str) -> None:
    """Given up by its reader or cut by the server; a reader who waits is told, whichever way it waits."""
    with Redis.from_url(redis_url) as client:
        for _ in range(3):
            async with wire.subscribe("here"):
                assert client.pubsub_numsub("here") == [(b"here", 1)]
        for way in ("message", "pour"):
            with pytest.raises(Unavailable, match="lost"):
                async with wire.subscribe("here") as subscription, asyncio.timeout(20):
                    client.client_kill_filter(_type="pubsub")
                    await (subscription.message() if way == "message" else subscription.pour(print))
        await until(lambda: client.pubsub_numsub("here") == [(b"here", 0)], 20)


async def test_what_the_taker_raises_ends_it(wire: RedisClient) -> None:
    """A fault of ours is not taken for one of the server's."""

    def refuse(_data: bytes) -> None:
        raise ValueError("not this")

    with pytest.raises(ValueError, match="not this"):
        async with wire.subscribe("here") as subscription, asyncio.timeout(20):
            await wire.redis.publish("here", b"x")
            await subscription.pour(refuse)


async def test_a_server_that_falls_silent_is_noticed(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers is not, however little is published."""
    monkeypatch.setattr(subject, "PING_INTERVAL_S", 0.05)
    address = redis_url.removeprefix("redis://").partition("/")[0]
    silent = asyncio.Event()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if not silent.is_set():
                    writer.write(data)
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = address.partition(":")
        back, forth = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pass_on(reader, forth), pass_on(back, writer))

    server = await asyncio.start_server(between, "127.0.0.1", 0)
    wire = RedisClient.open(RedisSettings(url=f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"))
    try:
        with pytest.raises(Unavailable, match="heard nothing"):
            async with wire.subscribe("here") as subscription, asyncio.timeout(20):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await subscription.message()
                silent.set()
                await subscription.message()
    finally:
        await wire.close()
        server.close()


async def test_a_refused_subscription_says_why(opened: Callable[..., RedisClient], redis_url: str) -> None:
    """By its access rules, for example."""
    with Redis.from_url(redis_url) as client:
        client.acl_setuser("deaf", enabled=True, nopass=True, commands=["+@all"], keys=["*"], reset_channels=True)
        with pytest.raises(Unavailable, match="NOPERM"):
            async with opened(redis_url.replace("redis://", "redis://deaf:x@")).subscribe("here"):
                pass
        client.acl_deluser("deaf")
