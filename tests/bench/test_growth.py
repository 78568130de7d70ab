"""Unit costs out of measured points, and what follows from them on paper."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.growth.figures import (
    STEP_READERS,
    STEP_TOKENS,
    AssumedLoad,
    Cell,
    Point,
    Row,
    UnitCosts,
    api_cores,
    cell,
    fit,
    frames,
    on_paper,
    redis_cores,
    row,
    step_row,
    step_us,
    unit_costs,
)
from bench.load.plan import StreamReading
from bench.penstock import start_redis
from bench.processes import Processes
from bench.stats import Spread

COSTS = UnitCosts(
    api_request=300,
    api_token=8,
    redis_request=60,
    redis_step=40,
    redis_token=0.5,
    redis_frame=10,
    worker_token=2,
)


def reading(cpu: dict[str, float], tokens: int, requests: int) -> StreamReading:
    none = Spread()
    return StreamReading(
        requests=requests, wrong={}, tokens=tokens, seconds=1.0, ttft=none, itl=none, e2e=none, cpu=cpu, own_cpu=0.1
    )


def point(series: str, value: int) -> Row:
    """As if the true costs were COSTS, at a step of one token of each stream."""
    at = Point(series=series, **{series: value})  # type: ignore[arg-type]
    requests = 10 * at.streams
    tokens = requests * at.tokens
    steps = tokens / at.streams
    redis = steps * (COSTS.redis_step + at.apis * COSTS.redis_frame)
    redis += tokens * COSTS.redis_token + requests * COSTS.redis_request
    api = tokens * COSTS.api_token + requests * COSTS.api_request
    cpu = {"api-1": api / 2e6, "api-2": api / 2e6, "redis": redis / 1e6, "worker-1": tokens * COSTS.worker_token / 1e6}
    return row(at, reading(cpu, tokens, requests))


def test_a_line_is_fitted_by_least_squares() -> None:
    line = fit([(0, 1.0), (1, 3.0), (2, 5.0)])
    assert (line.base, line.slope) == (pytest.approx(1.0), pytest.approx(2.0))
    with pytest.raises(ValueError, match="two points"):
        fit([(1, 1.0), (1, 2.0)])


def step(series: str, tokens: int, readers: int) -> Row:
    us = COSTS.redis_step + tokens * COSTS.redis_token + readers * COSTS.redis_frame
    return step_row(series, tokens, readers, us)


def test_costs_that_are_put_in_come_out() -> None:
    rows = [
        *(point("tokens", value) for value in (1, 16, 64, 256)),
        *(step(STEP_TOKENS, tokens, 1) for tokens in (1, 64, 256)),
        *(step(STEP_READERS, 256, readers) for readers in (1, 8, 32)),
    ]
    found = msgspec.to_builtins(unit_costs(rows))
    assert found == pytest.approx(msgspec.to_builtins(COSTS))
    with pytest.raises(ValueError, match="two points"):
        unit_costs(rows[:1])


@pytest.mark.slow
async def test_a_step_costs_more_the_more_readers_it_has(tmp_path: Path) -> None:
    with Processes(tmp_path) as store:
        url = start_redis(store)
        few, many = [await step_us(store, url, 64, readers, 0.5) for readers in (1, 64)]
    assert 0 < few < many


def test_a_steps_tokens_go_to_nearly_every_process_when_there_are_more_streams_than_processes() -> None:
    assert frames(1, 256) == 1 and frames(2, 1) == pytest.approx(1)
    assert frames(16, 256) == pytest.approx(16, rel=0.01) and frames(10_000, 256) == pytest.approx(256, rel=0.02)


def test_a_cell_is_the_most_that_one_primary_bears() -> None:
    load = AssumedLoad()
    found = cell(COSTS, load)
    assert isinstance(found, Cell) and found.redis_busy <= load.busy and found.api_busy <= load.busy
    more = found.machines + 1
    apis = -(-more * api_cores(COSTS, load) // load.busy)
    assert more * redis_cores(COSTS, load, int(apis)) > load.busy
    with pytest.raises(ValueError, match="does not bear"):
        cell(COSTS, AssumedLoad(slots=1_000_000))


def test_the_paper_says_what_a_thousand_machines_need() -> None:
    text = on_paper(COSTS, AssumedLoad())
    one = cell(COSTS, AssumedLoad())
    assert f"| machines that one Redis primary bears | {one.machines} |" in text
    assert "for 1,000 machines" in text and "| API, a token | 8.0 |" in text
