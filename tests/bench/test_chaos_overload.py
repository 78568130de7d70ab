"""F15's own judge: what a flood is held against, and what its controls may change."""

from __future__ import annotations

from itertools import count

import pytest
from fault_testbed import stage

from bench.chaos.history import Life
from bench.chaos.rows.overload import CAPACITY, Controls, judge_overload
from bench.chaos.stage import FaultTestbed

__all__ = ["stage"]

SPENT_S = 20.0


def flood(served: float, *, refusal_ms: float = 5.0, first_token_s: float = 0.1, lowest: float = 0.06) -> list[Life]:
    """A flood in which this share of the capacity was served."""
    done, numbers = round(served * CAPACITY * SPENT_S), count()
    lives = []
    for number in range(done):
        lane = "batch" if number < lowest * done else "interactive"
        life = Life({"t": 0.0, "prompt": f"{lane} {next(numbers)}"}, job=f"job_{number}")
        if lane == "interactive":
            life.events = [{"t": first_token_s, "event": "token"}]
        lives.append(life)
    refused = Life({"t": 0.0, "prompt": f"batch {next(numbers)}"})
    refused.events = [{"t": 0.0, "event": "refused", "ms": refusal_ms, "retry_after": "1"}]
    return [*lives, refused]


@pytest.mark.parametrize(
    ("lives", "bare", "wrong"),
    [
        (flood(0.95), Controls(10, 1.0 * CAPACITY), ""),
        (flood(0.89), Controls(10, 1.0 * CAPACITY), "jobs/s served"),
        (flood(0.95), Controls(10, 2.0 * CAPACITY), ""),
        (flood(0.82), Controls(10, 0.9 * CAPACITY), ""),
        (flood(0.79), Controls(10, 0.9 * CAPACITY), "jobs/s served"),
        (flood(0.95), Controls(10, 0), "bare queue"),
        (flood(0.95, refusal_ms=41), Controls(10, CAPACITY), "refusal p99"),
        (flood(0.95, refusal_ms=41), Controls(11, CAPACITY), ""),
        (flood(0.95, first_token_s=0.7), Controls(10, CAPACITY), "TTFT p99"),
        (flood(0.95, lowest=0.04), Controls(10, CAPACITY), "lowest lane"),
    ],
)
def test_a_flood_is_held_against_its_bounds_and_its_controls(
    stage: FaultTestbed, lives: list[Life], bare: Controls, wrong: str
) -> None:
    """A bare queue that the machine holds up lowers what is due; one that serves more than the capacity raises
    nothing."""
    judge_overload(stage, flood(0.3), lives, SPENT_S, bare)
    assert len(stage.wrong) == bool(wrong) and all(wrong in why for why in stage.wrong), stage.wrong
