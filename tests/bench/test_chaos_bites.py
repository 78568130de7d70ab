"""A trial counts only where its fault bit: what met no work, no reader or no message is repeated."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fault_testbed import stage

from bench.chaos.asks import Ask, ClientView
from bench.chaos.cluster import PenstockCluster
from bench.chaos.history import ClientHistory
from bench.chaos.rows.failover import judge_loss
from bench.chaos.rows.operations import is_at_work, readers_of
from bench.chaos.rows.partition import judge_cut, judge_jump
from bench.chaos.soak import judge_kills
from bench.chaos.stage import FaultTestbed

__all__ = ["stage"]


def play(stage: FaultTestbed, *, before: int = 1, after: int = 1, attempts: int = 1) -> None:
    """A reader who was shown so many tokens before the fault and after it, and how often its job was begun."""
    history = stage.history
    history.add("ask", req=1, prompt="p", tokens=9, may=["completed"], key="", reads=True, tenant="first")
    history.add("accepted", req=1, job="job_1", status=200, ms=1)
    for _ in range(before):
        history.add("token", req=1, text="a", id="")
    stage.fault("something")
    history.add("rollback", since=0.0)
    for _ in range(after):
        history.add("token", req=1, text="a", id="")
    history.add("final", job="job_1", attempts=attempts)
    for second, event in enumerate(history.events, 1):
        event["t"] = float(second)


@pytest.mark.parametrize(
    ("swallowed", "before", "missed"), [(1, 1, 0), (0, 1, 1), (1, 0, 1)], ids=["bit", "nothing swallowed", "no reader"]
)
def test_a_role_that_was_cut_off_beside_no_reader_is_no_trial(
    stage: FaultTestbed, swallowed: int, before: int, missed: int
) -> None:
    """F07, also where the role is the scheduler."""
    play(stage, before=before)
    judge_cut(stage, [1], swallowed)
    assert stage.missed == missed


@pytest.mark.parametrize(
    ("worker_died", "attempts", "before", "missed"),
    [(False, 1, 1, 0), (True, 2, 1, 0), (True, 1, 1, 1), (False, 1, 0, 1)],
)
def test_a_loss_that_no_reader_was_shown_is_no_trial(
    stage: FaultTestbed, worker_died: bool, attempts: int, before: int, missed: int
) -> None:
    """F05 and F05b: nor is one whose worker held nothing."""
    play(stage, before=before, attempts=attempts)
    judge_loss(stage, [1], 0.0, worker_died=worker_died)
    assert stage.missed == missed


async def test_readers_are_those_of_the_process_that_is_stopped(tmp_path: Path) -> None:
    """F18 and the soak: a reader at the other API process proves nothing, nor does one who has ended."""
    history = ClientHistory(tmp_path / "history.jsonl")
    cluster = PenstockCluster(tmp_path, history, "redis://127.0.0.1:1", apis=2, workers=2)
    first, second = cluster.ports

    async def endless() -> ClientView:
        await asyncio.sleep(60)
        raise AssertionError

    def reader(req: int, port: int, **how: Any) -> ClientView:
        view = ClientView(req, Ask("p"), job=f"job_{req}", port=port, **how)
        cluster._begun.append((view, asyncio.create_task(endless())))
        return view

    for req, how in enumerate(({"shown": 1}, {"shown": 3, "state": "completed"}, {}), 1):
        reader(req, first, **how)
    api, other = cluster.apis
    assert (cluster.readers_at(first), cluster.readers_at(second)) == ([1], [])
    assert (readers_of(cluster, api), readers_of(cluster, other), readers_of(cluster, cluster.scheduler)) == (
        [1],
        [],
        [1],
    )

    async def holders() -> list[Any]:
        return [cluster.workers[1]]

    at_work = SimpleNamespace(
        apis=cluster.apis,
        ports=cluster.ports,
        workers=cluster.workers,
        readers_at=cluster.readers_at,
        holders=holders,
    )
    found = [await is_at_work(cast(PenstockCluster, at_work), child) for child in cluster.children]
    assert found == [True, False, True, True, False]
    await cluster.close()
    history.close()


@pytest.mark.parametrize(
    ("worker_died", "attempts", "missed"), [(False, 1, 0), (True, 2, 0), (True, 1, 1)], ids=["jump", "both", "idle"]
)
def test_a_worker_that_died_without_a_job_is_no_trial(
    stage: FaultTestbed, worker_died: bool, attempts: int, missed: int
) -> None:
    """F12 and F05: it was read across all the same."""
    play(stage, attempts=attempts)
    judge_jump(stage, [1], worker_died=worker_died)
    assert stage.missed == missed


def test_a_kill_that_met_nothing_fails_the_soak(stage: FaultTestbed) -> None:
    judge_kills(stage, [True, True])
    assert stage.wrong == [] and stage.figures["kills"] == 2
    judge_kills(stage, [True, False])
    assert len(stage.wrong) == 1
