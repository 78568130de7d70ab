"""F15's own judge: what a flood is held against, and what its controls may change."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count

import pytest
from fault_testbed import stage

from bench.bare_server import serve
from bench.chaos import bare_queue
from bench.chaos.history import Life
from bench.chaos.processes import until
from bench.chaos.rows.overload import CAPACITY, Controls, judge_overload
from bench.chaos.stage import FaultTestbed
from bench.ports import free_port
from workers.engines.sim.settings import SimSettings

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


async def test_a_bare_queue_keeps_its_engines_full(capsys: pytest.CaptureFixture[str]) -> None:
    """Each request that ends frees the slot of another one, which first asks the bare server."""
    port, ends = free_port(), list[float]()

    async def listens() -> bool:
        with suppress(OSError):
            (await asyncio.open_connection("127.0.0.1", port))[1].close()
            return True
        return False

    async def has_served() -> bool:
        ends.extend(map(float, capsys.readouterr().out.split()))
        return len(ends) >= 20

    server = asyncio.create_task(serve(port, refuses=False))
    await until(listens, 10)
    queue = asyncio.create_task(bare_queue.serve(port, 2, SimSettings(slots=3, step_ms=1, prefill_ms=1), 4))
    try:
        await until(has_served, 30)
    finally:
        queue.cancel()
        await asyncio.wait([queue])
        server.cancel()
        await asyncio.wait([server])
    assert ends == sorted(ends)
