"""The breakdown: parts and groups add up to what the client waited, and the bottleneck is the largest of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from house import House

from bench import report
from bench.breakdown.__main__ import STACK, AskedWhole, BreakdownLevel, main, notes_of, ratios_of, row_of
from telemetry.latency import EGRESS_FIRST, PARTS


def timing(**parts: float) -> dict[str, Any]:
    """What the API answers for one job; parts that are not given took no time."""
    times = {part.name: parts.get(part.name, 0.0) for part in PARTS} | {EGRESS_FIRST.name: parts.get("egress_first")}
    whole = sum(time or 0.0 for name, time in times.items() if name != EGRESS_FIRST.name)
    return {
        "parts_ms": times,
        "end_to_end_ms": whole,
        "until": "last_sent",
        "clock_error_ms": {"api": 0.1, "worker": 0.2},
    }


def level(*spent_ms: float, streams: int = 64) -> BreakdownLevel:
    return BreakdownLevel(
        streams, [AskedWhole(f"job_{number:032x}", each) for number, each in enumerate(spent_ms)], seconds=2.0
    )


def test_a_row_adds_up_to_what_the_client_waited() -> None:
    """Time that no stamp saw is the gateway's; groups are sums; the share leaves the queue out."""
    asked = level(1_010.0, 2_030.0)
    timed = [
        (asked.asked[0], timing(ingress=2, queue=100, gate=1, prefill=47, decode=850, egress_tail=5)),
        (asked.asked[1], timing(ingress=4, queue=300, gate=1, prefill=53, decode=1_650, egress_tail=7)),
    ]
    row = row_of(asked, timed)
    assert row["end_to_end"] == 1_520.0 == pytest.approx(sum(row[f"{name}_ms"] for name in STACK))
    assert (row["engine_ms"], row["queue_ms"], row["outside"]) == (1_300.0, 200.0, 10.0)
    assert row["gateway_ms"] == 20.0 and row["share"] == pytest.approx(100 * 20 / 1_320)
    assert row["bottleneck"] == "engine" and row["per_second"] == 1.0 and row["egress_first"] is None


@pytest.mark.parametrize(
    ("parts", "name"),
    [({"decode": 900.0}, "engine"), ({"queue": 900.0}, "queue"), ({"engine_wait": 900.0}, "queue"),
     ({"egress_tail": 900.0}, "gateway"), ({"gate": 900.0}, "gateway"), ({}, "gateway")],
)  # fmt: skip
def test_the_bottleneck_is_where_most_of_the_time_went(parts: dict[str, float], name: str) -> None:
    """A slow engine, full lanes, a slow path; and time that only the client saw."""
    asked = level(1_000.0)
    assert row_of(asked, [(asked.asked[0], timing(prefill=10, **parts))])["bottleneck"] == name


def test_the_share_is_judged_where_it_counts() -> None:
    """From 64 streams on, and whether it stays; a level without timings is not judged, and said."""
    rows = []
    for streams, tail in ((1, 500.0), (64, 20.0), (256, 40.0)):
        asked = level(1_000.0 + tail, streams=streams)
        rows.append(row_of(asked, [(asked.asked[0], timing(decode=1_000, egress_tail=tail))]))
    first, second, ratio, growth = ratios_of(rows)
    assert [each.verdict for each in (first, second, ratio, growth)] == ["reached", "missed", "missed", "missed"]
    assert (ratio.value, growth.value) == (pytest.approx(1.96, abs=0.01), pytest.approx(1.885, abs=0.01))
    lost = row_of(level(1.0), [(level(1.0).asked[0], timing() | {"until": None})])
    assert "share" not in lost and ratios_of([lost]) == ()
    assert any("1 timings without their end" in note for note in notes_of([lost], None, 4))


@pytest.mark.slow
def test_a_run_against_real_processes(house: House, tmp_path: Path) -> None:
    """Table, JSON and plots; the engine takes most of the time; every request was timed."""
    words = ["--base-url", house.url, "--levels", "1,4", "--requests-per-stream", "3", "--tokens", "40"]
    assert main([*words, "--out", str(tmp_path), "--plots", str(tmp_path)]) == 0
    found = report.load(tmp_path / "breakdown.json")
    assert [(row["streams"], row["timed"], row["wrong"]) for row in found.rows] == [(1, 3, {}), (4, 12, {})]
    for row in found.rows:
        assert row["decode"] > 60 and row["end_to_end"] == pytest.approx(sum(row[f"{name}_ms"] for name in STACK))
    assert {path.name for path in tmp_path.iterdir()} >= {"breakdown.png", "breakdown-gateway.svg"}


def test_what_is_no_penstock_is_said(capsys: pytest.CaptureFixture[str], house: House, tmp_path: Path) -> None:
    """An address nobody listens on, one that is none, a model nobody serves: an error, and exit code 1."""
    assert main(["--base-url", "http://127.0.0.1:1"]) == 1
    assert main(["--base-url", "https://127.0.0.1"]) == 1 and "plain http://" in capsys.readouterr().out
    words = ["--base-url", house.url, "--model", "nobody", "--levels", "1", "--quick", "--out", str(tmp_path)]
    assert main(words) == 1
    assert "status 404" in capsys.readouterr().out
