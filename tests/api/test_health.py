"""Live gauges of /metrics: what waits in every lane, and for how long, by class of tenants."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process
from house import ADMIN_TOKEN, eventually, serving
from redis import Redis

from api.health import live_samples
from penstock.engine import ChatTurn
from streaming.fleet.plans import claim_lead
from streaming.fleet.process import HEARTBEAT_TIMEOUT_S
from streaming.fleet.processes import this_process
from streaming.fleet.settings import ModelSettings
from streaming.jobs.job import Chat, Job
from streaming.jobs.queue import Queue
from streaming.keys import fleet_key
from streaming.order import Priority
from streaming.redis.client import RedisClient
from telemetry.catalogue import JobMetrics
from workers.engines.sim.settings import SimSettings, card_of


@pytest.fixture
async def local(wire: RedisClient) -> AsyncIterator[LocalApi]:
    async with api_in_process(wire) as local:
        yield local


async def waits(local: LocalApi) -> dict[tuple[str, str], float]:
    """The longest wait by lane and class."""
    found = [sample for sample in await live_samples(local.services) if sample.gauge is JobMetrics.lane_class_oldest]
    return {(lane, name): sample.value for sample in found for _, lane, name in [sample.labels]}


async def test_each_class_that_is_configured_has_its_longest_wait(local: LocalApi, wire: RedisClient) -> None:
    """A tenant that no row names is normal. Which tenants wait is in no label."""
    assert set(await waits(local)) == {(lane, "normal") for lane in Priority}
    local.services.weights = {"free": 0.5, "gold": 4.0, "silver": 2.0}
    queue = Queue(wire)
    for tenant in ("free", "gold", "silver"):
        job = Job(id=queue.new_id(tenant), model="sim", tenant=tenant, priority=Priority.STANDARD,
                  prompt=Chat((ChatTurn("user", "hello"),)))  # fmt: skip
        await queue.put(job)
        await asyncio.sleep(0.02)
    found = await waits(local)
    assert found["standard", "low"] >= found["standard", "high"] + 0.02 >= 0.06
    assert found["standard", "normal"] == found["batch", "low"] == 0
    assert {name for _, name in found} == {"low", "normal", "high"}


@pytest.mark.parametrize("path", ["/readyz", "/v1/models", "/v1/models/sim"])
async def test_what_a_ready_worker_can_do_is_known(local: LocalApi, path: str) -> None:
    """At once: whoever sees it ready, such as another Penstock in front of this one, asks for its capabilities next."""
    await local.work("ready")
    local.services.cards = {}
    await local.services.fleet.publish_card(card_of("sim", SimSettings()))
    await local.client.get(path)
    assert local.services.cards["sim"].capabilities.repetition_penalty
    assert (await local.client.get("/v1/models/sim")).json()["capabilities"]["tools"]


async def test_a_server_without_workers_is_ready_while_a_scheduler_leads(local: LocalApi) -> None:
    """The same answer as in the console: a scheduler that is there and does not lead starts no worker."""
    store, models = local.services.store_client, local.services.models
    assert isinstance(models, dict)
    models["sim"] = ModelSettings(engine="sim", min_workers=0, max_workers=2)
    await local.services.fleet.report(this_process("scheduler", "s"))
    for keep_ms, status in ((0, 503), (60_000, 200), (0, 503)):
        await store.ask(claim_lead("s", keep_ms))
        assert (await local.client.get("/readyz")).status_code == status


@pytest.mark.slow
def test_a_worker_that_hangs_counts_no_more_once_its_heartbeat_lapses(tmp_path: Path) -> None:
    """Neither at /readyz nor in the console, nor for a job that waits. Going on, it finds its lease taken, and ends."""
    with serving(tmp_path, "workers") as house, Redis.from_url(house.redis_url) as store:

        def overview() -> Any:
            return json.loads(house.request("GET", "/admin/overview", headers=admin)[2])

        admin = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        eventually(lambda: len(overview()["pools"][0]["workers"]) == overview()["pools"][0]["ready"] == 1)
        worker = house._processes[0]
        worker.send_signal(signal.SIGSTOP)
        try:
            (key,) = store.keys(fleet_key("proc", "worker:*"))
            assert 0 < store.pttl(key) <= 1000 * HEARTBEAT_TIMEOUT_S
            store.pexpire(key, 100)  # instead of ten seconds
            eventually(lambda: house.get("/readyz")[0] == 503)
            body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            job = f"/v1/jobs/{json.loads(house.post('/v1/jobs', body)[2])['id']}"
            eventually(lambda: "no worker may run it" in json.loads(house.get(job)[1])["queue_reason"])
            pool = eventually(lambda: (pool := overview()["pools"][0])["workers"] == [] and pool)
            assert pool["ready"] == 0 and "worker" not in {process["role"] for process in overview()["processes"]}
            assert "sim" in json.loads(house.get("/readyz")[1])["stalled"]
            eventually(lambda: b"dead" in [store.hget(key, "state") for key in store.scan_iter("*:worker:*")])
        finally:
            worker.send_signal(signal.SIGCONT)
        worker.wait(30)
        eventually(lambda: house.get("/readyz")[0] == 503)
        house.start("workers")
        assert json.loads(house.get(f"{job}?wait=30")[1])["status"] == "completed"
