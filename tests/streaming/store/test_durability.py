"""Levels of durability: what a server must be for each, and what D3 waits for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from flow import Flow, a_job, tokens_of, until
from house import eventually, free_port, redis_process
from redis import Redis

from penstock.config import ConfigError
from streaming.batches.store import Batch, Batches, BatchState
from streaming.errors import Unavailable
from streaming.jobs.job import JobState
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.order import Priority
from streaming.redis.client import RedisClient
from streaming.redis.settings import Durability
from streaming.store.monitor import check_level, shortfalls

pytestmark = pytest.mark.slow

GOOD = {
    "place": "",
    "redis_version": "7.2.4",
    "appendonly": "yes",
    "appendfsync": "always",
    "maxmemory": "1000",
    "maxmemory-policy": "noeviction",
    "replicas": "2",
    "min-replicas-to-write": "1",
}
FATAL, ADVICE = True, False
Opened = Callable[..., RedisClient]


@pytest.mark.parametrize(
    ("level", "facts", "expected"),
    [
        ("D0", {}, [("redis.durability", ADVICE)]),
        ("D0", {"appendonly": "no"}, [("redis.durability", ADVICE)]),
        ("D1", {}, []),
        ("D2", {}, []),
        ("D3", {}, []),
        ("D1", {"appendonly": "no"}, [("appendonly", FATAL)]),
        ("D3", {"appendonly": "no"}, [("appendonly", FATAL)]),
        ("D1", {"appendfsync": "everysec"}, []),
        ("D1", {"appendfsync": "no"}, [("appendfsync", FATAL)]),
        ("D2", {"appendfsync": "everysec"}, [("appendfsync", FATAL)]),
        ("D3", {"appendfsync": "everysec"}, []),
        ("D3", {"appendfsync": "no"}, [("appendfsync", FATAL)]),
        ("D2", {"appendfsync": ""}, [("appendfsync", ADVICE)]),
        ("D1", {"maxmemory": "0", "maxmemory-policy": "allkeys-lru"}, [("maxmemory", ADVICE)]),
        ("D1", {"maxmemory-policy": "allkeys-lru"}, [("maxmemory-policy", FATAL)]),
        ("D3", {"maxmemory": "0"}, [("maxmemory", ADVICE)]),
        ("D0", {"maxmemory": "0"}, [("redis.durability", ADVICE)]),
        ("D3", {"replicas": "0"}, [("connected replicas", ADVICE)]),
        ("D1", {"replicas": "0", "min-replicas-to-write": "0"}, []),
        ("D3", {"min-replicas-to-write": "0"}, [("min-replicas-to-write", ADVICE)]),
        ("D3", {"min-replicas-to-write": ""}, []),
        ("D1", {"redis_version": "6.2.14"}, [("redis_version", FATAL)]),
        ("D0", {"redis_version": ""}, [("redis_version", FATAL), ("redis.durability", ADVICE)]),
        ("D1", {"redis_version": ""}, [("redis_version", FATAL)]),
        ("D1", {"maxmemory-policy": ""}, [("maxmemory-policy", FATAL)]),
        ("D1", {"redis_version": "10.0.1"}, []),
    ],
)
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
    batch = Batch(
        id=Batches(careful).new_id("t"), tenant="t", ceiling=Priority.BATCH, endpoint="/v1/completions",
        input_file="f", window="none", output_keep_ms=1,
    )  # fmt: skip
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
