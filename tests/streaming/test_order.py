"""The order of the queue as a function of plain data: lane, floor and age, tenant, urgency, arrival."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.order.rule import (
    LaneQueue,
    RequeuedJob,
    Turn,
    WaitingJob,
    credits_after,
    next_job,
    virtual_time,
)
from streaming.order import BOOST_MS, FLOOR, PATIENCE_MS, Priority, patience_ms

HIGH, MIDDLE, LOW = Priority


def job(name: str, tenant: str = "a", *, arrived: int = 0, patience: int = 0, cost: int = 10) -> WaitingJob:
    return WaitingJob(name, tenant, (arrived, int(name.strip("abcdefgh") or 0)), arrived, patience, cost)


def lane(*jobs: WaitingJob, credit: int = 0, **counters: int) -> LaneQueue:
    return LaneQueue(jobs, counters=dict.fromkeys([each.tenant for each in jobs], 0) | counters, credit=credit)


def picked(lanes: dict[Priority, LaneQueue], now_ms: int = 0) -> tuple[str, Turn]:
    pick = next_job(lanes, now_ms)
    assert pick is not None
    return pick.job.id, pick.turn


def test_a_kept_place_is_for_the_highest_lane_in_which_jobs_wait() -> None:
    """While jobs wait that are passed over, a lower lane gets it only when its credit pays for its job."""
    flood = replace(lane(job("a1", "flood")), crowding=("flood",))
    assert next_job({HIGH: flood, LOW: lane(job("b1"))}, 0) is None
    assert next_job({HIGH: flood, LOW: replace(lane(job("b1"), credit=FLOOR * 10), crowding=("a",))}, 0) is None
    assert picked({HIGH: flood, MIDDLE: lane(job("c1")), LOW: lane(job("b1"), credit=FLOOR * 10)}) == ("b1", Turn.FLOOR)
    light = replace(lane(job("a1", "flood"), job("a2", "light"), flood=0, light=9), crowding=("flood",))
    assert picked({HIGH: light, LOW: lane(job("b1"))}) == ("a2", Turn.LANE)
    begun = replace(flood, requeued=(RequeuedJob("r1", 10),))
    assert picked({HIGH: begun, LOW: lane(job("b1"))}) == ("r1", Turn.LANE)


def test_the_tenant_that_got_least_goes_first_and_by_name_if_equal() -> None:
    jobs = (job("a1", "b"), job("a2", "a", arrived=9), job("a3", "c"))
    assert picked({HIGH: lane(*jobs, b=5, a=5, c=6)})[0] == "a2"
    assert picked({HIGH: lane(*jobs, b=5, a=5, c=4)})[0] == "a3"


def test_of_one_tenant_the_most_urgent_then_the_earliest() -> None:
    jobs = (job("a1", arrived=0, patience=100), job("a2", arrived=50, patience=40), job("a3", arrived=60, patience=40))
    assert picked({HIGH: lane(*jobs)})[0] == "a2"
    assert picked({HIGH: lane(job("a2", patience=7), job("a1", patience=7))})[0] == "a1"


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 5_000), min_size=1, max_size=40), st.lists(st.integers(1, 5_000), min_size=1, max_size=40)
)
def test_a_lower_lane_gets_its_floor_and_no_more(high: list[int], low: list[int]) -> None:
    """In any run in which both lanes wait: never more than a part in 20 of the work, and less by one job at most."""
    credit, work, rounds = 0, {HIGH: 0, LOW: 0}, 0
    places = {HIGH: 0, LOW: 0}
    while rounds < 400 and work[HIGH] < 30 * FLOOR * max(*high, *low):
        rounds += 1
        lanes = {
            HIGH: lane(job("a1", cost=high[places[HIGH] % len(high)])),
            LOW: lane(job("b1", cost=low[places[LOW] % len(low)]), credit=credit),
        }
        pick = next_job(lanes, 0)
        assert pick is not None
        work[pick.lane] += pick.job.cost
        places[pick.lane] += 1
        credit = credits_after(lanes, pick, 0)[LOW]
        assert FLOOR * work[LOW] <= work[HIGH]
        assert work[HIGH] < FLOOR * (work[LOW] + max(low)) + max(high)


def test_an_old_lane_takes_turns_with_the_next_higher_one_and_stays_fair() -> None:
    """Half of the work; but not with a lane two higher. Its age chooses the lane, not the tenant: one that floods it
    holds up no other."""
    old = BOOST_MS[LOW] + 1
    jobs = (job("b1", "x", arrived=1), job("b2", "y", arrived=0))
    credit, turns = 0, list[str]()
    for _ in range(6):
        lanes = {MIDDLE: lane(job("a1")), LOW: lane(*jobs, credit=credit, x=0, y=9)}
        pick = next_job(lanes, old)
        assert pick is not None
        turns.append(pick.job.id)
        credit = credits_after(lanes, pick, old)[LOW]
    assert turns == ["a1", "b1"] * 3
    lanes = {HIGH: lane(job("a1")), LOW: lane(*jobs)}
    pick = next_job(lanes, old)
    assert pick is not None and credits_after(lanes, pick, old)[LOW] == 10
    lanes = {MIDDLE: lane(job("a1")), LOW: lane(*jobs)}
    pick = next_job(lanes, old - 1)
    assert pick is not None and credits_after(lanes, pick, old - 1)[LOW] == 10


def test_requeued_jobs_of_a_lower_lane_may_owe_for_their_turn() -> None:
    queue = LaneQueue(requeued=(RequeuedJob("r1", 100),), credit=1)
    lanes = {HIGH: lane(job("a1")), LOW: queue}
    assert picked(lanes) == ("r1", Turn.FLOOR)
    pick = next_job(lanes, 0)
    assert pick is not None and credits_after(lanes, pick, 0)[LOW] == 1 - 100 * FLOOR
    assert picked({HIGH: lane(job("a1")), LOW: replace(queue, credit=0)}) == ("a1", Turn.LANE)


def test_a_tenant_that_returns_gets_no_turns_for_its_absence() -> None:
    """It starts where those who wait are, or where the last one was."""
    assert virtual_time(70, {}) == 70 and virtual_time(70, {"b": 80, "c": 95}) == 80


@pytest.mark.parametrize(
    ("limits", "patience"),
    [
        ((None, None), PATIENCE_MS[MIDDLE]),
        ((3_600_000, None), PATIENCE_MS[MIDDLE]),
        ((60_000, None), 59_000),
        ((60_000, 5_000), 5_000),
        ((500, None), 0),
    ],
)
def test_a_deadline_brings_a_job_forward_and_never_back(limits: tuple[int | None, int | None], patience: int) -> None:
    assert patience_ms(MIDDLE, *limits, 100) == patience
