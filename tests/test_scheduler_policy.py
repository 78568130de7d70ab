"""The policy's promises, for any load and any limits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from scheduler.policy import PATIENCE_MS, Limits, Snapshot, State, decide

LIMITS = Limits(min=1, max=4, backlog_per_worker=16, idle_s=60)

counts = st.integers(0, 400)
seconds = st.floats(0, 1e6)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    low = draw(st.integers(0, 6))
    return Limits(low, low + draw(st.integers(0, 10)), draw(st.integers(1, 40)), draw(st.floats(0, 120)))


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    ready = draw(st.integers(0, 12))
    lanes = {name: draw(counts) for name in ("interactive", "standard", "batch")}
    ages = {name: draw(st.integers(0, 3 * PATIENCE_MS)) if waiting else 0 for name, waiting in lanes.items()}
    slots = ready * draw(st.integers(1, 64))
    return Snapshot("m", lanes, ages, draw(counts), ready, draw(st.integers(0, 4)), slots)


states = st.none() | st.builds(
    State, want=st.integers(0, 20), spare_since=st.none() | seconds, capacity=st.none() | st.integers(1, 64)
)


def seen(waiting: int = 0, oldest_ms: int = 0, running: int = 0, ready: int = 1, slots: int = 4) -> Snapshot:
    return Snapshot("m", {"standard": waiting}, {"standard": oldest_ms}, running, ready, 0, slots)


@given(snapshots(), limits(), states, seconds)
def test_want_is_within_the_limits_and_says_why(
    snapshot: Snapshot, limits: Limits, state: State | None, now: float
) -> None:
    """Whatever is seen, the answer respects min and max, explains itself, and is what the next decision starts from."""
    decision = decide(snapshot, limits, state, now)
    assert limits.min <= decision.want <= limits.max
    assert decision.reason.strip()
    assert decision.state.want == decision.want


@given(snapshots(), limits(), states, seconds, counts)
def test_more_backlog_never_wants_fewer(
    snapshot: Snapshot, limits: Limits, state: State | None, now: float, more: int
) -> None:
    """With all else equal, more waiting jobs never lead to fewer workers."""
    heavier = replace(snapshot, waiting={**snapshot.waiting, "batch": snapshot.waiting["batch"] + more})
    assert decide(heavier, limits, state, now).want >= decide(snapshot, limits, state, now).want


@given(snapshots(), limits(), states)
def test_constant_input_settles(snapshot: Snapshot, limits: Limits, state: State | None) -> None:
    """Seeing the same again and again, the number of workers goes one way and then stays."""
    wants = []
    for tick in range(60):
        decision = decide(snapshot, limits, state, tick * (limits.idle_s + 1))
        state = decision.state
        wants.append(decision.want)
    steps = [after - before for before, after in pairwise(wants[1:]) if after != before]
    assert all(step > 0 for step in steps) or all(step < 0 for step in steps)
    assert len(set(wants[-20:])) == 1


@given(st.integers(1, 400), limits().filter(lambda limits: limits.max > 0), st.integers(0, 3 * PATIENCE_MS))
def test_the_first_waiting_job_wakes_a_sleeping_model(waiting: int, limits: Limits, oldest_ms: int) -> None:
    """From zero workers, any waiting job wants one, at once."""
    asleep = seen(waiting, oldest_ms, ready=0, slots=0)
    assert decide(asleep, limits, State(0), 0.0).want >= 1


@given(
    offered=st.integers(0, 120),
    slots=st.integers(1, 40),
    really=st.integers(1, 40),
    prefetch=st.integers(0, 2),
    start_ticks=st.integers(0, 5),
    limits=limits(),
)
@example(offered=60, slots=40, really=10, prefetch=0, start_ticks=2, limits=Limits(1, 8, 16, 3))
@example(offered=5, slots=2, really=2, prefetch=1, start_ticks=2, limits=Limits(0, 4, 1, 3))
def test_a_constant_load_does_not_rock_the_number_of_workers(
    offered: int, slots: int, really: int, prefetch: int, start_ticks: int, limits: Limits
) -> None:
    """In a closed loop of jobs, workers that take time to start and hold less than they claim, growth ends for good."""
    limits = replace(limits, idle_s=3.0)
    each = min(slots, really) + prefetch
    state, ready_at, age, wants = None, [0] * limits.min, 0, []
    for tick in range(160):
        ready = sum(at <= tick for at in ready_at)
        running = min(offered, ready * each)
        age = age + 1000 if offered > running else 0
        snapshot = seen(offered - running, age, running, ready, ready * slots)
        decision = decide(snapshot, limits, state, float(tick))
        state = decision.state
        ready_at = ready_at[: decision.want] + [tick + start_ticks] * (decision.want - len(ready_at))
        wants.append(decision.want)
    assert len(set(wants[-60:])) == 1


def test_backlog_beyond_the_slots_grows_at_once() -> None:
    """35 jobs too many at 16 per worker are two workers more, in one decision."""
    decision = decide(seen(waiting=35, oldest_ms=500, running=4), LIMITS, State(1), 0.0)
    assert decision.want == 3
    assert decision.reason == "35 waiting (oldest 0.5 s): one more worker per 16, at most 4"


def test_free_slots_are_believed_until_jobs_grow_old() -> None:
    """Jobs that just arrived fit into free slots; the same jobs, long waiting, show that the slots cannot be had."""
    fresh = seen(waiting=40, oldest_ms=100, running=10, slots=64)
    stuck = seen(waiting=40, oldest_ms=PATIENCE_MS, running=10, slots=64)
    assert decide(fresh, LIMITS, State(1), 0.0).want == 1
    assert decide(stuck, LIMITS, State(1), 0.0).want == 3


def test_one_is_given_back_after_each_quiet_while() -> None:
    """Three idle workers become one in two steps, each after idle_s, and a busy moment begins the wait anew."""
    state = State(3)
    wants = []
    for now in range(0, 200, 10):
        busy = now == 30
        decision = decide(seen(running=12 if busy else 0, ready=3, slots=12), LIMITS, state, float(now))
        state = decision.state
        wants.append(decision.want)
    assert wants == [3] * 10 + [2] * 6 + [1] * 4


def test_work_that_cannot_be_attributed_keeps_every_worker() -> None:
    """While all workers are silent but jobs run, nothing is given back however long it lasts."""
    state = State(3)
    for now in (0.0, 100.0, 200.0):
        decision = decide(seen(running=9, ready=0, slots=0), LIMITS, state, now)
        state = decision.state
    assert decision.want == 3


def test_prefetched_jobs_are_no_reason_to_grow() -> None:
    """A worker of 4 slots that holds 6 jobs, none waiting, needs no second worker."""
    assert decide(seen(running=6), LIMITS, State(1), 0.0).want == 1


def test_what_a_worker_holds_is_learned_and_corrected() -> None:
    """Long waits teach how much a worker really takes; seeing it take more corrects that upwards, not downwards."""
    learned = decide(seen(waiting=9, oldest_ms=PATIENCE_MS, running=8, ready=2, slots=64), LIMITS, State(2), 0.0).state
    corrected = decide(seen(running=12, ready=2, slots=64), LIMITS, learned, 1.0).state
    kept = decide(seen(running=2, ready=2, slots=64), LIMITS, corrected, 2.0).state
    assert (learned.capacity, corrected.capacity, kept.capacity) == (4, 6, 6)


def test_new_limits_apply_at_once() -> None:
    """A plan above the maximum is cut without waiting, and the reason says so."""
    decision = decide(seen(running=40, ready=9, slots=36), LIMITS, State(9), 0.0)
    assert (decision.want, decision.reason) == (4, "the limits are 1 to 4")


def test_the_first_decision_keeps_the_workers_there_are() -> None:
    """Without a state, running and starting workers are taken over instead of being stopped."""
    snapshot = replace(seen(ready=2, slots=8), workers_starting=1)
    assert decide(snapshot, LIMITS, None, 0.0).want == 3


def test_a_model_with_no_workers_allowed_stays_at_zero() -> None:
    """With max 0 even waiting jobs start nothing, and the reason names the limit."""
    decision = decide(seen(waiting=5, ready=0, slots=0), Limits(0, 0, 16, 60), None, 0.0)
    assert (decision.want, decision.reason) == (0, "5 waiting, and 0 is the most allowed")
