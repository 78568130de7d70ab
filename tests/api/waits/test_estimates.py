"""When a waiting job will begin, as this process guesses without a scheduler, and that no worker is ready."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from waits_clock import Clock, clock

from api.waits import RATE_WINDOW_S, STALE_S, CompletionRate, WaitEstimates, WorkerReadiness
from streaming.fleet.plans import Plan, Prospect
from streaming.fleet.process import Process
from streaming.fleet.processes import this_process
from streaming.jobs.job import Job, Text
from streaming.order import Priority

__all__ = ["clock"]  # a fixture


def test_only_jobs_that_ended_lately_count(clock: Clock) -> None:
    """Those before the window are forgotten; with fewer than two, nothing is known."""
    rate = CompletionRate()
    for _ in range(7):
        rate.ended("m")
    clock.now += RATE_WINDOW_S + 1
    assert rate.eta_ms("m", 0) is None and rate.eta_ms("m", 100) is None
    rate.ended("m")
    clock.now += 10
    rate.ended("m")
    clock.now += 10
    assert rate.eta_ms("m", 0) == 10_000, "two in twenty seconds"
    assert rate.eta_ms("m", 2) == 30_000
    assert rate.eta_ms("other", 0) is None


# --- no worker is ready ----------------------------------------------------------------------------------------------


def a_worker(state: str, model: str = "m") -> Process:
    return replace(this_process("worker", "worker-1"), state=state, model=model)


def a_job(lane: Priority) -> Job:
    return Job(id="j", model="m", tenant="t", priority=lane, prompt=Text(("x",)))


def test_why_no_worker_can_claim_a_job() -> None:
    """Nothing is claimed of a model while it is not known, and before the reports were read."""
    readiness = WorkerReadiness()
    assert readiness.problem("m") == ""
    readiness.learn([])
    assert readiness.problem("m") == "no worker is ready: none is running"
    readiness.learn([a_worker("starting"), a_worker("draining"), a_worker("ready", "other")])
    assert readiness.problem("m") == "no worker is ready: one is draining, one is starting"
    assert readiness.problem("other") == ""
    readiness.learn([a_worker("starting"), a_worker("ready")])
    assert readiness.problem("m") == ""


def test_a_worker_whose_servers_are_away_begins_nothing() -> None:
    """So no wait is known, whatever the plan and the last minutes say."""
    waits, job = WaitEstimates(), a_job(Priority.BATCH)
    plan = Plan(model="m", want=1, reason="r", at_ms=0, lanes={"batch": Prospect(0.0)})
    away = replace(a_worker("ready"), away=("http://gpu-1:8000/v1 (connection refused)",), away_s=3.0)
    for plans in ({"m": plan}, {}):
        waits.plans.learn(plans, 0)
        for _ in range(2):
            waits.completions.ended("m")
        waits.readiness.learn([away])
        assert waits.wait(job) is None
        assert waits.readiness.problem("m") == "no worker is ready: one is waiting for its server"
        waits.readiness.learn([away, a_worker("ready")])
        assert waits.wait(job) is not None and not waits.readiness.problem("m")


def test_old_reports_say_nothing(clock: Clock) -> None:
    readiness = WorkerReadiness()
    readiness.learn([])
    clock.now += STALE_S + 1
    assert readiness.problem("m") == ""


@pytest.mark.parametrize(("wake_s", "ready", "known"), [(0.0, False, False), (0.0, True, True), (8.0, False, True)])
def test_a_wait_without_a_ready_worker_is_unknown(wake_s: float, ready: bool, known: bool) -> None:
    """Unless the first worker is expected: a plan whose start is overdue, as of one that crashes, is no estimate."""
    waits, job = WaitEstimates(), a_job(Priority.BATCH)
    plan = Plan(model="m", want=1, reason="r", at_ms=0, wake_s=wake_s, lanes={"batch": Prospect(wake_s)})
    waits.plans.learn({"m": plan}, 0)
    waits.readiness.learn([a_worker("ready" if ready else "starting")])
    assert (waits.wait(job) is not None) == known


def test_a_start_that_takes_too_long_is_expected_no_more(clock: Clock) -> None:
    """A plan names a whole cold start while it has ordered none, as with a worker that crashes at each start. An order
    begins the time anew."""

    def expected(want: int) -> bool:
        at_ms = int(1000 * clock.now)
        plan = Plan(
            model="m", want=want, reason="r", at_ms=at_ms, wake_s=8.0, cold_start_s=8.0, lanes={"batch": Prospect(8.0)}
        )
        waits.plans.learn({"m": plan}, at_ms)
        waits.readiness.learn([a_worker("starting")])
        return waits.wait(job) is not None

    waits, job = WaitEstimates(), a_job(Priority.BATCH)
    waits.readiness.learn([a_worker("ready")])
    assert expected(want=1)
    clock.now += 8
    assert expected(want=1)
    clock.now += 1
    assert not expected(want=1)
    assert expected(want=0), "this job wakes it"
    assert expected(want=1)
    clock.now += 9
    assert not expected(want=1)
