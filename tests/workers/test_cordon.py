"""A cordoned worker finishes what it has and waits to be taken away; what workers count for whoever judges them."""

from __future__ import annotations

import asyncio
import json
import signal
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from house import House, eventually
from msgspec.structs import replace

from penstock.config import Config
from penstock.engine import Failure
from penstock.process import Launch
from streaming.fleet.plans import Cordoned, Plan, Plans, claim_lead
from streaming.fleet.process import Process, Served
from streaming.fleet.processes import Fleet, this_process
from streaming.jobs.codec import Terminal, Usage
from streaming.jobs.job import JobState
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from telemetry.metrics import Metrics
from telemetry.tracing import Tracing
from workers.__main__ import WorkerProcess, keep_counting
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings
from workers.record import WorkCounters

pytestmark = pytest.mark.slow


class Yard:
    """A house with one worker, and the leader's hand."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.wire = RedisClient.open(RedisSettings(url=house.redis_url))
        self.fleet, self.plans = Fleet(self.wire), Plans(self.wire)

    async def worker(self, **fields: object) -> Process:
        """The worker of which this is true."""
        async with asyncio.timeout(30):
            while True:
                for process in await self.fleet.processes("worker"):
                    if all(getattr(process, name) == value for name, value in fields.items()):
                        return process
                await asyncio.sleep(0.02)

    async def cordon(self, lease: str) -> None:
        lead = await self.wire.ask(claim_lead("test", 60_000))
        cordon = (Cordoned(lease, "its steps take 5.0 times its peers' (10 ms)"),)
        plan = Plan(model="sim", want=1, reason="r", epoch=lead.epoch, cordon=cordon)
        assert await self.plans.publish(lead, [plan])
        assert await self.plans.publish(lead, [plan]), "told again and again"

    def put(self, tokens: int) -> str:
        body = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens}
        return str(json.loads(self.house.post("/v1/jobs", body)[2])["id"])

    def job(self, job_id: str) -> dict[str, object]:
        return dict(json.loads(self.house.get(f"/v1/jobs/{job_id}")[1]))


@pytest.fixture
async def yard(empty_house: House) -> AsyncIterator[Yard]:
    empty_house.start_api()
    yard = Yard(empty_house)
    yield yard
    await yard.wire.close()


async def test_a_cordoned_worker_finishes_and_is_replaced(yard: Yard) -> None:
    """It takes nothing more, its job completes in one attempt; it is seen as drained until SIGTERM ends it."""
    process = yard.house.start("workers", PENSTOCK_SIM_STEP_MS="5")
    worker = await yard.worker(state="ready")
    running = yard.put(200)
    eventually(lambda: yard.job(running)["status"] == "in_progress")
    await yard.cordon(worker.lease)
    await yard.worker(state="draining")
    waiting = yard.put(3)
    drained = await yard.worker(state="drained")
    assert (drained.lease, drained.running) == (worker.lease, 0)
    assert drained.served == {"standard": Served(1, 200 + len("user: hello") // 4, 0)}
    assert drained.steps == drained.step_tokens == 199 and drained.step_s > 0.9, "of all steps but the first"
    assert yard.job(running)["status"] == "completed" and yard.job(running)["attempts"] == 1
    assert yard.job(waiting)["status"] == "queued"
    yard.house.start("workers", "--id", "worker-2")
    eventually(lambda: yard.job(waiting)["status"] == "completed")
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 20) == 0


def test_whoever_started_it_is_told_once_why_it_drains() -> None:
    """The leader's reason reaches the supervisor, and the first one stands, however often it comes."""
    said: list[tuple[str, str]] = []
    lifeline: Any = SimpleNamespace(say=lambda state, detail="": said.append((state, detail)))
    launch = Launch(Namespace(), Config({}), lifeline, ExitStack())
    engine, metrics = SimEngine("sim", SimSettings()), Metrics.start("", "worker")
    process = WorkerProcess(this_process("worker", "worker-1"), launch, engine, metrics, Tracing())
    assert process._describe().state == "starting"
    for reason in ("its steps are slow", "its clock is wrong"):
        process._on_cordon(reason)
    ((state, detail),) = said
    assert state == "draining" and "its steps are slow" in detail
    assert process._describe().state == "draining"


def test_a_tally_counts_steps_not_pauses() -> None:
    """The first step after a pause has no time of its own."""
    tally = WorkCounters()
    for now, more in ((1.0, True), (1.5, True), (2.0, False), (9.0, True), (9.25, False)):
        tally.step(3, now, more=more)
    assert (tally.steps, tally.step_s, tally.step_tokens) == (3, 1.25, 9)


def test_a_tally_counts_jobs_by_lane() -> None:
    """All tokens of a job; as failed, what the engine failed at, and not what was refused to its owner."""
    tally = WorkCounters()
    ok = Terminal("j", JobState.COMPLETED, 1, usage=Usage(5, 7))
    tally.ended("batch", ok)
    for status in (400, 500):
        tally.ended("batch", Terminal("j", JobState.FAILED, 0, failure=Failure("c", "m", status)))
    tally.ended("standard", ok)
    assert tally.served == {"batch": Served(3, 12, 1), "standard": Served(1, 12, 0)}


async def test_the_workers_that_share_servers_are_counted_from_the_store(wire: RedisClient) -> None:
    fleet, counts = Fleet(wire), asyncio.Queue[int]()
    me = replace(this_process("worker", "worker-1"), model="m", state="ready")
    await fleet.report(replace(me, life="another"))
    counting = asyncio.create_task(keep_counting(fleet, me, counts.put_nowait))
    async with asyncio.timeout(10):
        assert await counts.get() == 2
    counting.cancel()
    await asyncio.gather(counting, return_exceptions=True)
