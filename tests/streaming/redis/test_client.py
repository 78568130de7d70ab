"""One process's connection: where it leads, what its failures mean, and that it can be let go of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from flow import a_job, put_job
from house import free_port, redis_process
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from penstock.config import ConfigError, build
from streaming.errors import LaneFull, Unavailable
from streaming.jobs.queue import Queue
from streaming.keys import partition_key
from streaming.redis.client import EAGER_CALLS, MAX_BATCHED_CALLS, Call, RedisClient, Then, translated
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


async def test_subscribers_are_counted_by_channel(wire: RedisClient, redis_url: str) -> None:
    """By which a worker knows whom nobody listens to any more."""
    with Redis.from_url(redis_url) as client, client.pubsub() as one, client.pubsub() as two:
        for subscription, names in ((one, ("a", "b")), (two, ("a",))):
            subscription.subscribe(*names)
            for _ in names:
                assert subscription.get_message(timeout=20) is not None
        assert await wire.listeners(["a", "b", "c"]) == {"a": 2, "b": 1, "c": 0}


# --- Calls of many tasks in one round trip: each gets its own answer, and only its own error ---


class Counted(RedisClient):
    """Counts the calls of each round trip, and can be made to wait or to fail."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trips: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.down = False

    async def outcomes(self, calls: Sequence[Call]) -> list[Any]:
        self.trips.append(len(calls))
        await self.gate.wait()
        if self.down:
            raise Unavailable("Redis does not answer")
        return await super().outcomes(calls)


@pytest.fixture
async def wire(opened: Callable[..., Counted], redis_url: str) -> Counted:
    return opened(redis_url, Counted, lane_limit=3)


async def test_what_waits_while_one_is_under_way_goes_together(wire: Counted) -> None:
    queue = Queue(wire)
    wire.gate.clear()
    puts = [asyncio.create_task(queue.put(a_job(queue, model=f"m{number}"))) for number in range(MAX_BATCHED_CALLS + 3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = asyncio.create_task(queue.put(a_job(queue, model="late")))
    wire.gate.set()
    accepted = await asyncio.gather(*puts, late)
    assert len({each.id for each in accepted}) == MAX_BATCHED_CALLS + 4
    assert wire.trips == [MAX_BATCHED_CALLS, 4]


async def test_many_are_sent_before_the_others_of_their_turn_have_come(wire: Counted) -> None:
    """Over a connection that is open; what cannot be sent at once, or has to be sent again, goes the usual way."""
    begun: list[int] = []
    send_nowait = wire.send_nowait

    def counted(calls: Sequence[Call], then: Then) -> bool:
        begun.append(len(calls))
        return send_nowait(calls, then)

    wire.send_nowait = counted  # type: ignore[method-assign]
    queue = Queue(wire)
    await queue.put(a_job(queue, model="first"))  # opens the connection
    wire.trips.clear()
    wire.gate.clear()
    puts = [asyncio.create_task(queue.put(a_job(queue, model=f"m{number}"))) for number in range(2 * EAGER_CALLS + 3)]
    done, _ = await asyncio.wait(puts, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert begun == [EAGER_CALLS, EAGER_CALLS] and done, "they are answered although the rest is held up"
    wire.gate.set()
    await asyncio.gather(*puts)
    assert wire.trips == [3]
    await wire.redis.function_flush()
    again = await asyncio.gather(*(queue.put(a_job(queue, model=f"n{number}")) for number in range(EAGER_CALLS)))
    assert len({each.id for each in again}) == EAGER_CALLS and wire.trips == [3, EAGER_CALLS]


async def test_a_connection_lost_under_many_is_told_to_each_and_none_is_sent_again(
    wire: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent, and may have run: whoever asked is to know, not to wait for another try. The queue itself tries once
    more, here all of them in the same turn of the loop."""
    monkeypatch.setattr("streaming.jobs.queue.PUT_RETRY_DELAY_S", 0.0)
    queue = Queue(wire)
    await queue.put(a_job(queue, model="first"))
    wire.trips.clear()
    lost = asyncio.get_running_loop().create_future()
    lost.set_exception(RedisConnectionError("lost"))
    wire._topology.send_scripts = lambda _: lost  # type: ignore[method-assign]
    puts = (queue.put(a_job(queue, model=f"m{number}")) for number in range(EAGER_CALLS))
    assert {type(each) for each in await asyncio.gather(*puts, return_exceptions=True)} == {Unavailable}
    assert wire.trips == []


async def test_each_is_refused_for_itself(wire: Counted) -> None:
    """One lane is full, the others are not."""
    queue = Queue(wire)
    models = ["full"] * 5 + ["other"] * 2
    outcomes = await asyncio.gather(*(queue.put(a_job(queue, model=each)) for each in models), return_exceptions=True)
    assert [isinstance(outcome, LaneFull) for outcome in outcomes] == [False] * 3 + [True] * 2 + [False] * 2


async def test_one_that_breaks_in_the_script_breaks_no_other(wire: Counted) -> None:
    """The lane of one model is not a stream."""
    queue = Queue(wire)
    await wire.redis.set(partition_key(0, "lane", "broken", "standard"), "no stream")
    models = ["fine", "broken", "fine"]
    outcomes = await asyncio.gather(*(queue.put(a_job(queue, model=each)) for each in models), return_exceptions=True)
    assert isinstance(outcomes[1], ResponseError) and "WRONGTYPE" in str(outcomes[1])
    assert not isinstance(outcomes[0], Exception) and not isinstance(outcomes[2], Exception)


async def test_a_caller_that_leaves_takes_nobody_with_it(wire: Counted) -> None:
    queue = Queue(wire)
    wire.gate.clear()
    leaving, staying = (asyncio.create_task(queue.put(a_job(queue, model="m"))) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    wire.gate.set()
    assert (await staying).created_ms > 0
