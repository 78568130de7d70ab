"""Pools of real processes under `penstock up`: nothing is lost while they grow, shrink, sleep and wake."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from elastic import MODEL, WAIT_TIMEOUT_S, Crowd, ElasticTestbed

from bench.chaos.http import fetch
from bench.chaos.processes import until
from streaming.fleet.plans import LEADER

pytestmark = pytest.mark.slow

SIM = {"sim.step_ms": 20, "sim.prefill_ms": 20, "sim.slots": 8, "scheduler.tick_s": 0.2}
NOTHING_LOST = {"not accepted": 0, "failed": 0, "cut": 0, "broken promises": 0}


async def test_asleep_and_awake_again_nothing_is_lost(tmp_path: Path) -> None:
    """From zero workers, twice: the model stays listed, five requests are held, and each is answered to the byte."""
    settings = {**SIM, "sim.load_ms": 300, "scheduler.idle_s": 0, "scheduler.sleep_s": 0.5}
    async with ElasticTestbed(tmp_path / "testbed", {"min_workers": 0, "max_workers": 1}, settings) as testbed:
        crowd = Crowd(tmp_path, testbed.port, tokens=20)

        async def none_wanted() -> bool:
            plan = await testbed.plan()
            return plan is not None and plan.want == 0

        for _ in range(2):
            await testbed.settled(0)
            await until(none_wanted, WAIT_TIMEOUT_S)
            assert MODEL.encode() in (await fetch(testbed.port, "GET", "/v1/models"))[2]
            await asyncio.gather(*(crowd.ask(chat=number > 0) for number in range(5)))
        judged = await crowd.judged()
        assert judged.pop("requests") == 10 and judged == NOTHING_LOST


async def test_growing_and_shrinking_under_streams_loses_nothing(tmp_path: Path) -> None:
    """One worker to three and back, while answers run on those that go: none fails, none is cut, none is doubled."""
    async with ElasticTestbed(tmp_path / "testbed", {"min_workers": 1, "max_workers": 3}, SIM) as testbed:
        crowd = Crowd(tmp_path, testbed.port, tokens=60)
        crowd.size(12)
        await testbed.overrides.put(MODEL, 3, "test")
        await testbed.settled(3)

        async def all_busy() -> bool:
            return all(worker.running for worker in await testbed.workers())

        await until(all_busy, 30.0)
        began = await testbed.now_s()
        await testbed.overrides.put(MODEL, 1, "test")
        await testbed.settled(1)
        await crowd.go()
        judged = await crowd.judged()
        assert judged.pop("requests") >= 12 and judged == NOTHING_LOST
        drained = await testbed.actions(began, "drain")
        assert len(drained) == 2 and {each.epoch for each in drained} == {(await testbed.wire.ask(LEADER)).epoch}
