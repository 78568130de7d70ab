"""The diagnosis: what counts as named, what counts as equal, and one case on real processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded import delivery, request

from bench import report
from bench.diagnosis.__main__ import RECORDED, main, row_of
from bench.diagnosis.cases import CASES, judged, unequal
from bench.diagnosis.cost import record_cost_us
from bench.diagnosis.load import Received
from bench.diagnosis.raw import differing, raw
from telemetry.records.schema import ENCODER
from telemetry.report.finding import Advice
from telemetry.report.report import RequestReport, Scope, report_of


def advice(kind: str, title: str) -> Advice:
    return Advice(kind=kind, title=title, reason="", change="")


def test_what_counts_as_named() -> None:
    """The kind and the culprit; another bottleneck is wrong, but for one that the case allows."""
    slow, lane = CASES["slow worker"], CASES["starved lane"]
    assert judged(slow, [advice("slow_worker", "worker-slow is slow")]) == (True, [])
    assert judged(slow, [advice("slow_worker", "worker-1 is slow")]) == (False, ["worker-1 is slow"])
    assert judged(slow, []) == (False, [])
    full = advice("full_pool", "The pool of bench is full")
    assert judged(lane, [advice("starved_lane", "Lane batch of bench starves"), full]) == (True, [])
    assert judged(CASES["nothing"], [full]) == (True, [full.title])
    assert judged(CASES["nothing"], [advice("refused", "1 % of the requests were refused")]) == (True, [])


def test_a_number_that_differs_is_named(tmp_path: Path) -> None:
    rows = [request(number, 100.0 * number, wait=10.0 * number, per_token=5.0 + number) for number in range(3)]
    written = [each for row in rows for each in (row, delivery(row, 3.0))]
    (tmp_path / "20270115T080000.000-worker-1.jsonl").write_bytes(b"\n".join(map(ENCODER.encode, written)) + b"\n")
    found: RequestReport = report_of(tmp_path, Scope(0.0, float("inf")), {})
    lines = raw(tmp_path)
    received = Received(answers={row.id for row in rows}, tokens=33)
    assert unequal(received, found, lines) == []
    assert unequal(Received(answers=received.answers, tokens=34), found, lines) == ["tokens", "raw tokens"]
    more = unequal(received, found, [*lines, lines[0]])
    assert {"requests", "one record each", "raw tokens", "ingress", "decode"} <= set(more)


@pytest.mark.parametrize(
    ("stamp", "names"),
    [
        ("first_sent_us", {"ttft p90", "ttft p99", "ttft max"}),
        ("last_sent_us", {"e2e p90", "e2e p99", "e2e max", "egress_tail"}),
        ("last_us", {"itl p90", "itl p99", "itl max", "decode", "egress_tail"}),
    ],
)
def test_each_figure_is_compared(tmp_path: Path, stamp: str, names: set[str]) -> None:
    """A stamp of the last request that is a millisecond later changes what depends on it, and nothing else."""
    rows = [request(number, 100.0 * number, wait=10.0 * number, per_token=5.0 + number) for number in range(3)]
    written = [each for row in rows for each in (row, delivery(row, 3.0))]
    (tmp_path / "20270115T080000.000-worker-1.jsonl").write_bytes(b"\n".join(map(ENCODER.encode, written)) + b"\n")
    whole = report_of(tmp_path, Scope(0.0, float("inf")), {}).figures.whole
    lines = sorted(raw(tmp_path), key=lambda line: str(line["id"]))
    assert differing(whole, lines) == []
    lines[-1][stamp] += 1000
    assert set(differing(whole, lines)) == names


def test_what_the_report_says_first_is_shown() -> None:
    """Also if it is not what was planted."""
    slow, full = advice("slow_worker", "worker-slow is slow"), advice("full_pool", "The pool of bench is full")
    whole = SimpleNamespace(requests=0, completion_tokens=0, wait=None, ttft=None, itl=None, e2e=None, parts={})
    found: Any = SimpleNamespace(figures=SimpleNamespace(whole=whole), advice=[full, slow])
    row = row_of((CASES["slow worker"], Received(), found, []))
    assert (row["first"], row["found"], row["named"]) == (full.title, f"{slow.title}. ", "yes")


def test_a_recorded_load_has_every_case_and_time_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert RECORDED.keys() == CASES.keys()
    assert main(["--recorded", "--seconds", "20"]) == 2 and "--seconds 64 or more" in capsys.readouterr().out
    assert main(["--recorded", "--cases", "nothing"]) == 2


def test_raw_lines_are_those_of_the_window(tmp_path: Path) -> None:
    """By their ends; what is no whole line is left out."""
    rows = [request(number, 100.0 * number) for number in range(3)]
    text = b"\n".join(map(ENCODER.encode, rows)) + b'\n{"kind":"requ'
    (tmp_path / "20270115T080000.000-worker-1.jsonl").write_bytes(text)
    since, until = rows[1].ended_us / 1e6, rows[2].ended_us / 1e6
    assert [row["id"] for row in raw(tmp_path, since, until)] == [rows[1].id]
    assert len(raw(tmp_path)) == 3


def test_a_record_has_a_cost() -> None:
    costs = record_cost_us()
    assert len(costs) == 9 and all(cost > 0 for cost in costs)


@pytest.mark.slow
def test_a_case_on_real_processes(tmp_path: Path) -> None:
    """The report names the slow worker, and its numbers are those of the raw lines and of the clients."""
    main(["--cases", "slow worker", "--seconds", "5", "--out", str(tmp_path)])
    (row,) = report.load(tmp_path / "diagnosis.json").rows
    assert (row["named"], row["equal"], row["wrong"]) == ("yes", "yes", {}) and "worker-slow" in row["found"]
