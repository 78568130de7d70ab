"""A store that becomes another one while a process runs: seen, said, and forgotten when it is a fit one again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from batching import batch_record
from flow import Flow, a_job, tokens_of, until
from house import House, eventually, free_port, redis_process
from redis import Redis

from penstock.config import ConfigError
from streaming.batches.store import Batches, BatchState
from streaming.errors import Unavailable
from streaming.jobs.job import JobState
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.keys import fleet_key
from streaming.redis.client import RedisClient
from streaming.redis.settings import Durability
from streaming.store import monitor as monitors
from streaming.store.identity import enter_store
from streaming.store.monitor import WRONG_STORE, StoreMonitor, check_level, shortfalls

pytestmark = pytest.mark.slow

BODY = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def test_a_server_that_came_back_unfit_is_given_nothing(tmp_path: Path) -> None:
    """The address is the same and the server another, without its append-only file: as with a promoted replica. No
    request is accepted, readiness says why, workers say so too; and all of it ends with a fit server."""
    port = free_port()
    house = House(f"redis://127.0.0.1:{port}/0", tmp_path)

    def status() -> int:
        return house.post("/v1/jobs", BODY)[0]

    try:
        with redis_process(tmp_path, port, "--appendonly", "yes"):
            house.start("workers")
            house.start_api()
            eventually(lambda: house.get("/readyz")[0] == 200 and status() == 202)
            with Redis(port=port) as client:
                client.save()  # what a replica has, too
        with redis_process(tmp_path, port, "--appendonly", "no"):
            eventually(lambda: status() == 503 and b"cannot keep what is accepted" in house.get("/readyz")[1])
            eventually(lambda: "appendonly is no" in house.log("workers"))
        with redis_process(tmp_path, port, "--appendonly", "yes"):
            eventually(lambda: status() == 202)
            assert b"cannot keep" not in house.get("/readyz")[1]
    finally:
        house.close()


async def test_settings_that_change_are_seen_a_little_later(
    opened: Callable[..., RedisClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is the same: it is asked again after CHECK_INTERVAL_S, and not with every look."""
    with redis_process(tmp_path, None, "--appendonly", "yes") as url, Redis.from_url(url) as client:
        monitor = StoreMonitor(opened(url))
        assert "not been checked" in monitor.reason
        with pytest.raises(Unavailable, match="not been checked"):
            assert monitor.refusal
        await monitor.require()
        assert monitor.reason == monitor.refusal == ""
        client.config_set("appendonly", "no")
        client.config_resetstat()
        await monitor.look()
        assert monitor.reason == "" and "cmdstat_config|get" not in client.info("commandstats")
        monkeypatch.setattr(monitors, "CHECK_INTERVAL_S", 0.0)
        await monitor.look()
        assert "appendonly is no" in monitor.reason
        assert monitor.brief == monitors.SHORTFALL, "clients are told nothing of its settings"
        with pytest.raises(ConfigError, match="appendonly"):
            await monitor.require()
        client.config_set("appendonly", "yes")
        await monitor.look()
        assert monitor.reason == ""


async def test_a_store_that_was_replaced_by_another_is_refused(
    redis_url: str, wire: RedisClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Another deployment's data under the same address: told; with another number of partitions: refused."""
    monitor = StoreMonitor(wire)
    await monitor.require()
    with caplog.at_level(logging.WARNING), Redis.from_url(redis_url) as client:
        client.hset(fleet_key("store"), mapping={"deployment": "dep_other"})
        await monitor.look()
        assert monitor.reason == "" and monitor.deployment == "dep_other" and "another deployment id" in caplog.text
        assert {record.name for record in caplog.records} == {"streaming.store.monitor"}, "by which operators find it"
        client.hset(fleet_key("store"), mapping={"partitions": 7})
        await monitor.look()
        assert "set redis.partitions = 7" in monitor.reason
        client.hset(fleet_key("store"), mapping={"partitions": 1})
        await monitor.look()
        assert monitor.reason == ""


async def test_a_process_that_found_no_store_enters_late(opened: Callable[..., RedisClient], tmp_path: Path) -> None:
    """It refuses work until then; and goes on refusing where the store is not its own."""
    port = free_port()
    monitor = StoreMonitor(opened(f"redis://127.0.0.1:{port}/0"))
    await monitor.try_to_enter()
    assert not monitor.entered.is_set() and monitor.reason
    with pytest.raises(Unavailable):
        await monitor.require()
    with redis_process(tmp_path, port, "--appendonly", "yes") as url, Redis(port=port) as client:
        await enter_store(opened(url, partitions=2))
        looking = asyncio.create_task(monitor.keep_looking())
        await until(lambda: "has 2 partitions" in monitor.reason and monitor.refusal == WRONG_STORE)
        client.hset(fleet_key("store"), "partitions", 1)
        await until(lambda: monitor.reason == "")
        assert monitor.entered.is_set()
        looking.cancel()


# --- Levels of durability: what a server must be for each, and what D3 waits for ---


GOOD = {
    "address": "", "redis_version": "7.2.4", "appendonly": "yes", "appendfsync": "always", "maxmemory": "1000",
    "maxmemory-policy": "noeviction", "replicas": "2", "min-replicas-to-write": "1",
}  # fmt: skip
FATAL, ADVICE = True, False
Opened = Callable[..., RedisClient]


@pytest.mark.parametrize(("level", "facts", "expected"), [
    ("D0", {}, [("redis.durability", ADVICE)]), ("D0", {"appendonly": "no"}, [("redis.durability", ADVICE)]),
    ("D1", {}, []), ("D2", {}, []), ("D3", {}, []), ("D1", {"appendonly": "no"}, [("appendonly", FATAL)]),
    ("D3", {"appendonly": "no"}, [("appendonly", FATAL)]), ("D1", {"appendfsync": "everysec"}, []),
    ("D1", {"appendfsync": "no"}, [("appendfsync", FATAL)]),
    ("D2", {"appendfsync": "everysec"}, [("appendfsync", FATAL)]), ("D3", {"appendfsync": "everysec"}, []),
    ("D3", {"appendfsync": "no"}, [("appendfsync", FATAL)]), ("D2", {"appendfsync": ""}, [("appendfsync", ADVICE)]),
    ("D1", {"maxmemory": "0", "maxmemory-policy": "allkeys-lru"}, [("maxmemory", ADVICE)]),
    ("D1", {"maxmemory-policy": "allkeys-lru"}, [("maxmemory-policy", FATAL)]),
    ("D3", {"maxmemory": "0"}, [("maxmemory", ADVICE)]), ("D0", {"maxmemory": "0"}, [("redis.durability", ADVICE)]),
    ("D3", {"replicas": "0"}, [("connected replicas", ADVICE)]),
    ("D1", {"replicas": "0", "min-replicas-to-write": "0"}, []),
    ("D3", {"min-replicas-to-write": "0"}, [("min-replicas-to-write", ADVICE)]),
    ("D3", {"min-replicas-to-write": ""}, []), ("D1", {"redis_version": "6.2.14"}, [("redis_version", FATAL)]),
    ("D0", {"redis_version": ""}, [("redis_version", FATAL), ("redis.durability", ADVICE)]),
    ("D1", {"redis_version": ""}, [("redis_version", FATAL)]),
    ("D1", {"maxmemory-policy": ""}, [("maxmemory-policy", FATAL)]), ("D1", {"redis_version": "10.0.1"}, []),
])  # fmt: skip
def test_a_server_is_held_against_a_level(
    level: Durability, facts: dict[str, str], expected: list[tuple[str, bool]]
) -> None:
    """What is wanting, the fatal first, from the facts alone."""
    found = shortfalls(level, {**GOOD, **facts})
    assert [(shortfall.key, shortfall.fatal) for shortfall in found] == expected
    assert all(shortfall.fix and shortfall.key in str(shortfall) for shortfall in found)


async def test_a_real_server_is_refused_for_what_it_cannot_keep(opened: Opened, tmp_path: Path) -> None:
    """Its own settings decide, changed one by one."""
    with redis_process(tmp_path, None, "--appendonly", "no") as url, Redis.from_url(url) as client:
        d0, d1, d2 = (opened(url, durability=level) for level in ("D0", "D1", "D2"))
        (warning,) = await check_level(d0)
        assert "trying things out" in warning
        with pytest.raises(ConfigError, match=r"redis\.durability: Redis cannot keep D1: appendonly is no"):
            await check_level(d1)
        client.config_set("appendonly", "yes")
        client.config_set("maxmemory", "100mb")
        eventually(lambda: client.info("persistence")["aof_base_size"])  # until then it does not take a SIGTERM
        assert await check_level(d1) == []
        with pytest.raises(ConfigError, match="appendfsync is everysec, needed: always"):
            await check_level(d2)
        client.config_set("appendfsync", "always")
        assert await check_level(d2) == []
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(ConfigError, match="maxmemory-policy is allkeys-lru"):
            await check_level(d2)


async def test_what_may_not_be_asked_is_said(opened: Opened, tmp_path: Path) -> None:
    """A user without CONFIG gets a warning, one without INFO a refusal that names the permission."""
    options = ("--appendonly", "yes", "--maxmemory", "100mb")
    with redis_process(tmp_path, None, *options) as url, Redis.from_url(url) as client:
        client.execute_command("ACL", "SETUSER", "some", "on", ">secret", "~*", "&*", "+@all", "-config")
        wire = opened(url.replace("redis://", "redis://some:secret@"))
        (warning,) = await check_level(wire)
        assert warning.startswith("appendfsync is unknown")
        client.execute_command("ACL", "SETUSER", "some", "-info")
        with pytest.raises(Unavailable, match="NOPERM"):
            await check_level(wire)


async def test_at_d3_nothing_is_promised_without_a_replica(opened: Opened, redis_url: str) -> None:
    """A put, a cancel and a wish for a batch are Unavailable although they ran; the same put at D1 finds the job."""
    careful, careless = (opened(redis_url, durability=level, timeout_s=0.5) for level in ("D3", "D1"))
    job = a_job(Queue(careful))
    with pytest.raises(Unavailable, match="no replica has it yet"):
        await Queue(careful).put(job, idempotency_key="k", digest="d")
    again = await Queue(careless).put(a_job(Queue(careless)), idempotency_key="k", digest="d")
    assert again.joined and again.id == job.id
    with pytest.raises(Unavailable, match="no replica has it yet"):
        await Queue(careful).cancel(job.id)
    assert (await JobReader(careful).record(job.id)).state is JobState.CANCELLED
    batch = batch_record(id=Batches(careful).new_id("t"))
    await Batches(careless).create(batch, "digest")
    with pytest.raises(Unavailable, match="no replica has it yet"):
        await Batches(careful).request(batch.id, "cancel")
    assert (await Batches(careless).get(batch.id, "t")).state is BatchState.CANCELLING


@contextmanager
def primary_and_replica(folder: Path) -> Iterator[tuple[str, int]]:
    """A primary's address and its replica's process."""
    for name in ("primary", "replica"):
        (folder / name).mkdir()
    port, follower = free_port(), free_port()
    file = ("--appendonly", "yes", "--repl-diskless-sync-delay", "0")
    with (
        redis_process(folder / "primary", port, *file) as url,
        redis_process(folder / "replica", follower, *file, "--replicaof", f"127.0.0.1 {port}"),
        Redis(port=port) as client,
        Redis(port=follower) as replica,
    ):
        eventually(lambda: client.set("probe", 1) and client.wait(1, 100))
        yield url, int(replica.info("server")["process_id"])


async def test_at_d3_a_repetition_is_no_proof(opened: Opened, tmp_path: Path) -> None:
    """While the replica is deaf, repeating a put from another process confirms nothing; a finish is repeated too,
    and both are answered once the replica hears again."""
    with primary_and_replica(tmp_path) as (url, replica):
        wire, other = (opened(url, durability="D3", timeout_s=0.5) for _ in range(2))
        job, flow = a_job(Queue(wire)), Flow(wire)

        async def ended() -> bool:
            return (await JobReader(wire).record(job.id)).state.final

        os.kill(replica, signal.SIGSTOP)
        try:
            for process in (wire, other):
                with pytest.raises(Unavailable, match="no replica has it yet"):
                    await Queue(process).put(job)
            async with flow.working():
                await until(ended)
                assert flow.finished == 0
                os.kill(replica, signal.SIGCONT)
                await until(lambda: flow.finished == 1)
        finally:
            os.kill(replica, signal.SIGCONT)
        assert (await Queue(other).put(job)).id == job.id
        assert tokens_of(await JobReader(other).record(job.id))
