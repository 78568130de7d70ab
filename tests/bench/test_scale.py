"""The simulated control loop: lanes and workers keep their books, and the shows run in short form."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worker_report import a_worker

from bench.scale.__main__ import QUICK, main, reported
from bench.scale.contenders import Freeness, KedaRule, Static, Utilisation
from bench.scale.day import (
    Day,
    SimulationOutcome,
    Ward,
    most_reversals_in_an_hour,
    peak_workers,
    play,
    simulate,
    watched,
)
from bench.scale.shapes import Site
from planner.simulator.engine import EngineShape, StepCosts
from planner.simulator.pool import PoolEngine
from planner.simulator.trace import TraceRow
from scheduler.policy.limits import ScalingLimits
from scheduler.policy.snapshot import LaneLoad, Snapshot

pytestmark = pytest.mark.slow

ENGINE = PoolEngine(EngineShape(1000, 2, costs=StepCosts(1.0, 0.0, 0.0, 0.0)), start_s=10.0)
"""A token a second, whatever else runs."""


def busy(ready: int, running: int, waiting: int = 0, kv_used: int = 0) -> Snapshot:
    """Workers of eight slots that share the running jobs."""
    workers = tuple(
        a_worker(f"w{n}", slots=8, running=running // ready, kv_tokens=1000, kv_used=kv_used) for n in range(ready)
    )
    return Snapshot("m", (LaneLoad("interactive", waiting, running),), workers)


def test_hpa_scales_in_proportion_and_comes_down_late() -> None:
    """All slots in use over 0.7 of them; a tenth more or less changes nothing; down after five minutes."""
    hpa = Utilisation(ScalingLimits(1, 99))
    assert hpa.want(busy(10, 80), 0.0) == 15
    assert hpa.want(busy(15, 90), 15.0) == 15, "0.75 is near enough"
    assert hpa.want(busy(15, 15), 30.0) == 15 and hpa.want(busy(15, 15), 400.0) == 3


def test_keda_goes_by_work_at_hand_and_at_most_doubles() -> None:
    keda = KedaRule(ScalingLimits(1, 99))
    assert keda.want(busy(10, 56), 0.0) == 10
    assert keda.want(busy(10, 80, 480), 15.0) == 20 and keda.want(busy(10, 80, 480), 30.0) == 40


def test_llumnix_adds_and_takes_one_at_a_time() -> None:
    """Blocks of 32 tokens a job may still grow by: under ten one more, over sixty without the last one fewer."""
    limits = ScalingLimits(1, 99)
    assert Freeness(limits).want(busy(2, 8, kv_used=500), 0.0) == 3
    assert Freeness(limits).want(busy(2, 2, kv_used=100), 0.0) == 2
    assert Freeness(limits).want(busy(2, 0), 0.0) == 1


def test_a_pool_for_the_peak_begins_everything_in_time() -> None:
    """Its size is the work of the heaviest minute; the same day gives the same figures."""
    day = Day(seed=4, hours=0.5, rate=2.0)
    outcome = play(day, Static(peak_workers(day)))
    assert outcome.within("interactive", 2.0) > 0.99
    assert outcome.worker_s == pytest.approx(peak_workers(day) * day.seconds)
    assert play(day, Static(peak_workers(day))).waits == outcome.waits


def test_requests_that_were_never_begun_are_not_in_time() -> None:
    outcome = simulate(Static(1), [TraceRow(0.0, 1, 30) for _ in range(8)], 20.0, ENGINE, begin=1)
    assert outcome.within("interactive", 2.0) == 2 / 8


def test_reversals_are_counted_in_the_worst_hour() -> None:
    """Up at 1000, down at 2000, up at 4000, up again, down at 9000: two turns within an hour, then one."""
    wants = [(0.0, 1), (1000.0, 2), (2000.0, 1), (4000.0, 2), (5000.0, 3), (9000.0, 1)]
    outcome = SimulationOutcome(wants=wants)
    assert outcome.reversals == 3 and most_reversals_in_an_hour(outcome) == 2


def test_a_straggler_is_cordoned_and_only_it() -> None:
    """Six busy workers; one becomes five times slower."""
    found = watched(Ward(seed=31, slow=5.0))
    assert found["cordoned_after_s"] < 60 and found["healthy_cordoned"] == 0


def test_shapes_share_the_gpus_while_both_have_jobs() -> None:
    site = Site(["big", "small"], seed=1)
    site.simulator.send_to("big")
    site.clients.want(4)
    site.simulator.send_to("small")
    site.clients.want(8)
    site.share_the_gpus()
    assert {worker.slow for worker in site.simulator.workers.values()} == {2.0}
    site.simulator.run(60.0)
    site.share_the_gpus()
    assert {worker.slow for worker in site.simulator.workers.values()} == {1.0}, "those of the big one have ended"


def test_a_goal_that_is_missed_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1, and the table says which."""
    from bench.scale import __main__ as program  # noqa: PLC0415

    rows = {
        "day": [
            {"seed": 1, "name": "penstock", "interactive": 98.9, "share_of_peak": 60.1, "workers": [], "jobs": []},
        ],
        "steady": [{"seed": 1, "name": "penstock", "most_in_an_hour": 3}],
        "health": [{"seed": 1, "slow": 5.0, "cordoned_after_s": None, "healthy_cordoned": 1}],
        "shapes": [{"seed": 1, "least_share": 0.94, "most_switches": 3}],
    }
    goals = [goal for each in reported(rows, QUICK) for goal in each.ratios]
    assert len(goals) == 7 and {goal.verdict for goal in goals} == {"missed"}
    monkeypatch.setattr(program, "simulated", lambda *_: rows)
    monkeypatch.setattr(program, "draw", lambda *_: [])
    monkeypatch.setattr(program.report.Report, "save", lambda self, path: path)
    assert main([]) == 1
    assert "MISSED" in capsys.readouterr().out


def test_the_short_form_plays_everything(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every contender and every show, shorter still, without judging what is too short to be judged."""
    monkeypatch.setattr("bench.scale.__main__.QUICK", replace(QUICK, hours=0.2, steady_hours=0.1, hold_s=5.0))
    monkeypatch.setattr("bench.scale.day.WARM_S", 1200.0)
    monkeypatch.setattr("bench.scale.day.SLOW_AT_S", 600.0)
    assert main(["--quick", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("penstock", "static", "keda", "hpa", "llumnix", "cordoned", "threshold"))
