"""One process's connection: where it leads, what its failures mean, and that it can be let go of."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from flow import a_job, put_job
from house import free_port, redis_process
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from penstock.config import ConfigError, build
from streaming.errors import LaneFull, Unavailable
from streaming.ids import partition_of
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import MAX_AT_ONCE, Delivered, Deliveries
from streaming.keys import lua_prelude, partition_key, prefix
from streaming.order import lua_constants
from streaming.redis.client import EAGER_CALLS, MAX_BATCHED_CALLS, MAX_LIBRARIES, Call, RedisClient, Then, translated
from streaming.redis.clock import Clock, measured
from streaming.redis.scripts import LIBRARIES, Library, assemble, load_library
from streaming.redis.settings import Address, RedisSettings, parse_address


@pytest.mark.parametrize(("url", "kind", "more"), [
    ("redis://h:1/2", "server", {}), ("rediss://u:p@h", "server", {}), ("unix:///run/redis.sock", "server", {}),
    ("redis+sentinel://a:1,b/main", "sentinel", {"hosts": (("a", 1), ("b", 26379)), "service": "main"}),
    ("rediss+sentinel://u:p%40@[::1]:1,[::2]/main/3?sentinel_password=s", "sentinel", {
        "hosts": (("::1", 1), ("::2", 26379)), "tls": True, "username": "u", "password": "p@", "service": "main",
        "db": 3, "sentinel_password": "s",
    }),
    ("redis+cluster://:p@a:1,b:2", "cluster", {"hosts": (("a", 1), ("b", 2)), "password": "p"}),
    ("redis+cluster://a/0", "cluster", {"hosts": (("a", 6379),)}),
])  # fmt: skip
def test_an_address_is_taken_apart(url: str, kind: Any, more: dict[str, Any]) -> None:
    """Each kind, with what it may carry."""
    assert parse_address(url) == Address(kind, **more)


@pytest.mark.parametrize("url", [
    "localhost:6379", "http://u:secret@h", "redis://", "redis+sentinel://u:secret@h:1",
    "redis+sentinel://u:secret@h:1/main/x", "redis+sentinel://u:secret@h:port/main",
    "redis+sentinel://u:secret@h:1,/main", "redis+sentinel://u:secret@h/main?db=1",
    "redis+cluster://u:secret@h:99999", "redis+cluster://u:secret@h:1/2",
    "redis+cluster://u:secret@h:1?sentinel_password=secret",
])  # fmt: skip
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


@pytest.mark.parametrize("durability", ["D1", "D3"])
async def test_a_refused_write_is_unavailable_and_does_not_repeat_what_was_sent(
    opened: Callable[..., RedisClient], redis_url: str, durability: str
) -> None:
    """D3 sends the library's pipelines, whose errors would begin with the command, which may hold a prompt."""
    wire = opened(redis_url, durability=durability)
    await wire.call("follow", 0, Queue(wire).new_id("t"), "nobody")  # the functions are there
    await wire.redis.config_set("min-replicas-to-write", 1)
    try:
        with pytest.raises(Unavailable) as refused:
            await put_job(Queue(wire))
    finally:
        await wire.redis.config_set("min-replicas-to-write", 0)
    assert str(refused.value) == "Redis refuses: NOREPLICAS Not enough good replicas to write."


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


# --- The function library: what is in it, how it comes to a server, and that calls leave nothing behind ---

LUA = files("streaming") / "lua"
SHARED = {path.name: path.read_text("utf-8") for path in (LUA / "shared").iterdir()}


def library(text: str, shared: str = "") -> Library:
    """The shared functions and further ones, with these scripts alone."""
    own = f"-- A file.\n\n{text}\n"
    return assemble(SHARED | {"claims.lua": SHARED["claims.lua"] + shared, "own.lua": own})


def test_a_script_has_the_shared_functions_it_uses_and_what_these_use() -> None:
    """A word in a comment takes no function along, neither in the script nor in a function that it uses."""
    shared = (
        "local function helper(x) return to_member(x) end\n-- helper, unusual\nlocal function unusual(x) return x end\n"
    )
    source = library("#!lua name=test\nreturn helper(ARGV[1]) -- not unusual(x)", shared).sources["test"]
    assert "local function helper" in source and "local function to_member" in source
    assert "local function unusual" not in source and "local function exact_ms" not in source


def test_functions_keep_no_state_but_that_of_their_round() -> None:
    """Of the variables outside functions, only two are ever assigned or filled; every round begins with new ones."""
    shared = "".join((lua_prelude(), lua_constants(), *SHARED.values()))
    outer = set(re.findall(r"^local (?!function)(\w+)", shared, re.MULTILINE))
    text = re.sub(r"--.*", "", load_library().text)
    assert {"P", "round", "STATES", "PRIORITIES"} < outer
    for name in outer - {"P", "round"}:
        assert name.isupper(), name
        assert not re.search(rf"(?<!local )\b{name}(\[[^\]]*\]|\.\w+)? = ", text), name
        assert not re.search(rf"table\.\w+\({name}\b", text), name
    assert len(re.findall(r"\b(?:P|round) = ", text)) == 3  # declared, and set for each round


async def test_a_round_that_fails_leaves_nothing_to_the_next(wire: RedisClient) -> None:
    """Neither what it was to write nor what it has read."""
    scripts = "#!lua name=spoil\nbuffer_sum('usage', ARGV[1], '9999999999', 5)\nround.reserved_total = 7\n"
    own = library(
        f"{scripts}return 1\n#!lua name=look\nreturn {{total_reserved_bytes(), redis.call('EXISTS', kept_key('t'))}}"
    )
    await wire.redis.function_load(own.text)
    try:
        kept = partition_key(0, "kept", "t")
        await wire.redis.set(kept, "not a hash")
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await wire.redis.fcall(f"{own.name}_spoil", 1, prefix(0), 1, "t")
        await wire.redis.delete(kept)
        assert await wire.redis.fcall(f"{own.name}_look", 1, prefix(0), 0) == [[0, 0]]
        assert await wire.redis.fcall(f"{own.name}_spoil", 1, prefix(0), 1, "t", 1, "t") == [1, 1]
        assert await wire.redis.hvals(kept) == [b"10"]
    finally:
        await wire.redis.function_delete(own.name)


async def libraries(wire: RedisClient) -> set[str]:
    return {each[1].decode() for each in await wire.redis.function_list(f"{LIBRARIES}*")}


async def test_versions_run_beside_each_other_and_old_ones_do_not_pile_up(wire: RedisClient) -> None:
    """A process loads its library where that is missing, and removes some of the others if there are many. One whose
    library was removed loads it again."""
    await wire.redis.function_flush()
    older = RedisClient.open(wire.settings)
    text = load_library().text.replace(load_library().name, f"{LIBRARIES}{0:08x}")
    older._library = replace(load_library(), name=f"{LIBRARIES}{0:08x}", text=text)
    try:
        for _ in range(3):
            await asyncio.gather(*(each.call("lead", -1, "x", 1000) for each in (wire, older) for _ in range(5)))
            assert await libraries(wire) == {load_library().name, f"{LIBRARIES}{0:08x}"}
            await wire.redis.flushall()
        for number in range(1, 2 * MAX_LIBRARIES):
            name = f"{LIBRARIES}{number:08x}"
            await wire.redis.function_load(f"#!lua name={name}\nredis.register_function('{name}', function() end)")
        foreign = f"{LIBRARIES}of_another_program"
        await wire.redis.function_load(f"#!lua name={foreign}\nredis.register_function('{foreign}', function() end)")
        await wire.redis.function_delete(load_library().name)
        await wire.call("record", 0, "none")
        left = await libraries(wire)
        assert {load_library().name, foreign} <= left and len(left) == MAX_LIBRARIES + 1
        await older.call("record", 0, "none")
    finally:
        await older.close()
        await wire.redis.function_flush()


# --- Redis time as a process tells it by itself, within the bound it states; and the notes of when answer ---


@given(st.integers(-(10**15), 10**15), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_truth_lies_within_the_bound(truth: int, there: int, back: int) -> None:
    """However unequal the ways to the server and back are."""
    sent = 5_000_000
    offset = measured(sent, sent + there + truth, sent + there + back)
    assert abs(offset.value - truth) <= offset.error <= (there + back) // 2 + 2


async def test_it_tells_the_servers_time(wire: RedisClient) -> None:
    """Before and after a question to the server, within its bound; and nothing before it was ever compared."""
    clock = Clock(wire)
    assert clock.at(time.monotonic(), 0) == 0 == clock.error_us(0)
    await clock.renew()
    assert clock.at(0.0, 0) == 0, "a time that is not known stays so"
    (name,) = await wire.homes()
    before = clock.at(time.monotonic(), 0)
    server = await wire.time_us(name)
    after = clock.at(time.monotonic(), 0)
    bound = clock.error_us(0)
    assert 0 < bound < 1_000_000 and before - bound <= server <= after + bound


async def test_deliveries_are_noted_once_and_only_for_jobs_that_are_kept(wire: RedisClient) -> None:
    """More than go into one script; a second note changes nothing; a job that is gone does not come back as a key."""
    queue, deliveries, reader = Queue(wire), Deliveries(wire), JobReader(wire)
    jobs = [a_job(queue) for _ in range(MAX_AT_ONCE + 3)]
    for job in jobs[:3]:
        await queue.put(job)
    for number, job in enumerate(jobs):
        deliveries.note(job.id, Delivered(first_got=number + 1, clock_us=7))
    assert deliveries.of(jobs[1].id) == Delivered(first_got=2, clock_us=7)
    await deliveries.write()
    assert deliveries.of(jobs[1].id) is None
    assert (await reader.record(jobs[1].id)).delivered == Delivered(first_got=2, clock_us=7)
    deliveries.note(jobs[1].id, Delivered(first_got=99))
    await deliveries.write()
    assert (await reader.record(jobs[1].id)).delivered == Delivered(first_got=2, clock_us=7)
    gone = jobs[5].id
    assert not await wire.redis.exists(partition_key(partition_of(gone) or 0, "job", gone))


async def test_times_divide_a_millisecond(wire: RedisClient) -> None:
    """Accepted in microseconds of the server's own clock, and still in whole milliseconds for everybody else."""
    queue, clock = Queue(wire), Clock(wire)
    await clock.renew()
    before = clock.at(time.monotonic(), 0) - clock.error_us(0)
    job = a_job(queue)
    accepted = await queue.put(job)
    after = clock.at(time.monotonic(), 0) + clock.error_us(0)
    record = await JobReader(wire).record(job.id)
    assert before <= record.stamps.accepted <= after
    assert accepted.created_ms == record.created_ms == record.stamps.accepted // 1000
