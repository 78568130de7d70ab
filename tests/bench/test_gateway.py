"""The gateway comparison: its goals, and that nothing is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.gateway.__main__ import main
from bench.gateway.figures import Goals, rows
from bench.load.plan import StreamReading
from bench.report import load
from bench.stats import Spread

pytestmark = pytest.mark.slow

SMALL = ("--levels", "2", "--tokens", "8", "--step-ms", "2", "--prefill-ms", "2", "--requests-per-stream", "2")


def reading(
    cpu_s: float, *, e2e: float = 2000.0, itl: float = 15.1, ttft: float = 30.0, errors: int = 0
) -> StreamReading:
    """Of a million tokens."""
    cpu, wrong = {"api": cpu_s, "redis": 1.0}, {"cut off": errors} if errors else {}
    timed: dict[str, Any] = {"ttft": Spread(p50=ttft), "itl": Spread(p99=itl), "e2e": Spread(mean=e2e)}
    return StreamReading(requests=100, wrong=wrong, tokens=1_000_000, seconds=10.0, cpu=cpu, own_cpu=0.2, **timed)


def judged(found: list[dict[str, object]], *asked: str) -> dict[str, tuple[float | None, str]]:
    goals = Goals(found, asked)
    return {ratio.what: (ratio.value, ratio.verdict) for ratio in goals.of_sweep(15.0)}


def test_goals_compare_with_the_others_of_the_same_run() -> None:
    names = ["floor", "penstock", "router", "dynamo"]
    readings = {
        ("floor", 64): [reading(5)],
        ("penstock", 64): [reading(9, e2e=2020, errors=1)],
        ("floor", 256): [reading(5)],
        ("penstock", 256): [reading(9, e2e=2100, itl=15.6)],
        ("router", 256): [reading(14)],
        ("dynamo", 256): [reading(39)],
    }
    found = judged(rows(readings, names), *names)
    assert found["c=256: Penstock's CPU per token / Dynamo's"] == (pytest.approx(0.25), "reached")
    assert found["c=256: Penstock's CPU per token / SGLang router + engine server"] == (pytest.approx(2 / 3), "reached")
    assert found["c=256: Penstock's CPU per token / the floor's"] == (pytest.approx(10 / 6), "reached")
    assert found["Penstock's ITL p99 / a 15 ms step, worst of all c"] == (pytest.approx(1.04), "missed")
    worst, verdict = found["Penstock's share of end-to-end time, %, worst of c >= 64"]
    assert worst == pytest.approx(100 * 100 / 2100) and verdict == "missed"
    growth, flat = found["Penstock's share, growth from c=64 to 256, points"]
    assert growth == pytest.approx(100 * 100 / 2100 - 100 * 20 / 2020) and flat == "missed"
    assert found["Penstock's errors"] == (1, "missed")


def in_front(own: float, server: float, ttft: float) -> StreamReading:
    """Of a system that forwards to the engine server: CPU us per token of both."""
    return msgspec.structs.replace(reading(0.0, ttft=ttft), cpu={"own": own, "engine": server})


def test_a_path_in_front_of_a_server_is_judged_by_all_its_processes() -> None:
    """The cost without the server is shown; first tokens are held against the server's own, at the highest level."""
    names = ["floor", "penstock", "penstock-upstream", "router"]
    each = {
        "floor": in_front(0, 10, 20),
        "penstock": reading(23, ttft=24),  # and one more of its store
        "penstock-upstream": in_front(36, 70, 26),
        "router": in_front(16, 50, 21),
    }
    found = rows({(name, level): [read] for name, read in each.items() for level in (1, 256)}, names)
    judged = {ratio.what: (ratio.value, ratio.verdict) for ratio in Goals(found, names).of_upstream()}
    both = "penstock-upstream / (penstock + router)"
    own = f"CPU per token without the engine server, {both}"
    assert judged[f"c=256: CPU per token, {both}"] == (pytest.approx((36 + 70) / (24 + 16)), "missed")
    assert judged[f"c=256: {own}"] == (pytest.approx(0.9), "")
    assert judged[f"c=1: CPU per token, {both}"][1] == ""
    wait = "TTFT p50 of {} - the engine server's own, ms"
    assert judged["c=256: " + wait.format("penstock-upstream")] == (pytest.approx(6), "missed")
    assert judged["c=1: " + wait.format("penstock-upstream")][1] == ""
    assert judged["c=256: " + wait.format("router")] == (pytest.approx(1), "")
    assert judged["Penstock's errors in front of the engine server"] == (0, "reached")


def test_the_whole_of_it_on_a_small_scale(tmp_path: Path) -> None:
    """Every request is answered, the clock is right, and the figures name each process that it cost."""
    words = ["--quick", "--upstream", "--systems", "floor,penstock-upstream", *SMALL, "--levels", "2,40"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    report = load(tmp_path / "gateway-upstream-quick.json")
    assert [(row["system"], row["streams"], row["errors"]) for row in report.rows] == [
        (name, streams, 0) for name in ("floor", "penstock-upstream") for streams in (2, 40)
    ]
    costs = [row["cpu_us_per_token"] for row in report.rows]
    assert 0 < costs[0] < costs[2] and 0 < costs[1] < costs[3]
    processes = {part.split()[0] for part in report.rows[-1]["parts"].split(", ")}
    assert processes == {"engine", "worker-1", "api-1", "redis", "scheduler-1", "offline-1"}
    assert report.ratios[-1].what.startswith("clock error") and report.ratios[-1].value is not None
