"""What a cluster says it still holds: leaks of every kind are found, and where nobody can tell, that is found too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from redis.exceptions import ConnectionError as StoreAway

from bench.chaos import cluster as chaos_cluster
from bench.chaos.checker import check
from bench.chaos.cluster import GAUGES, HELD, PenstockCluster, gauges
from bench.chaos.history import ClientHistory, of_kind
from bench.chaos.http import Cut
from bench.chaos.rows.strange import forget_runs, spoil_running
from bench.chaos.stage import FaultRow, FaultTestbed
from streaming.keys import partition_key, prefix

PAGE = b'# HELP penstock_open_streams x\npenstock_open_streams 0.0\npenstock_lane_waiting{lane="a"} 0.0\n'


@pytest.fixture
async def cluster(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PenstockCluster]:
    """Of no processes, on a server that is empty; `/metrics` is told by `pages`."""
    history = ClientHistory(tmp_path / "history.jsonl")
    cluster = PenstockCluster(tmp_path, history, redis_url, apis=1, workers=0)
    monkeypatch.setattr(chaos_cluster, "fetch", AsyncMock(return_value=(200, {}, PAGE)))
    monkeypatch.setattr(chaos_cluster, "QUIET_TIMEOUT_S", 0.6)
    yield cluster
    await cluster.wire.close()
    history.close()


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("owed", ("HSET", "owed", "sim:batch", "1000")),
        ("owed", ("HSET", "owed", "sim:batch", "-1000")),
        ("owed", ("HSET", "owed", "sim:batch", "-8", "sim:standard", "8")),
        ("heirs", ("SADD", "heirs:worker-1", "job_1")),
        ("claims", ("SADD", "claims:worker-1", "job_1")),
        ("timers", ("ZADD", "timers", "1", "job_1")),
        ("lane", ("XADD", "lane:sim:batch", "*", "job", "job_1")),
        ("alone", ("SET", "alone:sim", "worker-1")),
        ("open", ("ZADD", "open:key:second", "1", "job_1")),
        ("limits", ("SET", "account:key:second", msgspec.msgpack.encode({"tokens_per_month": -5}))),
        ("", ("HSET", "owed", "sim:batch", "0")),
        ("", ("DEL", "nothing")),
    ],
)
async def test_what_is_left_in_the_store_is_found(
    cluster: PenstockCluster, kind: str, command: tuple[Any, ...]
) -> None:
    """Bytes reserved for ever would end admission in time. Nothing is left in an empty store, nor in a lane whose
    reservations were all given back, which is still named until the next sweep."""
    word, key, *more = command
    redis: Any = cluster.wire.redis
    await redis.execute_command(word, f"{prefix(0)}{key}", *more)
    await cluster.quiet()
    assert {event["what"] for event in of_kind(cluster.history.events, "quiet")} == {*GAUGES, *HELD, "limits"}
    found = check(cluster.history.events, clusters=1)
    assert [(violation.kind, violation.who) for violation in found] == [("leak", kind)] * bool(kind)


async def test_a_task_of_a_worker_that_lives_is_no_leak(
    cluster: PenstockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that ran suspects runs the next ones too, until it ends."""

    class LiveWorker:
        alive, lease = True, staticmethod(lambda: "worker-1")

    monkeypatch.setattr(cluster, "workers", [LiveWorker()])
    redis: Any = cluster.wire.redis
    await redis.set(f"{prefix(0)}alone:sim", "worker-1")
    await cluster.quiet()
    assert check(cluster.history.events, clusters=1) == []


@pytest.mark.parametrize(("state", "spoiled"), [("queued", 1), ("in_progress", 1), ("completed", 0), ("", 0)])
async def test_a_record_is_spoiled_only_before_its_job_ends(
    cluster: PenstockCluster, state: str, spoiled: bool
) -> None:
    """F33: an end that was told cannot be read again from a record that was spoiled after it; a job that the store does
    not have comes to nothing."""
    redis: Any = cluster.wire.redis
    key = partition_key(0, "job", "job_1")
    if state:
        await redis.hset(key, "state", state)
    assert await spoil_running(redis, "job_1", "body", b"noise") is bool(spoiled)
    assert await redis.hget(key, "body") == (b"noise" if spoiled else None)


def test_a_gauge_below_nothing_is_not_nothing() -> None:
    """Something was given back twice, also where another process makes up for it."""
    page = 'penstock_open_streams{pid="1"} -1.0\npenstock_open_streams{pid="2"} 1e+00\npenstock_open_streams_total 5.0'
    assert gauges(page)["penstock_open_streams"] == 2
    assert gauges("penstock_open_streams 0.0")["penstock_open_streams"] == 0


async def test_what_cannot_be_known_is_not_nothing(cluster: PenstockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of metrics that is refused, and a store that does not answer."""
    monkeypatch.setattr(chaos_cluster, "fetch", AsyncMock(return_value=(503, {}, b"")))
    with pytest.raises(Cut, match="503"):
        await cluster.quiet()
    monkeypatch.undo()
    monkeypatch.setattr(chaos_cluster, "QUIET_TIMEOUT_S", 0.6)
    away = AsyncMock(side_effect=StoreAway)
    monkeypatch.setattr(cluster, "leftovers", away)
    with pytest.raises(StoreAway):
        await cluster.quiet()
    monkeypatch.setattr(cluster, "held", away)
    assert await cluster.holders() == []
    assert of_kind(cluster.history.events, "quiet") == []


async def test_the_logs_of_a_job_without_readable_runs_are_not_kept_for_ever(
    cluster: PenstockCluster, tmp_path: Path
) -> None:
    """F33 takes out what it spoiled itself, and nothing else."""
    stage = FaultTestbed(FaultRow("F00", "none", "nothing", 2, AsyncMock(), 10), tmp_path / "F00")
    redis: Any = cluster.wire.redis
    for worker, seconds in (("1", 60), ("2", 0)):
        await redis.sadd(f"{prefix(0)}heirs:worker-{worker}", f"job_{worker}", "job_3")
        if seconds:
            await redis.expire(f"{prefix(0)}heirs:worker-{worker}", seconds)
    await forget_runs(stage, redis, "job_1")
    assert stage.wrong == [] and (await cluster.held("heirs"))[f"{prefix(0)}heirs:worker-1"] == 1
    await forget_runs(stage, redis, "job_2")
    assert len(stage.wrong) == 1
    stage.history.close()
