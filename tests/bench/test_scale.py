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
from bench.scale.simulator import EngineModel, PoolSimulator
from planner.simulator.trace import TraceRow
from scheduler.policy.limits import ScalingLimits
from scheduler.policy.snapshot import LaneLoad, Snapshot

pytestmark = pytest.mark.slow

ENGINE = EngineModel(slots=2, step_s=1.0, each_s=0.0, prompt_s=0.0, start_s=10.0)
"""A token a second, whatever else runs."""


def test_jobs_take_their_tokens_and_the_highest_lane_goes_first() -> None:
    ended: list[tuple[float, str]] = []
    simulator = PoolSimulator(ENGINE, on_ended=lambda request, _: ended.append((simulator.now, request.lane)))
    simulator.order(at_once=True)
    simulator.feed([TraceRow(1.0, 1, 5), TraceRow(1.0, 1, 8), TraceRow(2.0, 1, 3, "standard"), TraceRow(3.0, 1, 3)])
    simulator.run(100.0)
    assert ended == [(6.0, "interactive"), (9.0, "interactive"), (9.0, "interactive"), (12.0, "standard")]


def test_a_fuller_batch_and_a_slow_worker_take_longer() -> None:
    ended: list[float] = []
    simulator = PoolSimulator(
        EngineModel(slots=4, step_s=1.0, each_s=1.0, prompt_s=0.0), on_ended=lambda *_: ended.append(simulator.now)
    )
    simulator.order(at_once=True)
    simulator.feed([TraceRow(0.0, 1, 6), TraceRow(6.0, 1, 6)])
    # Alone two seconds a token: three by 6. Together three seconds a token: the first ends at 15, the other has three.
    simulator.at(15.0, lambda _: simulator.slow_down(next(iter(simulator.workers.values())), 5.0))
    simulator.run(100.0)
    assert ended == pytest.approx([15.0, 45.0])


def test_workers_start_drain_and_are_paid_for_from_order_to_end() -> None:
    """What runs is never cut; a worker that goes is paid until its last job."""
    simulator = PoolSimulator(ENGINE)
    simulator.order(at_once=True)
    simulator.feed([TraceRow(0.0, 1, 50), TraceRow(0.0, 1, 20)])
    simulator.run(10.0)
    simulator.resize(2)
    simulator.run(25.0)
    assert [worker.state for worker in simulator.workers.values()] == ["ready", "ready"]
    simulator.resize(0)
    simulator.run(100.0)
    assert not simulator.workers
    assert simulator.total_worker_s() == pytest.approx(50.0 + 15.0)


def test_the_snapshot_is_what_the_scheduler_would_see() -> None:
    simulator = PoolSimulator(ENGINE)
    simulator.order(at_once=True)
    simulator.feed(TraceRow(0.0, 7, 10) for _ in range(3))
    simulator.run(12.0)
    found = simulator.snapshot()
    assert found.lanes[0] == LaneLoad("interactive", 0, 1, 0.0, 3)
    (worker,) = found.workers
    assert (worker.state, worker.slots, worker.running) == ("ready", 2, 1)
    assert (worker.served["interactive"].jobs, worker.served["interactive"].tokens) == (2, 34)
    assert worker.steps == 12 and worker.step_tokens == 22 and worker.kv_used == 7 + 2


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
