"""What is learned of demand, starts and rushes, and what is reckoned from it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_depth import a_lane
from worker_report import a_worker

from scheduler.policy.decide import _prospects
from scheduler.policy.demand import (
    BUCKET_S,
    Ahead,
    Demand,
    Flow,
    Rush,
    Starts,
    clear_s,
    concurrent_demand,
    constraints,
    follow,
    highest,
    learn,
    quantile,
    wait_s,
    with_peak,
    workers_for,
)
from scheduler.policy.snapshot import ScalingLimits, Snapshot
from streaming.fleet.process import Process, Prospect, Served
from streaming.order import Priority, WaitingDeadline

LIMITS = ScalingLimits(0, 8)
KNOWN = Demand(slots=4, held_s=10.0, flows={"standard": Flow(jobs=10, tokens=1000.0)})
"""Four slots a worker, jobs of 100 tokens, 100 tokens a second of each slot."""


def looked_at(*looks: tuple[float, Snapshot]) -> Demand:
    demand = Demand()
    for now, snapshot in looks:
        demand = learn(demand, snapshot, LIMITS, now)
    return demand


def test_arrivals_are_counted_between_looks() -> None:
    """Two jobs a second for ten minutes are two a second; what was there before the first look is not counted."""
    looks = [(float(now), Snapshot("m", (a_lane("standard", added=500 + 2 * now),))) for now in range(600)]
    assert looked_at(*looks).rate("standard") == pytest.approx(2, rel=0.01)
    lost = (601.0, Snapshot("m", (a_lane("standard", added=3),)))
    assert 1.9 < looked_at(*looks, lost).rate("standard") < 2, "a store that lost data has not given negative arrivals"


def test_a_slots_pace_and_a_jobs_size_are_measured() -> None:
    """Workers with three running jobs that end one of 300 tokens every second: 100 tokens a second of each slot."""

    def worker(now: int) -> Process:
        return a_worker("w", slots=4, running=3, served={"standard": Served(now, 300 * now)})

    looks = [(float(now), Snapshot("m", (a_lane("standard"),), (worker(now),))) for now in range(300)]
    demand = looked_at(*looks)
    assert demand.pace == pytest.approx(100, rel=0.01)
    assert demand.size("standard") == pytest.approx(300)
    assert demand.size("batch") == pytest.approx(300), "nothing of its own is known yet"


def test_a_worker_that_was_not_seen_for_a_moment_counts_once() -> None:
    """Its counters are remembered."""
    here = Snapshot("m", (a_lane("standard"),), (a_worker("w", slots=4, served={"standard": Served(50, 500)}),))
    away = Snapshot("m", (a_lane("standard"),))
    demand = looked_at((0.0, here), (1.0, away), (2.0, here))
    assert demand.flows["standard"].jobs == 0


def test_a_queue_asks_for_no_more_room_than_its_jobs_would_have_taken() -> None:
    """Four slots, each of whose jobs ends within a tick with one chance in two, and five new jobs a tick: ten at once
    would run. After twenty ticks there is to be room for those ten, not for the sixty that wait."""
    limits, demand, waiting, added = ScalingLimits(1, 9), Demand(), 0, 0
    worker = a_worker("w", slots=4, running=4)
    for tick in range(21):
        look = Snapshot("m", (a_lane("interactive", waiting, 4, 0.0, added),), (worker,))
        demand = learn(demand, look, limits, 5.0 * tick)
        waiting, added = waiting + 3, added + 5  # two have ended
    assert look.waiting == 60
    assert concurrent_demand(look, demand)["interactive"] == pytest.approx(10, abs=0.1)
    more = replace(look, lanes=(replace(look.lanes[0], waiting=65, added=added),))
    stuck = learn(demand, more, limits, 105.0)
    assert stuck.flows["interactive"].offered == pytest.approx(15, abs=0.1), (
        "nothing ends: whatever comes asks for room"
    )


def test_a_rush_of_a_lane_counts_the_lanes_above_it() -> None:
    """Room for standard is what interactive leaves: three jobs and two are a peak of five."""
    limits = ScalingLimits(0, 8, targets={"interactive": 1.0, "standard": 1.0})
    lanes = (a_lane("interactive", 0, 3), a_lane("standard", 0, 2))
    demand = learn(Demand(slots=8), Snapshot("m", lanes, (a_worker("w", slots=8, running=5),)), limits, 0.0)
    assert {lane: rush.usual for lane, rush in demand.rushes.items()} == {"interactive": 3, "standard": 5}


def test_starts_are_matched_with_orders() -> None:
    """Oldest order first; a cancelled order is the youngest; a worker nobody ordered is no measurement."""
    starts = Starts().with_ready(["a"], 0.0)
    assert starts.with_ready(["a", "b"], 5.0).cold_s is None
    starts = starts.with_orders(3, 10.0)
    starts = starts.with_orders(-1, 12.0)
    assert starts.wake_s(9.0, 13.0) == 6.0
    starts = starts.with_ready(["a", "c", "d"], 30.0)
    assert (starts.ordered, starts.cold_s) == ((), 20.0)
    assert starts.wake_s(9.0, 31.0) == 20.0, "a whole start, for none is under way"


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 50)), min_size=1, max_size=60), st.floats(10, 100))
def test_peaks_are_a_sliding_maximum(steps: list[tuple[float, int]], while_s: float) -> None:
    """To within the bucket, the highest value of the last while, from a few numbers."""
    peaks: tuple[tuple[float, float], ...] = ()
    now, past = 0.0, []
    for gap, value in steps:
        now += gap
        past.append((now, value))
        peaks = with_peak(peaks, value, now, while_s)
        kept = [v for at, v in past if at > now - while_s]
        assert highest(peaks) <= max(kept)
        assert highest(peaks) >= max((v for at, v in past if at > now - while_s + BUCKET_S), default=0)
        assert all(a[1] > b[1] and a[0] < b[0] for a, b in pairwise(peaks))


@given(st.lists(st.tuples(st.floats(1, 5), st.floats(0.1, 9)), min_size=1, max_size=40), st.floats(0.01, 1))
def test_the_quantile_leaves_its_share_below(past: list[tuple[float, float]], share: float) -> None:
    """By weight."""
    found, whole = quantile(past, share), sum(weight for _, weight in past)
    assert sum(weight for value, weight in past if value <= found) >= share * whole * (1 - 1e-9)
    assert sum(weight for value, weight in past if value < found) < share * whole + 1e-6
    assert quantile([], share) == 0


@settings(max_examples=30)
@given(st.floats(1.2, 4), st.integers(5, 200))
def test_a_rush_that_comes_again_and_again_is_met(factor: float, jobs: int) -> None:
    """Demand that jumps by a factor every ten minutes finds, after a while, room for the jump before it comes."""
    rush = Rush()
    lens: dict[str, Any] = {"horizon_s": 60.0, "while_s": 120.0, "cover": 1.0, "each": 8}
    room_before = 0.0
    for tick in range(720):
        now = 10.0 * tick
        rushing = tick % 60 >= 54
        if tick % 60 == 54:
            room_before = rush.room
        rush = follow(rush, jobs * factor if rushing else jobs, now, **lens)
    assert room_before >= jobs * factor * 0.999


def test_a_calm_past_needs_no_more_than_its_peak() -> None:
    """Constant demand is met exactly, once it has been constant for a while; until then with some reserve."""
    rush = Rush()
    lens: dict[str, Any] = {"horizon_s": 60.0, "while_s": 300.0, "cover": 0.99, "each": 8}
    for tick in range(30):
        rush = follow(rush, 20, 10.0 * tick, **lens)
    assert rush.room > 25
    for tick in range(30, 400):
        rush = follow(rush, 20, 10.0 * tick, **lens)
    assert rush.room == 20


def test_the_time_to_clear() -> None:
    """Forty jobs of 100 tokens, two workers of four slots at 100 tokens a second each, three slots free."""
    ahead = Ahead("standard", 40, 4000.0, 0.0, 10.0, "")
    assert clear_s(ahead, 2, KNOWN, running=8) == 4000 / 800
    assert clear_s(ahead, 2, KNOWN, running=5) == pytest.approx(4000 * (37 / 40) / 800)
    overtaken = Ahead("standard", 40, 4000.0, 600.0, 10.0, "")
    assert clear_s(overtaken, 2, KNOWN, running=8) == 4000 / 200
    swamped = Ahead("standard", 40, 4000.0, 900.0, 10.0, "")
    assert clear_s(swamped, 2, KNOWN, running=8) == math.inf
    assert clear_s(Ahead("standard", 3, 300.0, 900.0, 10.0, ""), 2, KNOWN, running=5) == 0


@given(st.integers(1, 500), st.floats(0.1, 100), st.floats(0, 2000), st.integers(0, 100))
def test_more_workers_never_clear_later(jobs: int, within_s: float, overtaking: float, running: int) -> None:
    """So the fewest that do it in time can be searched for; none fewer does."""
    ahead = Ahead("standard", jobs, 100.0 * jobs, overtaking, within_s, "")
    times = [clear_s(ahead, workers, KNOWN, running) for workers in range(21)]
    assert times == sorted(times, reverse=True)
    found = workers_for(ahead, KNOWN, running, 20)
    assert all(took > within_s for took in times[:found])
    assert found == 20 or times[found] <= within_s


def test_a_job_put_now_waits_for_everything_above_it() -> None:
    """And an empty lane of a busy model for the next free slot."""
    lanes = (a_lane("interactive"), a_lane("standard", 39, 8))
    snapshot = Snapshot("m", lanes, (a_worker("v", slots=4, running=4), a_worker("w", slots=4, running=4)))
    waits = wait_s(snapshot, KNOWN, 2)
    assert waits == {"interactive": 100 / 800, "standard": 4000 / 800}


def test_slots_that_are_reserved_from_lane_batch_are_not_free_for_it() -> None:
    """Three of four slots run its jobs: another one waits, and a job of another lane does not. With fewer, it finds
    what is free in both counts."""
    demand = Demand(slots=4, held_s=10.0, flows={"batch": Flow(jobs=10, tokens=1000.0)})
    for running, waits in ((3, {"standard": 0.0, "batch": 100 / 400}), (2, {"standard": 0.0, "batch": 0.0})):
        lanes = (a_lane("standard"), a_lane("batch", 0, running))
        worker = a_worker("w", slots=4, running=running, reserved=1)
        assert wait_s(Snapshot("m", lanes, (worker,)), demand, 1) == waits
    lanes = (a_lane("standard", 0, 2), a_lane("batch", 0, 1))
    worker = a_worker("w", slots=4, running=3, reserved=1)
    assert wait_s(Snapshot("m", lanes, (worker,)), demand, 1)["batch"] == 0.0, "the fourth is free for anyone"


def test_each_lanes_jobs_are_of_its_own_size() -> None:
    """Ten short jobs are begun before ten that are nine times as long, in a tenth of the time both take; so much is to
    be done within the target of each, and before a deadline."""
    flows = {"standard": Flow(jobs=10, tokens=1000.0), "batch": Flow(jobs=10, tokens=9000.0)}
    demand = Demand(slots=4, held_s=100.0, flows=flows)
    lanes = (a_lane("standard", 10, 4), a_lane("batch", 10, 0, 10.0))
    due = (WaitingDeadline("m", Priority.BATCH, 60_000, 6000),)
    snapshot = Snapshot("m", lanes, (a_worker("w", slots=4, running=4),), due=due)
    assert wait_s(snapshot, demand, 1) == {"standard": 11 * 100 / 400, "batch": (10 * 100 + 11 * 900) / 400}
    tokens = [(ahead.lane, ahead.jobs, ahead.tokens) for ahead in constraints(snapshot, demand, LIMITS)]
    assert tokens == [("standard", 10, 1000), ("batch", 20, 10_000), ("batch", 15, 5500)]


@pytest.mark.parametrize(("oldest_s", "within_s"), [(0.0, 120.0), (50.0, 70.0), (115.0, 12.0), (500.0, 12.0)])
def test_what_a_job_has_waited_is_taken_from_its_target(oldest_s: float, within_s: float) -> None:
    """A late lane still gets a tenth of its target, so that it does not ask for any number of workers."""
    snapshot = Snapshot("m", (a_lane("standard", 10, 4, oldest_s),), (a_worker("w", slots=4, running=4),))
    limits = replace(LIMITS, targets={"standard": 120.0})
    assert [ahead.within_s for ahead in constraints(snapshot, KNOWN, limits)] == [within_s]


def test_a_lane_that_busy_ones_leave_only_the_floor_has_a_finite_wait() -> None:
    """It gets a twentieth of the work, so each of its jobs takes twenty times as long, behind the start of a worker.
    Without a pace only the start is known."""
    lanes = (a_lane("interactive"), a_lane("standard", 3, 4))
    snapshot = Snapshot("m", lanes, (a_worker("w", slots=4, running=4),))
    busy = replace(KNOWN, flows={"interactive": Flow(rate=9.0), **KNOWN.flows})
    for demand, shown in ((busy, Prospect(5.0 + 4 * 20 * 0.25, 5.0, 3)), (Demand(slots=4), Prospect(5.0, 0.0, 3))):
        assert dict(_prospects(snapshot, LIMITS, demand, 1, 5.0))["standard"] == shown
    calm = dict(_prospects(snapshot, LIMITS, KNOWN, 1, 5.0))["standard"]
    assert calm == Prospect(5.0 + 400 / 400, 0.25, 3)
