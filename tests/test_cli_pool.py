"""Pools of workers: how many there are, and which ones go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli.child import Program
from cli.pool import Pool, follow
from cli.supervisor import Supervisor
from streaming.fleet import Fleet
from streaming.settings import WireSettings
from streaming.wire import Wire

SLEEPS = "import time; time.sleep(600)"
WAIT_S = 30.0


class Basin:
    """A supervisor with two pools of one to three workers that only sleep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.supervisor = Supervisor(lambda child: None)
        self.a = Pool(self.supervisor, "a", 1, 3, lambda worker_id: self.program(worker_id, "a"))
        self.b = Pool(self.supervisor, "b", 0, 2, lambda worker_id: self.program(worker_id, "b"))

    def program(self, worker_id: str, model: str) -> Program:
        argv = (sys.executable, "-c", SLEEPS)
        log = self.folder / f"{worker_id}.log"
        return Program(role="worker", id=worker_id, argv=argv, log=log, env=dict(os.environ), model=model)

    @property
    def ids(self) -> list[str]:
        return list(self.supervisor.children)

    async def until_ids(self, *ids: str) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.supervisor.until(lambda: sorted(self.ids) == sorted(ids))


@pytest.fixture
async def basin(tmp_path: Path) -> AsyncIterator[Basin]:
    basin = Basin(tmp_path)
    yield basin
    basin.supervisor.kill("worker")
    await basin.supervisor.stop("worker")


async def test_size_stays_between_the_bounds(basin: Basin) -> None:
    """Whatever is wanted, never fewer than the least nor more than the most."""
    basin.a.resize(0, "")
    assert len(basin.a.members) == 1
    basin.a.resize(9, "")
    assert len(basin.a.members) == 3
    basin.b.resize(0, "")
    assert basin.b.members == []


async def test_newest_go_first_and_are_not_replaced(basin: Basin) -> None:
    """Shrinking drains the newest; they count no longer and end for good."""
    basin.a.resize(3, "")
    basin.a.resize(1, "")
    assert [child.program.id for child in basin.a.members] == ["worker-1"]
    await basin.until_ids("worker-1")


async def test_names_are_unique_over_all_pools(basin: Basin) -> None:
    """The lowest free number is taken, whatever the model."""
    basin.a.resize(1, "")
    basin.b.resize(1, "")
    basin.a.resize(2, "")
    assert basin.ids == ["worker-1", "worker-2", "worker-3"]
    basin.b.resize(0, "")
    await basin.until_ids("worker-1", "worker-3")
    basin.b.resize(1, "")
    assert basin.ids[-1] == "worker-2"


async def test_plan_is_followed(basin: Basin, wire: Wire) -> None:
    """What the scheduler writes is what there is soon after; a model without a plan is left alone."""
    fleet = Fleet(wire)
    await fleet.plan("b", 2, "backlog")
    following = asyncio.create_task(follow([basin.a, basin.b], fleet))
    await basin.until_ids("worker-1", "worker-2")
    await fleet.plan("b", 1, "quiet")
    await basin.until_ids("worker-1")
    assert basin.a.members == []
    following.cancel()


async def test_redis_down_changes_nothing(
    basin: Basin, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the plan cannot be read the pools stay, and the log says why."""
    monkeypatch.setattr("cli.pool.POLL_S", 0.0)
    basin.a.resize(2, "")
    wire = Wire.open(WireSettings(url="redis://127.0.0.1:1/0"))
    following = asyncio.create_task(follow([basin.a], Fleet(wire)))
    async with asyncio.timeout(WAIT_S):
        while "cannot be read" not in caplog.text:
            await asyncio.sleep(0.01)
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
    assert len(basin.a.members) == 2
    await wire.close()
