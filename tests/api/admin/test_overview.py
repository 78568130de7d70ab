"""The overview: the verdict, one test for each cause, from the state to the words; and rates out of two readings."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from api.admin.overview import FIRST_TOKEN, Rates, RateWindow, Reading, Situation, assess, read


def pool(**change: Any) -> dict[str, Any]:
    lane = {"waiting": 0, "running": 0, "oldest_s": 0.0, "wait_s": 0.0}
    lanes = {name: dict(lane) for name in ("interactive", "standard", "batch")}
    for name in list(change):
        if name in lanes:
            lanes[name] |= change.pop(name)
    found = {"model": "m", "ready": 1, "starting": 0, "want": 1, "max": 2, "reason": "one is enough", "wake_s": 0.0}
    return {**found, "override": None, "workers": [], "lanes": lanes, **change}


PAUSED = {"paused": True, "by": "x", "want": None}
SET = {"paused": False, "by": "ops", "want": 3}
SLOW = {"id": "worker-2", "state": "ready", "cordon": "slow", "phase": "", "away": [], "away_s": 0.0}
WELL = SLOW | {"id": "worker-1", "cordon": None}
ALONE = WELL | {"away": ["http://gpu-1:8000/v1 (connection refused)"], "away_s": 40.2}
LOADS = WELL | {"state": "starting", "phase": "waiting for http://gpu-1:8000/v1: it loads its model"}
CALM = Situation(pools=[pool()], has_leader=True, store_refusal="")
WAITING = {"waiting": 3, "oldest_s": 90.0}


def test_all_is_well() -> None:
    flow, _, problems = assess(CALM)
    assert flow == "flowing" and not problems


@pytest.mark.parametrize("want", [0, None])
def test_a_pool_that_sleeps_as_it_should_is_no_problem(want: int | None) -> None:
    """Nothing waits, and no worker is wanted, or nobody has decided how many are."""
    assert not assess(replace(CALM, pools=[pool(ready=0, want=want)]))[2]


@pytest.mark.parametrize(("now", "flow", "said"), [
    (replace(CALM, store_refusal="the disk is full"), "stopped", "the store takes no new jobs"),
    (replace(CALM, pools=[pool(standard=WAITING, ready=0)]), "stopped", "3 jobs of m wait and no worker runs"),
    (replace(CALM, pools=[pool(standard=WAITING, ready=0)], has_leader=False), "stopped", "no worker runs"),
    (replace(CALM, pools=[pool(standard=WAITING, ready=0, override=PAUSED)]), "stopped", "no worker runs"),
    (replace(CALM, pools=[pool(standard=WAITING, ready=0, starting=1)]), "behind", "wait for a worker to start"),
    (replace(CALM, pools=[pool(ready=0)]), "flowing", "no worker of m runs yet"),
    (replace(CALM, pools=[pool(standard=WAITING)]), "behind", "lane standard of m is behind"),
    (replace(CALM, pools=[pool(interactive={"waiting": 1, "oldest_s": 11.0})]), "behind", "lane interactive of m"),
    (replace(CALM, rates=Rates(lapsed=2)), "flowing", "2 workers lost in the last minute"),
    (replace(CALM, rates=Rates(lapsed=1, window_s=600.0)), "flowing", "1 worker lost in the last 600 s"),
    (replace(CALM, rates=Rates(failed=1, window_s=600.0)), "flowing", "1 job failed in the last 600 s"),
    (replace(CALM, has_leader=False), "flowing", "no scheduler leads"),
    (replace(CALM, dead_letters=1), "flowing", "1 dead letter"),
    (replace(CALM, rates=Rates(failed=4)), "flowing", "4 jobs failed"),
    (replace(CALM, memory_share=0.95), "flowing", "nearly full"),
    (replace(CALM, pools=[pool(override=SET)]), "flowing", "set to 3"),
    (replace(CALM, pools=[pool(workers=[SLOW])]), "flowing", "worker-2 takes no more jobs"),
])  # fmt: skip
def test_each_cause_has_its_words_and_a_next_step(now: Situation, flow: str, said: str) -> None:
    found, title, problems = assess(now)
    assert found == flow
    assert said in problems[0].title
    assert (said in title) == (flow != "flowing")
    assert all(problem.cause and problem.next_step for problem in problems)


@pytest.mark.parametrize("of_pool", [
    {"batch": WAITING}, {"standard": {"waiting": 3, "oldest_s": 59.0}},
    {"interactive": {"waiting": 0, "oldest_s": 99.0}},
    {"ready": 2, "workers": [ALONE, WELL]},
])  # fmt: skip
def test_a_lane_that_waits_its_turn_and_a_server_away_from_one_worker_stop_nothing(of_pool: dict[str, Any]) -> None:
    assert assess(replace(CALM, pools=[pool(**of_pool)]))[0] == "flowing"


STALLED = {"cause": "no scheduler leads", "fix": "start one"}


@pytest.mark.parametrize(
    ("lanes", "override", "flow", "severities"),
    [
        ({"batch": {"waiting": 1, "oldest_s": 1.0}}, None, "stopped", ["error"]),
        ({"batch": {"waiting": 1, "oldest_s": 1.0}}, {**SET, "want": 0}, "stopped", ["error", "note"]),
        ({}, None, "flowing", ["note"]),
        ({}, {**SET, "want": 0}, "flowing", ["note"]),
    ],
)
def test_a_model_that_may_have_no_worker_is_shown(
    lanes: dict[str, Any], override: Any, flow: str, severities: list[str]
) -> None:
    """A job that waits in any lane of it stops the flow; without one it is a note, and an override is one already."""
    found, _, problems = assess(
        replace(CALM, pools=[pool(ready=0, want=0, stalled=STALLED, override=override, **lanes)])
    )
    assert found == flow and [problem.severity for problem in problems] == severities
    if override is None:
        assert (problems[0].cause, problems[0].next_step) == ("no scheduler leads", "start one")


def test_a_server_that_is_away_is_named_and_no_more_workers_are_asked_for() -> None:
    _, title, problems = assess(replace(CALM, pools=[pool(standard=WAITING, want=2, workers=[ALONE])]))
    assert title == "Stopped: servers of m have been away for 40 s: http://gpu-1:8000/v1 (connection refused)."
    (problem,) = problems
    assert "3 jobs" in problem.cause and "start the servers" in problem.next_step


def test_a_worker_that_waits_for_its_server_says_so() -> None:
    _, _, problems = assess(replace(CALM, pools=[pool(standard=WAITING, ready=0, starting=1, workers=[LOADS])]))
    assert problems[0].cause == LOADS["phase"]


def test_the_worst_comes_first() -> None:
    now = replace(CALM, pools=[pool(standard=WAITING)], dead_letters=3, store_refusal="gone", rates=Rates(lapsed=1))
    assert [problem.severity for problem in assess(now)[2]] == ["error", "warning", "warning", "note"]


# --- rates -----------------------------------------------------------------------------------------------------------


HALF = {0.1: 0.0, 0.2: 50.0, 0.4: 100.0, inf: 100.0}


def test_the_first_reading_says_what_was_since_the_start() -> None:
    rates = RateWindow().add(Reading(100.0, first_token=HALF, ended={"failed": 3}))
    assert rates.window_s is None and rates.jobs_per_s is None and rates.failed == 0
    assert rates.first_token_ms is not None
    assert [round(value) for value in rates.first_token_ms.values()] == [200, 380]


def test_throughput_is_of_seconds_and_latency_of_a_minute() -> None:
    window = RateWindow()
    window.add(Reading(0.0, first_token=HALF))
    for second in range(1, 101):
        rates = window.add(Reading(float(second), first_token=HALF, ended={"completed": 2 * second}))
    assert rates.window_s == 60.0 and rates.first_token_ms is None, "nothing was answered in the last minute"
    assert rates.jobs_per_s == 2.0


def test_after_a_pause_the_last_reading_is_the_base() -> None:
    window = RateWindow()
    window.add(Reading(0.0, ended={"completed": 100}))
    rates = window.add(Reading(600.0, ended={"completed": 700}, lapsed=1))
    assert (rates.window_s, rates.jobs_per_s, rates.lapsed) == (600.0, 1.0, 1)


def test_a_process_that_was_restarted_gives_no_negative_rate() -> None:
    window = RateWindow()
    window.add(Reading(0.0, ended={"completed": 5, "failed": 2}, first_token=HALF))
    rates = window.add(Reading(2.0))
    assert (rates.jobs_per_s, rates.failed, rates.first_token_ms) == (0.0, 0, None)


def test_what_lies_beyond_the_last_bound_is_said_to_be_that() -> None:
    rates = RateWindow().add(Reading(0.0, first_token={0.1: 0.0, 60.0: 0.0, inf: 9.0}))
    assert rates.first_token_ms == {"p50": 60_000.0, "p95": 60_000.0}


def test_readings_sum_over_models() -> None:
    registry = CollectorRegistry()
    seen = Histogram(FIRST_TOKEN, "", ("model",), buckets=(0.1, 1), registry=registry)
    jobs = Counter("penstock_jobs_total", "", ("model", "state"), registry=registry)
    for model in ("a", "b"):
        seen.labels(model).observe(0.05)
        jobs.labels(model, "completed").inc(4)
    reading = read(registry.collect(), 7.0)
    assert reading.first_token == {0.1: 2, 1.0: 2, inf: 2} and reading.ended == {"completed": 8} and reading.at == 7.0
