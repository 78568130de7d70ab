"""The compressed day: the same requests each time, a simulation that keeps its books, and goals that can be missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.elastic import day
from bench.elastic.day import DayOutcome, DaySize, compared, curves, goals_of, rows_of, simulated
from scheduler.policy.snapshot import TARGETS

pytestmark = pytest.mark.slow

SIZE = DaySize(seconds=60.0)


def test_a_day_is_the_same_each_time_and_has_all_lanes() -> None:
    rows = rows_of(SIZE)
    assert rows == rows_of(SIZE) and [row.at for row in rows] == sorted(row.at for row in rows)
    assert {row.lane for row in rows} == set(TARGETS) and max(row.at for row in rows) < SIZE.seconds
    assert SIZE.rate * SIZE.seconds < len(rows) < 1.5 * SIZE.rate * SIZE.seconds, "with the bursts"
    assert max(row.prompt + row.answer for row in rows) < day.KV_TOKENS


def test_a_simulated_day_begins_every_request_once_and_pays_for_each_worker() -> None:
    outcome = simulated(rows_of(SIZE), SIZE.seconds, 2.0)
    assert {lane: len(waits) for lane, waits in outcome.waits.items()} == outcome.asked
    assert simulated(rows_of(SIZE), SIZE.seconds, 2.0).waits == outcome.waits
    counted = sum(workers for _, workers in outcome.curve) * day.SAMPLE_INTERVAL_S
    assert outcome.worker_s == pytest.approx(counted, rel=0.03) and max(count for _, count in outcome.curve) > 1


def test_workers_that_start_slowly_let_more_requests_wait() -> None:
    fast, slow = (simulated(rows_of(SIZE), SIZE.seconds, start_s) for start_s in (0.5, 20.0))
    assert slow.within("interactive") < fast.within("interactive")


def test_days_that_are_apart_miss_the_goals() -> None:
    one, other = (simulated(rows_of(SIZE), SIZE.seconds, 2.0) for _ in range(2))
    assert {goal.verdict for goal in goals_of(one, other, ())} == {"reached"}
    other.worker_s *= 1.06
    other.waits["interactive"] = [100.0] * len(other.waits["interactive"])
    missed = [goal.what for goal in goals_of(one, other, ["status 500"]) if goal.verdict == "missed"]
    assert missed == [
        "day: worker-hours apart, %",
        "day: interactive begun in time, points apart",
        "day: answers with a fault",
    ]
    rows = {row["what"]: row for row in compared(one, other, 2.0, ["status 500"])}
    assert rows["worker-hours"]["apart"] == pytest.approx(6.0)


def test_requests_that_were_never_begun_are_not_in_time() -> None:
    outcome = DayOutcome()
    outcome.asked["batch"], outcome.waits["batch"] = 4, [1.0, 2.0]
    assert outcome.within("batch") == 50.0


def test_the_curves_have_a_point_for_each_hundredth_of_the_day() -> None:
    outcome = simulated(rows_of(SIZE), SIZE.seconds, 2.0)
    drawn = curves(outcome, outcome, rows_of(SIZE), SIZE.seconds)
    assert drawn["live"] == drawn["simulated"] and {len(points) for points in drawn.values()} == {100}


async def test_a_live_day_begins_every_request(tmp_path: Path) -> None:
    """Short: all requests are begun and answered, and workers are counted."""
    real, start_s, faults = await day.live(tmp_path, DaySize(seconds=15.0, rate=3.0), lambda _: None)
    assert faults == [] and start_s > 2.0, "two seconds of it load the weights"
    assert {lane: len(waits) for lane, waits in real.waits.items()} == real.asked
    assert real.worker_s >= 14.0 and real.curve
