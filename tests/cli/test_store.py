"""`penstock store` and `penstock probe` where processes run: what a store holds, and what a HEALTHCHECK hears."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_instance import running_at
from house import House, eventually, free_port
from redis import Redis

from cli.__main__ import main
from penstock.config import ConfigError
from streaming.batches.file_store import FileStore
from streaming.errors import Unavailable
from streaming.fleet.processes import HEARTBEAT_TIMEOUT_S
from streaming.keys import fleet_key, partition_key
from streaming.redis.client import RedisClient
from streaming.store.identity import FORMAT, count_contents, enter_store, reset_store

pytestmark = pytest.mark.slow


@pytest.fixture
def asked(empty_house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """Commands given where this house's settings hold."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", empty_house.redis_url)
    monkeypatch.setenv("PENSTOCK_API_PORT", str(empty_house.port))
    return empty_house


@pytest.fixture
def redis(asked: House) -> Iterator[Redis]:
    with Redis.from_url(asked.redis_url, decode_responses=True) as client:
        yield client


def earlier_version(redis: Redis) -> None:
    """What it leaves: two jobs of which one runs, a batch, a file; and another program's key."""
    for number in (1, 2):
        redis.xadd(partition_key(0, "lane", "sim", "standard"), {"id": str(number)})
        redis.hset(partition_key(0, "job", str(number)), "state", "queued")
    redis.sadd(partition_key(0, "claims", "w"), "1")
    redis.hset(partition_key(0, "batch", "b"), "status", "in_progress")
    redis.zadd(partition_key(0, "due"), {"b": 1})
    redis.set(partition_key(0, "file", "f"), "x")
    redis.set(partition_key(0, "tick"), 7)
    redis.set("penstock:celery:offline", "x")
    redis.set("user:1", "x")


def test_a_store_of_an_earlier_version_is_reset(asked: House, redis: Redis, told: Any) -> None:
    """A role refuses it and names the command. That counts, with --yes deletes Penstock's keys, and the role runs."""
    earlier_version(redis)
    scheduler = asked.start("scheduler")
    assert scheduler.wait(60) == 2 and "penstock store reset --yes" in asked.log("scheduler")
    captured = told("store reset --json", code=2)
    assert json.loads(captured.err)["error"]["next"] == "penstock store reset --yes"
    counts = json.loads(captured.out)
    expected = {"keys": 9, "jobs": 2, "unfinished": 2, "running": 1, "batches": 1, "batches_unfinished": 1, "files": 1}
    assert {name: counts[name] for name in expected} == expected
    assert redis.dbsize() == 10
    assert "jobs that wait or run" in told("store reset --yes").out
    assert redis.keys("*") == ["user:1"]
    asked.start("scheduler", "--id", "fresh")
    eventually(lambda: redis.hget(fleet_key("store"), "format") == str(FORMAT))


async def test_a_reset_that_is_cut_off_at_its_first_key_leaves_a_store_nobody_starts_on(
    wire: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity is marked before anything is deleted; the same command again ends what was begun."""
    await enter_store(wire)
    await wire.redis.set(partition_key(0, "tick"), 7)
    with monkeypatch.context() as cut:

        async def run_at(*_: object) -> None:
            raise Unavailable("the store is away")

        async def scan(_: str) -> AsyncIterator[tuple[str, list[str]]]:
            yield "here", [partition_key(0, "tick")]

        cut.setattr(wire, "run_at", run_at)
        cut.setattr(wire, "scan", scan)
        with pytest.raises(Unavailable):
            await reset_store(wire)
    assert await wire.redis.exists(partition_key(0, "tick"))
    with pytest.raises(ConfigError, match="format 0"):
        await enter_store(wire)
    assert await reset_store(wire) == 2
    await enter_store(wire)


async def test_each_kind_of_content_is_counted_for_what_it_is(wire: RedisClient) -> None:
    """What a reset would lose: a different number of each, so that none is taken for another."""
    kinds = {"outbox": "broker", "dead": "", "hook_due": "endpoint", "due": ""}
    for number, (kind, name) in enumerate(kinds.items(), 1):
        key = partition_key(0, kind, *([name] if name else []))
        for entry in range(number):
            if kind in ("outbox", "dead"):
                await wire.redis.xadd(key, {"id": str(entry)})
            else:
                await wire.redis.zadd(key, {str(entry): entry})
    found = await count_contents(wire)
    assert {name: number for name, number in found.items() if number} == {
        "events": 1, "dead_letters": 2, "webhooks": 3, "batches_unfinished": 4, "keys": 4,
    }  # fmt: skip


def test_a_store_in_use_is_not_reset(asked: House, redis: Redis, told: Any) -> None:
    asked.start_api()
    eventually(lambda: redis.zcard(fleet_key("procs")))
    before = redis.dbsize()
    assert "1 process uses this store" in told("store reset --yes", code=1).err and redis.dbsize() >= before


def test_show_and_adopt(asked: House, redis: Redis, told: Any) -> None:
    """A folder of another deployment is adopted, which a person must confirm; doctor says so before. Without that,
    nothing is written to a store that has no identity yet, which may be the wrong one."""
    folder = asked.folder / ".penstock" / "files"
    FileStore(folder).adopt("dep_other")
    assert "nothing was changed" in told("store adopt", code=2).err
    assert redis.keys("*") == [] and FileStore(folder).owner == "dep_other"
    redis.hset(fleet_key("store"), mapping={"format": FORMAT, "partitions": 1, "deployment": "dep_ours"})
    assert "penstock store adopt --yes" in told("doctor", code=None).out
    shown = json.loads(told("store show --json").out)
    assert (shown["deployment"], shown["files_deployment"], shown["format"]) == ("dep_ours", "dep_other", FORMAT)
    told("store adopt", code=2)
    assert FileStore(folder).owner == "dep_other"
    told("store adopt --yes")
    assert FileStore(folder).owner == "dep_ours"
    assert "adopt" not in told("doctor", code=None).out


def test_the_embedded_store_is_reset_while_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    """Its server runs for as long as the command does. Without a store there is nothing to do."""
    monkeypatch.chdir(tmp_path)
    told("store show", code=1)
    (tmp_path / ".penstock" / "redis").mkdir(parents=True)
    assert json.loads(told("store reset --yes --json").out)["keys"] == 0


LOADING = {"PENSTOCK_SIM_LOAD_MS": "600000"}


def probe(*words: str) -> int:
    return main(["probe", *words])


def test_a_worker_is_ready_when_its_engine_is(asked: House) -> None:
    """While it loads it lives and is not ready; of another name there is none. One that hangs is gone: stopped in its
    tracks it says nothing more, and what it said is kept for ten seconds; here for less."""
    asked.start("workers", "--id", "slow", **LOADING)
    quick = asked.start("workers", "--id", "quick")
    eventually(lambda: probe("worker", "--id", "quick") == 0)
    eventually(lambda: probe("worker", "--id", "slow", "--alive") == 0)
    assert probe("worker", "--id", "slow") == 1
    assert probe("worker", "--id", "other", "--alive") == 1
    assert probe("scheduler", "--id", "quick", "--alive") == 1, "the role counts too"
    os.kill(quick.pid, signal.SIGSTOP)
    try:
        with Redis.from_url(asked.redis_url) as redis:
            for key in redis.keys(fleet_key("proc", "worker:*")):
                assert 0 < redis.pttl(key) <= 1000 * HEARTBEAT_TIMEOUT_S
                redis.pexpire(key, 100)
        eventually(lambda: probe("worker", "--id", "quick", "--alive") == 1)
    finally:
        os.kill(quick.pid, signal.SIGCONT)


def test_other_roles_are_asked_for_like_a_worker(asked: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready once it takes work, and no more when it has ended. Without a name it is this machine's, as the images name
    their processes."""
    offline = asked.start("offline", "--id", "o")
    asked.start("scheduler", "--id", "pod-7")
    eventually(lambda: probe("offline", "--id", "o") == 0)
    assert probe("worker", "--id", "o") == 1
    monkeypatch.setattr("socket.gethostname", lambda: "pod-7")
    eventually(lambda: probe("scheduler") == 0)
    offline.terminate()
    assert offline.wait(30) == 0 and probe("offline", "--id", "o", "--alive") == 1


def test_a_silent_redis_kills_nobody(asked: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say whether the worker lives, so it is left alone; ready it is not."""
    monkeypatch.setenv("PENSTOCK_REDIS_URL", f"redis://127.0.0.1:{free_port()}/0")
    assert probe("worker", "--id", "w", "--alive") == 0
    assert probe("worker", "--id", "w") == 3


def test_a_role_is_asked_for_with_its_own_settings(asked: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its login at Redis may stand in its own file alone, as in containers."""
    asked.start("scheduler", "--id", "s")
    eventually(lambda: probe("scheduler", "--id", "s") == 0)
    monkeypatch.delenv("PENSTOCK_REDIS_URL")
    (asked.folder / "penstock.scheduler.toml").write_text(f'[redis]\nurl = "{asked.redis_url}"\n')
    assert probe("scheduler", "--id", "s") == 0
    assert probe("worker", "--id", "s") == 3


def test_an_api_process_is_asked_at_its_door(asked: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alive as soon as it answers, ready with the first worker; 0.0.0.0 is called at home."""
    assert probe("api", "--alive") == 3
    asked.start_api()
    monkeypatch.setenv("PENSTOCK_API_HOST", "0.0.0.0")  # noqa: S104
    assert probe("api", "--alive") == 0
    assert probe("api") == 1
    asked.start("workers", "--id", "w")
    eventually(lambda: probe("api") == 0)
    a_running_instance_says_where_its_processes_are(asked, tmp_path / "data", monkeypatch)


def a_running_instance_says_where_its_processes_are(
    asked: House, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port and its Redis are of its own choice; the settings name others. In another folder nothing runs."""
    monkeypatch.setenv("PENSTOCK_API_PORT", str(free_port()))
    monkeypatch.setenv("PENSTOCK_REDIS_URL", f"redis://127.0.0.1:{free_port()}/0")
    with running_at(f"http://127.0.0.1:{asked.port}", folder, redis_url=asked.redis_url):
        eventually(lambda: probe("api", "--data-dir", str(folder)) == 0)
        eventually(lambda: probe("worker", "--id", "w", "--data-dir", str(folder)) == 0)
        assert probe("api", "--data-dir", str(folder.parent / "other")) == 3
