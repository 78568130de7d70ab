"""The policy's promises, for any load and any limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_depth import a_lane
from msgspec import structs
from worker_report import a_worker

from scheduler.policy.decide import SMALL_STEP_HOLDOFF_S, PolicyState, PoolPlan, decide_pool
from scheduler.policy.demand import MIN_QUEUED_S, RATE_WINDOW_S, Demand, Flow
from scheduler.policy.snapshot import TARGETS, ScalingLimits, Snapshot
from streaming.fleet.process import Process, Prospect, Served
from streaming.order import LaneDepth, Priority, WaitingDeadline

pytestmark = pytest.mark.slow

LIMITS = ScalingLimits(min=1, max=4)
LANES = tuple(TARGETS)

counts = st.integers(0, 400)
seconds = st.floats(0, 1e6)


@st.composite
def limits(draw: st.DrawFn) -> ScalingLimits:
    low = draw(st.integers(0, 6))
    return ScalingLimits(
        low, low + draw(st.integers(0, 10)), idle_s=draw(st.floats(0, 120)), sleep_s=draw(st.floats(0, 600)),
        cold_start_s=draw(st.floats(0.1, 300)), cover=draw(st.floats(0, 1)),
        cost=draw(st.sampled_from((0.0, 1.0, 2.5))), budget=draw(st.none() | st.floats(0, 40)),
        pinned=draw(st.none() | st.none() | st.integers(0, 20)),
        paused=draw(st.sampled_from((False, False, False, True))),
    )  # fmt: skip


@st.composite
def lanes(draw: st.DrawFn) -> tuple[LaneDepth, ...]:
    found = []
    for name in LANES:
        waiting = draw(counts)
        age = draw(st.floats(0, 3 * MIN_QUEUED_S)) if waiting else 0.0
        found.append(a_lane(name, waiting, draw(counts), age, draw(st.integers(0, 10_000))))
    return tuple(found)


def deadlines(waiting: Sequence[Priority]) -> st.SearchStrategy[tuple[WaitingDeadline, ...]]:
    """Of jobs in lanes where any wait; none if none does."""
    lane, age_ms = st.sampled_from(waiting or list(Priority)), st.integers(0, int(3000 * MIN_QUEUED_S))
    each = st.builds(WaitingDeadline, st.just("m"), lane, st.integers(0, 100_000), age_ms)
    return st.lists(each, max_size=3 if waiting else 0).map(tuple)


@st.composite
def workers(draw: st.DrawFn) -> tuple[Process, ...]:
    slots, kv = draw(st.integers(1, 64)), draw(st.sampled_from((0, 8192)))
    states = st.sampled_from(("ready", "ready", "starting", "draining"))
    return tuple(
        a_worker(
            f"w{number}", draw(states), slots, draw(st.integers(0, slots)),
            kv_tokens=kv, kv_used=draw(st.integers(0, kv)),
            served={lane: Served(draw(counts), draw(st.integers(0, 10_000))) for lane in LANES[:2]},
        )
        for number in range(draw(st.integers(0, 6)))
    )  # fmt: skip


@st.composite
def drawn_snapshots(draw: st.DrawFn) -> Snapshot:
    found = draw(lanes())
    due = draw(deadlines([lane.priority for lane in found if lane.waiting]))
    return Snapshot("m", found, draw(workers()), due=due)


snapshots = drawn_snapshots()


@st.composite
def states(draw: st.DrawFn) -> PolicyState | None:
    """None, or what is left after some looks at the world."""
    state: PolicyState | None = draw(st.none() | st.builds(PolicyState, st.integers(0, 20)))
    now = 0.0
    for seen in draw(st.lists(snapshots, max_size=4)):
        now += draw(st.floats(0, 100))
        state = decide_pool(seen, ScalingLimits(0, 20), state, now).state
    return state


def seen(waiting: int = 0, oldest_s: float = 0.0, running: int = 0, ready: int = 1, slots: int = 4) -> Snapshot:
    """Standard jobs, and workers that each hold as many as the others."""
    each = min(slots, running // ready) if ready else 0
    lane = a_lane("standard", waiting, running, oldest_s)
    return Snapshot("m", (lane,), tuple(a_worker(f"w{n}", "ready", slots, each) for n in range(ready)))


def follow(state: PolicyState | None, limits: ScalingLimits, world: list[tuple[float, Snapshot]]) -> list[PoolPlan]:
    """A decision for each (time, snapshot)."""
    plans = []
    for now, snapshot in world:
        plans.append(decide_pool(snapshot, limits, state, now))
        state = plans[-1].state
    return plans


@given(snapshots, limits(), states(), seconds)
def test_want_is_within_the_limits_and_says_why(
    snapshot: Snapshot, limits: ScalingLimits, state: PolicyState | None, later: float
) -> None:
    """Whatever is seen, the answer respects minimum, maximum and budget, explains itself, and is what the next decision
    starts from. The same question has the same answer: nothing is remembered but the state."""
    plan = decide_pool(snapshot, limits, state, 1000.0 + later)
    if not limits.paused:
        assert min(limits.min, limits.ceiling) <= plan.want <= limits.max
        assert limits.budget is None or plan.want * limits.cost <= limits.budget
    assert plan.reason.strip()
    assert plan.state.want == plan.want
    assert all(lane.wait_s is not None and lane.wait_s >= plan.wake_s for lane in plan.lanes.values())
    assert decide_pool(snapshot, limits, state, 1000.0 + later) == plan


@given(snapshots, limits(), states(), seconds, counts, st.sampled_from(LANES))
def test_more_backlog_never_wants_fewer(
    snapshot: Snapshot, limits: ScalingLimits, state: PolicyState | None, later: float, more: int, where: str
) -> None:
    """With all else equal, more waiting jobs never lead to fewer workers."""
    heavier = tuple(replace(x, waiting=x.waiting + more * (x.priority == where)) for x in snapshot.lanes)
    want = decide_pool(replace(snapshot, lanes=heavier), limits, state, 1000.0 + later).want
    assert want >= decide_pool(snapshot, limits, state, 1000.0 + later).want


@given(snapshots, limits(), states())
def test_constant_input_settles(snapshot: Snapshot, limits: ScalingLimits, state: PolicyState | None) -> None:
    """Seeing the same again and again, the number of workers goes one way and then stays, once arrivals and peaks of
    before are forgotten."""
    snapshot = replace(snapshot, due=())
    plans = follow(state, limits, [(1000.0 + 600.0 * tick, snapshot) for tick in range(30)])
    wants = [plan.want for plan in plans[10:]]
    steps = [after - before for before, after in pairwise(wants) if after != before]
    assert all(step > 0 for step in steps) or all(step < 0 for step in steps)
    assert len(set(wants[-10:])) == 1


@given(st.integers(1, 400), limits().filter(lambda limits: limits.ceiling > 0), st.floats(0, 10), states())
def test_the_first_waiting_job_wakes_a_sleeping_model(
    waiting: int, limits: ScalingLimits, oldest_s: float, state: PolicyState | None
) -> None:
    """From zero workers, any waiting job wants one, at once, whatever was before."""
    asleep = PolicyState(0) if state is None else replace(state, want=0)
    awake = replace(limits, pinned=None, paused=False)
    assert decide_pool(seen(waiting, oldest_s, ready=0), awake, asleep, 1000.0).want >= 1


@given(
    offered=st.integers(0, 120), slots=st.integers(1, 40), really=st.integers(1, 40), prefetch=st.integers(0, 2),
    start_ticks=st.integers(0, 5), most=st.integers(1, 12),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_a_constant_load_does_not_rock_the_number_of_workers(
    offered: int, slots: int, really: int, prefetch: int, start_ticks: int, most: int
) -> None:
    """In a closed loop of jobs, workers that take time to start and hold less than they claim, growth ends for good."""
    limits = ScalingLimits(0, most, idle_s=3.0, cold_start_s=1.0)
    each = min(slots, really) + prefetch
    state, ready_at, age, wants = None, [0] * limits.min, 0.0, []
    for tick in range(300):
        ready = sum(at <= tick for at in ready_at)
        running = min(offered, ready * each)
        age = age + 1 if offered > running else 0.0
        plan = decide_pool(seen(offered - running, age, running, ready, slots), limits, state, float(tick))
        state = plan.state
        ready_at = ready_at[: plan.want] + [tick + start_ticks] * (plan.want - len(ready_at))
        wants.append(plan.want)
    assert len(set(wants[-60:])) == 1


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 16))
def test_noise_moves_the_number_at_most_twice_in_an_hour(chance: Random, slots: int) -> None:
    """Three hours of a load that jumps between 20 and 28 jobs, looked at every 30 s: once the first half hour has shown
    the noise, no more than two changes of direction in any hour."""
    limits = ScalingLimits(0, 60, cold_start_s=10.0)
    ready = -(-28 // slots) + 3
    world = [(30.0 * n, seen(0, 0, chance.randint(20, 28), ready, slots)) for n in range(360)]
    plans = follow(PolicyState(1), limits, world)
    changes = [(30.0 * n, b.want - a.want) for n, (a, b) in enumerate(pairwise(plans), 1) if a.want != b.want]
    turns = [at for (_, one), (at, other) in pairwise(changes) if (one > 0) != (other > 0) and at > 1800]
    assert all(third - first >= SMALL_STEP_HOLDOFF_S for first, third in zip(turns, turns[2:], strict=False))


def batch_of_ten_seconds(waiting: int, *due: WaitingDeadline) -> PoolPlan:
    """One worker of four slots, in which four batch jobs of 1,000 tokens have just ended after ten seconds."""
    served, later = ({"batch": Served(jobs, jobs * 1000)} for jobs in (100, 104))
    before = Snapshot("m", (a_lane("batch"),), (a_worker("w", slots=4, running=4, served=served),))
    lane = a_lane("batch", waiting, 4, 60.0)
    now = Snapshot("m", (lane,), (a_worker("w", slots=4, running=4, served=later),), due=due)
    return decide_pool(now, LIMITS, decide_pool(before, LIMITS, None, 0.0).state, 10.0)


def test_jobs_that_can_wait_are_fitted_into_the_slots_there_are() -> None:
    """35 batch jobs of ten seconds need one worker of four slots for a target of an hour, not nine."""
    plan = batch_of_ten_seconds(35)
    assert (plan.want, round(plan.state.demand.pace)) == (1, 100)
    assert plan.lanes["batch"].wait_s == 36_000 / 400, "36 jobs of 1,000 tokens at 400 tokens a second"


def test_a_near_deadline_is_met_by_more_workers() -> None:
    """The same backlog with a job at its end that is due in 30 s: as many workers as begin all before it by then."""
    plan = batch_of_ten_seconds(35, WaitingDeadline("m", Priority.BATCH, 30_000, 1000))
    assert plan.want == 3
    assert plan.reason == "35 must be begun within 30 s for a deadline: 3 workers do that"


def test_a_rush_is_expected_where_there_was_one() -> None:
    """Jobs that cannot wait for a worker to start get room for the rush seen before; once those are long ago, for less.

    Eight jobs at once, sixteen for a minute every 90 minutes; a worker of five slots takes a minute to start.
    """
    limits = ScalingLimits(0, 20, cold_start_s=60.0, cover=1.0)
    lane = a_lane("interactive")

    def at(now: float, *, rushes: bool) -> tuple[float, Snapshot]:
        jobs = 16 if rushes and now % 5400 >= 5340 else 8
        return now, Snapshot("m", (replace(lane, running=jobs),), tuple(a_worker(f"w{n}", slots=5) for n in range(6)))

    rushing = follow(None, limits, [at(10.0 * n, rushes=True) for n in range(2100)])
    quiet = follow(rushing[-1].state, limits, [at(10.0 * n, rushes=False) for n in range(2100, 3600)])
    assert rushing[-1].want == 4, "16 jobs, 5 to a worker"
    assert rushing[-1].reason.startswith("at most 8 interactive jobs at once lately, up to 16 while a worker starts")
    assert quiet[-1].want == 2, "8 jobs"


def test_free_slots_are_believed_until_jobs_grow_old() -> None:
    """Jobs that just arrived fit into free slots; the same jobs, long waiting, show that the slots cannot be had."""
    fresh = seen(waiting=10, oldest_s=0.1, running=10, slots=64)
    stuck = seen(waiting=10, oldest_s=MIN_QUEUED_S, running=10, slots=64)
    assert decide_pool(fresh, LIMITS, PolicyState(1), 0.0).want == 1
    assert decide_pool(stuck, LIMITS, PolicyState(1), 0.0).want == 2


def test_spare_workers_are_given_back_once_the_last_peak_is_long_ago() -> None:
    """Three workers are kept for five cold starts after the last moment that needed them, then go together."""
    limits = ScalingLimits(1, 4, idle_s=60, cold_start_s=14)
    busy, idle = seen(running=12, ready=3), seen(running=1, ready=3)
    world = [(float(now), busy if now <= 30 else idle) for now in range(0, 200, 10)]
    wants = [plan.want for plan in follow(PolicyState(3), limits, world)]
    assert wants == [3] * 10 + [1] * 10, "30 s and 5 * 14 s"


def test_it_sleeps_when_no_job_came_for_a_while_and_wakes_at_once() -> None:
    """With min 0 the last worker goes sleep_s after the last job, and the first job wants one again at once."""
    limits = ScalingLimits(0, 4, sleep_s=120)
    idle, first = seen(), seen(waiting=1, ready=0)
    plans = follow(PolicyState(1), limits, [(float(now), idle) for now in range(0, 200, 10)])
    assert [plan.want for plan in plans] == [1] * 12 + [0] * 8
    woken = decide_pool(first, limits, plans[-1].state, 200.0)
    assert woken.want == 1 and woken.wake_s == limits.cold_start_s
    later = decide_pool(seen(waiting=1, ready=0), limits, woken.state, 204.0)
    assert later.wake_s == limits.cold_start_s - 4 and later.lanes["standard"].wait_s == later.wake_s


def test_work_that_cannot_be_attributed_keeps_every_worker() -> None:
    """While all workers are silent but jobs run, nothing is given back however long it lasts."""
    known = decide_pool(seen(running=9, ready=3), LIMITS, PolicyState(3), 0.0).state
    plans = follow(known, LIMITS, [(now, seen(running=9, ready=0)) for now in (100.0, 200.0, 3000.0)])
    assert [plan.want for plan in plans] == [3, 3, 3]


def test_a_full_cache_limits_what_a_worker_takes() -> None:
    """Three jobs that take half of the cache of a worker with 64 slots: it runs five, not 64."""
    worker = a_worker("w", slots=64, running=3, kv_tokens=8000, kv_used=4000)
    plan = decide_pool(Snapshot("m", (a_lane("standard", 9, 3, 0.1),), (worker,)), LIMITS, PolicyState(1), 0.0)
    assert plan.state.demand.capacity == 5
    assert plan.want == 3, "12 jobs, 5 to a worker"


def test_new_limits_apply_at_once() -> None:
    """A plan above the maximum is cut without waiting, and the reason says so."""
    plan = decide_pool(seen(running=36, ready=9), LIMITS, PolicyState(9), 0.0)
    assert (plan.want, plan.reason) == (4, "the limits are 1 to 4")


def test_a_hand_on_the_gate_overrides() -> None:
    """A pinned number is what is wanted; a pause changes nothing; both say so and end without a trace."""
    busy = seen(waiting=99, oldest_s=9)
    pinned = decide_pool(busy, replace(LIMITS, pinned=2), PolicyState(1), 0.0)
    paused = decide_pool(busy, replace(LIMITS, paused=True), PolicyState(1), 0.0)
    assert (pinned.want, pinned.reason) == (2, "2 set by hand")
    assert (paused.want, paused.reason) == (1, "paused: nothing is changed")
    assert decide_pool(busy, LIMITS, pinned.state, 1.0).want == 4


def test_no_worker_is_added_while_no_server_is_there() -> None:
    """It would wait as well. Nobody is told when a job begins. Once a server is back, the need counts again."""
    busy = seen(waiting=99, oldest_s=9)
    gone = tuple(structs.replace(each, away=("http://gpu-1/v1 (connection refused)",)) for each in busy.workers)
    away = decide_pool(replace(busy, workers=gone), LIMITS, PolicyState(1), 0.0)
    assert away.want == 1 and away.reason.endswith("http://gpu-1/v1 (connection refused)")
    assert away.lanes["standard"] == Prospect(0.0, 0.0, 99), "only the start of a worker is known"
    assert decide_pool(replace(busy, workers=gone), replace(LIMITS, min=2), PolicyState(1), 0.0).want == 2
    one_there = (*gone, a_worker("w9", slots=4))
    assert decide_pool(replace(busy, workers=one_there), LIMITS, away.state, 1.0).want == 4
    assert decide_pool(busy, LIMITS, away.state, 1.0).want == 4


def test_a_model_with_no_workers_allowed_stays_at_zero() -> None:
    """With max 0 even waiting jobs start nothing, and the reason names the limit."""
    plan = decide_pool(seen(waiting=5, ready=0), ScalingLimits(0, 0), None, 0.0)
    assert plan.want == 0 and plan.reason.startswith("0 is the most allowed")


def test_what_has_faded_for_days_is_not_known_any_more() -> None:
    """To divide by what is left of it would overflow, and a job's wait would be no number."""
    faded = Demand(held_s=1e-308, flows={"standard": Flow(jobs=1e-308, tokens=2.0)})
    assert (faded.size("standard"), faded.size("batch"), faded.pace) == (0, 0, 0)


def test_what_comes_between_two_looks_at_nearly_the_same_time_is_a_rate() -> None:
    """However near they are."""
    first, then = (Snapshot("m", (a_lane("standard", 0, 0, 0.0, added),), ()) for added in (0, 60))
    for apart in (1e-308, 1e-12, 1e-3):
        state = decide_pool(first, ScalingLimits(0, 1), None, 0.0).state
        rate = decide_pool(then, ScalingLimits(0, 1), state, apart).state.demand.rate("standard")
        assert abs(rate - 60 / RATE_WINDOW_S) < 0.01
