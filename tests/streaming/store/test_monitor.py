"""A store that becomes another one while a process runs: seen, said, and forgotten when it is a fit one again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from flow import until
from house import House, eventually, free_port, redis_process
from redis import Redis

from penstock.config import ConfigError
from streaming.errors import Unavailable
from streaming.keys import fleet_key
from streaming.redis.client import RedisClient
from streaming.store import monitor as monitors
from streaming.store.identity import enter_store
from streaming.store.monitor import WRONG_STORE, StoreMonitor

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
