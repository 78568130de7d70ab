"""One process's connection: where it leads, what its failures mean, and that it can be let go of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from flow import put_job
from house import free_port, redis_process
from redis import Redis

from penstock.config import ConfigError, build
from streaming.errors import Unavailable
from streaming.jobs.queue import Queue
from streaming.redis.client import RedisClient, translated
from streaming.redis.settings import Address, RedisSettings, parse_address


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h:1/2", Address("server", "redis://h:1/2")),
        ("rediss://u:p@h", Address("server", "rediss://u:p@h")),
        ("unix:///run/redis.sock", Address("server", "unix:///run/redis.sock")),
        (
            "redis+sentinel://a:1,b/main",
            Address("sentinel", "redis+sentinel://a:1,b/main", (("a", 1), ("b", 26379)), service="main"),
        ),
        (
            "rediss+sentinel://u:p%40@[::1]:1,[::2]/main/3?sentinel_password=s",
            Address(
                "sentinel",
                "rediss+sentinel://u:p%40@[::1]:1,[::2]/main/3?sentinel_password=s",
                (("::1", 1), ("::2", 26379)),
                tls=True,
                username="u",
                password="p@",
                service="main",
                db=3,
                sentinel_password="s",
            ),
        ),
        (
            "redis+cluster://:p@a:1,b:2",
            Address("cluster", "redis+cluster://:p@a:1,b:2", (("a", 1), ("b", 2)), password="p"),
        ),
        ("redis+cluster://a/0", Address("cluster", "redis+cluster://a/0", (("a", 6379),))),
    ],
)
def test_an_address_is_taken_apart(url: str, expected: Address) -> None:
    """Each kind, with what it may carry."""
    assert parse_address(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379",
        "http://u:secret@h",
        "redis://",
        "redis+sentinel://u:secret@h:1",
        "redis+sentinel://u:secret@h:1/main/x",
        "redis+sentinel://u:secret@h:port/main",
        "redis+sentinel://u:secret@h:1,/main",
        "redis+sentinel://u:secret@h/main?db=1",
        "redis+cluster://u:secret@h:99999",
        "redis+cluster://u:secret@h:1/2",
        "redis+cluster://u:secret@h:1?sentinel_password=secret",
    ],
)
def test_an_address_that_leads_nowhere_is_a_setting_at_fault(url: str) -> None:
    """The error names the setting and never repeats the password."""
    with pytest.raises(ConfigError, match=r"^redis\.url: ") as caught:
        build(RedisSettings, {"url": url}, "redis")
    assert "secret" not in str(caught.value)


async def test_sentinels_that_are_gone_are_named_without_their_options(opened: Callable[..., RedisClient]) -> None:
    """The client's own error repeats every option of its connections, the password among them."""
    url = f"redis+sentinel://:hunter2@127.0.0.1:{free_port()}/main"
    with pytest.raises(Unavailable, match="no Sentinel names a primary of 'main'") as caught:
        await put_job(Queue(opened(url, timeout_s=1.0)))
    assert "hunter2" not in str(caught.value) and "Connection" not in str(caught.value)


async def test_a_server_that_cannot_write_is_unavailable(opened: Callable[..., RedisClient], tmp_path: Path) -> None:
    """Out of memory, too few replicas, a replica, without permission, gone: each with the server's own word for it."""
    with redis_process(tmp_path) as url, Redis.from_url(url) as client:
        queue = Queue(opened(url))
        for word, spoil, mend in (
            ("OOM", "CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
            ("NOREPLICAS", "CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
            ("READONLY", f"REPLICAOF 127.0.0.1 {free_port()}", "REPLICAOF NO ONE"),
            ("NOPERM", "ACL SETUSER default -fcall", "ACL SETUSER default +@all"),
        ):
            client.execute_command(*spoil.split())
            with pytest.raises(Unavailable, match=word):
                await put_job(queue)
            client.execute_command(*mend.split())
        await put_job(queue)
    with pytest.raises(Unavailable, match="does not answer"):
        await put_job(queue)


async def test_a_cancellation_that_the_client_swallowed_is_let_through() -> None:
    """It came as a write ended, so the write counts as done: whoever wrote goes no further."""
    reached: list[str] = []

    async def write() -> None:
        with translated():
            asking.cancel()
        reached.append("what comes behind the write")

    asking = asyncio.create_task(write())
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert reached == []


async def test_a_refused_pipeline_is_unavailable_and_does_not_repeat_what_was_sent(wire: RedisClient) -> None:
    """NOREPLICAS comes behind the client's words about the command, which may hold a prompt."""
    await wire.redis.config_set("min-replicas-to-write", 1)
    try:
        pipeline = wire.redis.pipeline(transaction=False)
        pipeline.set("key", "somebody's prompt")
        with pytest.raises(Unavailable) as refused, translated():
            await pipeline.execute()
        with pytest.raises(Unavailable) as plain, translated():
            await wire.redis.set("key", "somebody's prompt")
    finally:
        await wire.redis.config_set("min-replicas-to-write", 0)
    assert str(refused.value) == str(plain.value) == "Redis refuses: NOREPLICAS Not enough good replicas to write."


async def test_a_server_without_its_replicas_is_asked_for_over_a_new_connection(wire: RedisClient) -> None:
    """It may have been deposed without knowing: the Sentinels are asked again with each connection."""

    async def connections() -> int:
        return int((await wire.redis.info("stats"))["total_connections_received"])

    await wire.call("follow", 0, Queue(wire).new_id("t"), "nobody")
    before = await connections()
    await wire.redis.config_set("min-replicas-to-write", 1)
    try:
        for _ in range(2):
            with pytest.raises(Unavailable, match="NOREPLICAS"):
                await wire.call("register", 0, "worker", "m", 1000)
    finally:
        await wire.redis.config_set("min-replicas-to-write", 0)
    assert await connections() > before + 1


def test_a_url_without_its_beginning_names_what_was_meant() -> None:
    """But only a host and port are repeated: anything else may hold a password."""
    with pytest.raises(ValueError, match=r"^url: must begin with .*; did you mean redis://localhost:6390\?$"):
        RedisSettings(url="localhost:6390")
    with pytest.raises(ValueError, match=r"^url: must begin with ") as refused:
        RedisSettings(url="user:secret@localhost:6390")
    assert "secret" not in str(refused.value)


async def test_subscribers_are_counted_by_channel(wire: RedisClient, redis_url: str) -> None:
    """By which a worker knows whom nobody listens to any more."""
    with Redis.from_url(redis_url) as client, client.pubsub() as one, client.pubsub() as two:
        for subscription, names in ((one, ("a", "b")), (two, ("a",))):
            subscription.subscribe(*names)
            for _ in names:
                assert subscription.get_message(timeout=20) is not None
        assert await wire.listeners(["a", "b", "c"]) == {"a": 2, "b": 1, "c": 0}
