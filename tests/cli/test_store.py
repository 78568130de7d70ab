"""`penstock store`: what it shows, what it refuses, what it deletes and what it leaves; and `penstock ps` of machines
whose processes have the same names."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from house import House, eventually
from redis import Redis

from cli.__main__ import main
from penstock.config import ConfigError
from streaming.batches.file_store import FileStore
from streaming.errors import Unavailable
from streaming.keys import fleet_key, partition_key
from streaming.redis.client import RedisClient
from streaming.store.identity import FORMAT, count_contents, enter_store, reset_store

pytestmark = pytest.mark.slow

BODY = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.fixture
def asked(empty_house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """Commands given where this house's settings hold."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", empty_house.redis_url)
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


def test_a_store_of_an_earlier_version_is_reset(asked: House, redis: Redis, capsys: pytest.CaptureFixture[str]) -> None:
    """A role refuses it and names the command. That counts, with --yes deletes Penstock's keys, and the role runs."""
    earlier_version(redis)
    scheduler = asked.start("scheduler")
    assert scheduler.wait(60) == 2 and "penstock store reset --yes" in asked.log("scheduler")
    assert main(["store", "reset", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.err)["error"]["next"] == "penstock store reset --yes"
    counts = json.loads(captured.out)
    expected = {"keys": 9, "jobs": 2, "unfinished": 2, "running": 1, "batches": 1, "batches_unfinished": 1, "files": 1}
    assert {name: counts[name] for name in expected} == expected
    assert redis.dbsize() == 10
    assert main(["store", "reset", "--yes"]) == 0
    assert "jobs that wait or run" in capsys.readouterr().out
    assert redis.keys("*") == ["user:1"]
    asked.start("scheduler", "--id", "fresh")
    eventually(lambda: redis.hget(fleet_key("store"), "format") == str(FORMAT))


def test_a_reset_that_was_interrupted_leaves_no_store_to_start_on(asked: House, redis: Redis) -> None:
    """Its identity names no format until all the rest is gone."""
    earlier_version(redis)
    redis.hset(fleet_key("store"), mapping={"format": 0, "partitions": 0, "deployment": ""})
    redis.delete(partition_key(0, "tick"))
    scheduler = asked.start("scheduler")
    assert scheduler.wait(60) == 2 and "penstock store reset --yes" in asked.log("scheduler")


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


def test_a_store_in_use_is_not_reset(asked: House, redis: Redis, capsys: pytest.CaptureFixture[str]) -> None:
    asked.start_api()
    eventually(lambda: redis.zcard(fleet_key("procs")))
    before = redis.dbsize()
    assert main(["store", "reset", "--yes"]) == 1
    assert "1 process uses this store" in capsys.readouterr().err and redis.dbsize() >= before


def test_show_and_adopt(asked: House, redis: Redis, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of another deployment is adopted, which a person must confirm; doctor says so before."""
    folder = asked.folder / ".penstock" / "files"
    FileStore(folder).adopt("dep_other")
    redis.hset(fleet_key("store"), mapping={"format": FORMAT, "partitions": 1, "deployment": "dep_ours"})
    main(["doctor"])
    assert "penstock store adopt --yes" in capsys.readouterr().out
    assert main(["store", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["deployment"], shown["files_deployment"], shown["format"]) == ("dep_ours", "dep_other", FORMAT)
    assert main(["store", "adopt"]) == 2 and FileStore(folder).owner == "dep_other"
    assert main(["store", "adopt", "--yes"]) == 0 and FileStore(folder).owner == "dep_ours"
    capsys.readouterr()
    main(["doctor"])
    assert "adopt" not in capsys.readouterr().out


def test_adopt_without_yes_writes_nothing(
    asked: House, redis: Redis, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Neither to the folder nor to a store that has no identity yet, which may be the wrong one."""
    folder = asked.folder / ".penstock" / "files"
    FileStore(folder).adopt("dep_other")
    assert main(["store", "adopt"]) == 2
    assert "nothing was changed" in capsys.readouterr().err
    assert redis.keys("*") == [] and FileStore(folder).owner == "dep_other"


def test_the_embedded_store_is_reset_while_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its server runs for as long as the command does. Without a store there is nothing to do."""
    monkeypatch.chdir(tmp_path)
    assert main(["store", "show"]) == 1
    (tmp_path / ".penstock" / "redis").mkdir(parents=True)
    capsys.readouterr()
    assert main(["store", "reset", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keys"] == 0


def test_two_machines_with_the_documented_commands(
    asked: House, redis: Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m workers`, twice, with the name that both have by default: both are listed, counted and leave alone."""
    asked.start_api()
    first, _ = asked.start("workers"), asked.start("workers")

    def workers() -> list[dict[str, object]]:
        capsys.readouterr()
        assert main(["ps", "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [row for row in rows if (row["role"], row["state"]) == ("worker", "ready")]

    def ready() -> int:
        status, body = asked.get("/admin/pools/sim")
        assert status == 200
        return int(json.loads(body)["ready"])

    eventually(lambda: len(workers()) == 2)
    assert {row["id"] for row in workers()} == {"worker-1"} and len({row["pid"] for row in workers()}) == 2
    assert ready() == 2
    first.terminate()
    assert first.wait(60) == 0
    assert ready() == 1 and len(workers()) == 1
