"""Two shapes of one model, with real processes: new jobs go where the load belongs, and nothing waits for a shape that
nobody is left of."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from elastic import Crowd, ElasticTestbed
from house import House, eventually
from openapi_document import SCHEMAS, conforms

from bench.chaos.processes import until
from streaming.fleet.plans import Plans
from streaming.fleet.process import Process
from streaming.fleet.processes import Fleet
from streaming.keys import channel
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

pytestmark = pytest.mark.slow

JOB_WAIT_S = 60.0
SHAPE_WAIT_S = 200.0
"""A pool shrinks after the time that its workers took to start, which is long beside all other tests."""
LONG = 500
"""Tokens of a job that runs for eight seconds, in few steps."""
NOTHING_LOST = {"not accepted": 0, "failed": 0, "cut": 0, "broken promises": 0}
TWO = {
    "min_workers": 0,
    "max_workers": 2,
    "shapes.wide.upto": 6,
    "shapes.wide.max_workers": 1,
    "shapes.wide.options.slots": 16,
    "shapes.narrow.options.slots": 8,
}
QUICK = {
    "offline.processes": 0,
    "sim.step_ms": 60,
    "sim.prefill_ms": 20,
    "scheduler.tick_s": 0.2,
    "scheduler.idle_s": 1,
    "scheduler.cold_start_s": 2,
    "scheduler.cover": 0,
}


def jobs_of(workers: list[Process]) -> dict[str, int]:
    """Ended so far, by the shape of those that are there."""
    ended = {worker.shape: 0 for worker in workers}
    for worker in workers:
        ended[worker.shape] += sum(served.jobs for served in worker.served.values())
    return ended


async def test_new_jobs_go_where_the_load_belongs(tmp_path: Path) -> None:
    """From nothing to the wide shape; over the threshold to the narrow one, and the wide worker goes. One switch, and
    every answer is whole. Each of the workers begins as a process, beside all other tests."""
    async with ElasticTestbed(tmp_path / "testbed", TWO, QUICK) as testbed:
        crowd = Crowd(tmp_path, testbed.port, tokens=40)

        async def all_with(shape: str) -> bool:
            plan, workers = await testbed.plan(), await testbed.fleet.processes("worker")
            there = {worker.shape for worker in workers}
            return plan is not None and plan.takes == (shape,) and there == {shape}

        for clients, shape in ((2, "wide"), (14, "narrow")):
            crowd.size(clients)
            await until(lambda shape=shape: all_with(shape), SHAPE_WAIT_S)  # type: ignore[misc]

            async def busy() -> bool:
                return any(worker.running for worker in await testbed.fleet.processes("worker"))

            await until(busy, JOB_WAIT_S)
        await crowd.go()
        judged = await crowd.judged()
        assert judged.pop("requests") > 16 and judged == NOTHING_LOST
        switches = [noted.action.shape for noted in await testbed.actions(0, "switch")]
        assert [shape for shape in switches if "," not in shape] == ["wide", "narrow"]


class Site:
    """A scheduler, an API process, and workers of both shapes that nobody restarts."""

    def __init__(self, cluster: House) -> None:
        self.cluster, self.wire = cluster, RedisClient.open(RedisSettings(url=cluster.redis_url, lease_ms=1000))
        self.fleet, self.plans = Fleet(self.wire), Plans(self.wire)
        one_each = TWO | {"shapes.narrow.max_workers": 1}
        rows = ["[models.m]", 'engine = "sim"', *(f"{key} = {value}" for key, value in one_each.items())]
        (cluster.folder / "penstock.toml").write_text("\n".join([*rows, ""]))
        cluster.environ |= {"PENSTOCK_SCHEDULER_TICK_S": "0.1", "PENSTOCK_SIM_STEP_MS": "16"}
        cluster.start_api()
        self.workers = {name: cluster.start("workers", "--shape", name, "--id", name) for name in ("wide", "narrow")}
        self.scheduler = cluster.start("scheduler")

    def put(self, jobs: int, tokens: int) -> list[str]:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens}
        return [str(json.loads(self.cluster.post("/v1/jobs", body)[2])["id"]) for _ in range(jobs)]

    def jobs(self, jobs: list[str]) -> list[dict[str, Any]]:
        return [json.loads(self.cluster.get(f"/v1/jobs/{job}")[1]) for job in jobs]

    def shown(self) -> dict[str, Any]:
        """What everybody can see of the pools."""
        return json.loads(self.cluster.get("/admin/pools/m")[1])

    def all_are(self, jobs: list[str], status: str) -> bool:
        return all(job["status"] == status for job in self.jobs(jobs))

    async def takes(self, shape: str) -> None:
        """Until new jobs go there alone."""

        async def so() -> bool:
            return (plan := (await self.plans.read()).get("m")) is not None and plan.takes == (shape,)

        await until(so, JOB_WAIT_S)

    async def told(self) -> None:
        """Until both workers listen, and three more plans were made and said."""
        channels = [channel("worker", each.lease) for each in await self.fleet.processes("worker")]

        async def listening() -> bool:
            return all(count for _, count in await self.wire.redis.pubsub_numsub(*channels))

        await until(listening, JOB_WAIT_S)
        for _ in range(3):
            at_ms = (await self.plans.read())["m"].at_ms

            async def another(at_ms: int = at_ms) -> bool:
                return (await self.plans.read())["m"].at_ms > at_ms

            await until(another, JOB_WAIT_S)

    async def served(self, jobs: int) -> dict[str, int]:
        """By shape, once so many have ended."""
        found: dict[str, int] = {}

        async def so() -> bool:
            found.update(jobs_of(await self.fleet.processes("worker")))
            return sum(found.values()) >= jobs

        await until(so, JOB_WAIT_S)
        return found


@pytest.fixture
async def site(empty_house: House) -> AsyncIterator[Site]:
    site = Site(empty_house)
    async with asyncio.timeout(JOB_WAIT_S):
        while len([each for each in await site.fleet.processes("worker") if each.state == "ready"]) < 2:
            await asyncio.sleep(0.02)
    yield site
    await site.wire.close()


async def test_the_shape_that_rests_takes_nothing(site: Site) -> None:
    """Twenty jobs one after the other go to the wide worker, though the narrow one is idle all the time; and everybody
    can see which is which."""
    await site.takes("wide")
    await site.told()
    for _ in range(20):
        (job,) = site.put(1, 3)
        await asyncio.to_thread(eventually, lambda job=job: site.all_are([job], "completed"))
    assert await site.served(20) == {"wide": 20, "narrow": 0}

    site.put(1, LONG)  # the others may have been too short for the scheduler to see
    await asyncio.to_thread(eventually, lambda: site.shown()["shapes"]["wide"]["want"] == 1)
    shown = site.shown()
    assert conforms(shown, SCHEMAS["Pool"])
    bounds = {"ready": 1, "starting": 0, "draining": 0, "min": 0, "max": 1}
    first = shown["shapes"]["narrow"]["want"]  # 1 for a while if its worker was there before the other
    assert shown["shapes"] == {
        "wide": {"want": 1, "takes": True, **bounds},
        "narrow": {"want": first, "takes": False, **bounds},
    }
    assert {worker["id"]: worker["shape"] for worker in shown["workers"]} == {"wide": "wide", "narrow": "narrow"}


async def test_jobs_finish_when_the_scheduler_and_all_workers_of_their_shape_are_killed(site: Site) -> None:
    """What they ran goes on with the wide worker, and what waits is taken by it: nobody tells it to leave them any
    more."""
    await site.takes("wide")
    await site.told()
    others = site.put(14, LONG)  # as many as the wide worker takes at once, and more than it is for
    await site.takes("narrow")
    await site.told()
    jobs = site.put(4, LONG)
    await asyncio.to_thread(eventually, lambda: not any(job["status"] == "queued" for job in site.jobs(jobs)))
    site.scheduler.send_signal(signal.SIGKILL)
    site.workers["narrow"].send_signal(signal.SIGKILL)
    more = site.put(3, 3)
    everything = others + jobs + more
    await asyncio.to_thread(eventually, lambda: site.all_are(everything, "completed"), seconds=JOB_WAIT_S)
    assert [job["attempts"] for job in site.jobs(jobs)] == [2] * 4, "begun by the narrow worker, ended by the wide one"
