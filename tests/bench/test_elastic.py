"""The live shows in short form: nothing is lost while pools grow, shrink, sleep and wake. Times are the full form's."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chaos.processes import until
from bench.elastic.shows import SHORT, SIM, Shown, wake
from bench.elastic.testbed import MODEL, Crowd, ElasticTestbed, stale
from streaming.fleet.plans import Action, Noted

pytestmark = pytest.mark.slow

NOTHING_LOST = {"not accepted": 0, "failed": 0, "cut": 0, "broken promises": 0}


def noted(epoch: int, kind: str = "up") -> Noted:
    return Noted(Action(model="m", kind=kind, reason="r", by="s"), 0, epoch)  # type: ignore[arg-type]


def test_an_action_under_an_older_epoch_than_one_before_it_is_stale() -> None:
    assert stale([noted(1), noted(1), noted(2), noted(3)]) == []
    assert len(stale([noted(1), noted(3), noted(2), noted(3), noted(1)])) == 2


def test_what_is_judged_is_held_against_its_goal() -> None:
    """A figure beyond its limit, or none at all, is a goal that was missed."""
    shown = Shown()
    shown.judge("good", 0.5, 1.0)
    shown.judge("bad", 1.5, 1.0)
    shown.judge("missing", None, 1.0)
    shown.judge_clients({"requests": 3, "failed": 1, "broken promises": 0})
    assert [goal.verdict for goal in shown.goals] == ["reached", *["missed"] * 3, "reached"]
    assert [row["what"] for row in shown.rows] == ["requests"]
    assert [goal.what for goal in shown.goals][-2:] == ["requests failed", "broken promises"]


async def test_asleep_and_awake_again_nothing_is_lost(tmp_path: Path) -> None:
    """From zero workers, twice: the model stays listed, five requests are held, and each is answered to the byte."""
    shown = await wake(tmp_path, SHORT)
    missed = [goal.what for goal in shown.goals if goal.at_most == 0 and goal.verdict != "reached"]
    assert missed == [] and sum(goal.at_most == 0 for goal in shown.goals) >= 5
    assert all(row["value"] is not None for row in shown.rows if "first token" in row["what"])


async def test_growing_and_shrinking_under_streams_loses_nothing(tmp_path: Path) -> None:
    """One worker to three and back, while answers run on those that go: none fails, none is cut, none is doubled."""
    settings = {**SIM, "scheduler.tick_s": 0.2}
    async with ElasticTestbed(tmp_path / "testbed", {"min_workers": 1, "max_workers": 3}, settings) as testbed:
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
        assert len(drained) == 2 and {each.epoch for each in drained} == {(await testbed.leadership.current()).epoch}
