"""Workloads: the moments that were asked for, traces read and written, and a day that is the same each time."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from planner.simulator.trace import (
    API,
    COLUMNS,
    DAY_S,
    LANES,
    Burst,
    Lengths,
    Malformed,
    Trace,
    TraceRow,
    WorkloadShape,
    bursts,
    cut,
    requests,
)


def write(path: Path, requests: Iterable[TraceRow]) -> int:
    """Write a trace that `Trace` reads; returns the number of rows. A lane BurstGPT does not know is an API log."""
    types = {lane: kind for kind, lane in LANES.items()}
    count = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([*COLUMNS, "Session ID"])
        for count, each in enumerate(requests, 1):  # noqa: B007 - the last one is the answer
            total = each.prompt + each.answer
            kind = types.get(each.lane, API)
            rows.writerow([f"{each.at:.3f}", each.model, each.prompt, each.answer, total, kind, each.session])
    return count


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_gaps_have_the_mean_and_the_spread_asked_for(cv: float) -> None:
    times = [each.at for each in requests(WorkloadShape(rate=4.0, cv=cv), seed=3, seconds=10_000)]
    gaps = [after - before for before, after in pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 4.0, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.05)


def test_lengths_are_zipfs() -> None:
    """The first rank twice as often as the second, none beyond the cap, and the mean as worked out."""
    lengths = Lengths(unit=6, most=256)
    drawn = list(islice(lengths.draws(random.Random(1)), 200_000))
    assert drawn.count(6) / drawn.count(12) == pytest.approx(2, rel=0.05)
    assert max(drawn) == 6 * 256 and fmean(drawn) == pytest.approx(lengths.mean, rel=0.02)


def test_the_rate_follows_the_day_and_its_bursts() -> None:
    """Lowest at midnight; bursts that overlap add what each brings."""
    shape = WorkloadShape(rate=10, wave=0.6, bursts=(Burst(1000, 300, 3.0, ramp_s=0), Burst(1200, 300, 2.0, ramp_s=0)))
    assert shape.rate_at(0) == pytest.approx(4) and shape.rate_at(DAY_S / 2) == pytest.approx(16)
    calm = WorkloadShape(rate=10, wave=0.6)
    strength = [shape.rate_at(at) / calm.rate_at(at) for at in (900, 1100, 1250, 1400, 1600)]
    assert strength == pytest.approx([1, 3, 4, 2, 1])


@pytest.mark.slow
def test_the_same_seed_is_the_same_day() -> None:
    def day(seed: int) -> list[TraceRow]:
        crowds = bursts(random.Random(seed), 3600, every_s=600, factor=(1.5, 3))
        return list(requests(WorkloadShape(rate=3, cv=1.5, bursts=crowds, turns=2), seed, 3600))

    assert day(1) == day(1) != day(2)


def test_turns_of_a_conversation_follow_each_other_and_carry_it_along() -> None:
    found = list(requests(WorkloadShape(rate=1, turns=4, api=0), seed=2, seconds=600))
    assert [each.at for each in found] == sorted(each.at for each in found)
    talk = max(({each.session for each in found} - {""}), key=lambda name: sum(x.session == name for x in found))
    turns = [each for each in found if each.session == talk]
    assert len(turns) > 3
    assert all(b.at > a.at and b.prompt > a.prompt + a.answer for a, b in pairwise(turns))


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = list(requests(WorkloadShape(rate=2, turns=2), seed=1, seconds=60))
    assert write(tmp_path / "trace.csv", made) == len(made)
    read = list(Trace(tmp_path / "trace.csv"))
    assert [(x.prompt, x.answer, x.lane, x.session) for x in read] == [
        (x.prompt, x.answer, x.lane, x.session) for x in made
    ]
    assert [x.at for x in read] == pytest.approx([x.at for x in made], abs=0.001)


def trace(folder: Path, *rows: str) -> Trace:
    path = folder / "t.csv"
    path.write_text("\n".join([",".join(COLUMNS), *rows, ""]))
    return Trace(path)


def test_failed_rows_are_counted_and_not_sent(tmp_path: Path) -> None:
    """As BurstGPT has them: no response tokens. Its log types are our classes."""
    found = trace(tmp_path, "0,ChatGPT,10,20,30,Conversation log", "5,GPT-4,9,0,9,API log", "7,GPT-4,8,4,12,API log")
    assert [(x.at, x.prompt, x.answer, x.lane, x.model) for x in found] == [
        (0.0, 10, 20, "interactive", "ChatGPT"),
        (7.0, 8, 4, "standard", "GPT-4"),
    ]
    assert found.failed == 1


@pytest.mark.parametrize("row", ["x,ChatGPT,1,2,3,API log", "1,ChatGPT,-1,2,3,API log", "1,ChatGPT"])
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, row: str) -> None:
    with pytest.raises(Malformed, match="line 2"):
        list(trace(tmp_path, row))


def test_a_file_without_the_columns_says_which(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("Timestamp,Model\n1,2\n")
    with pytest.raises(Malformed, match="Request tokens"):
        list(Trace(path))


def test_a_cut_is_moved_scaled_and_clipped() -> None:
    found = list(cut([TraceRow(at, 100, 100) for at in (5.0, 10.0, 30.0)], begin=10, end=30, scale=2, longest=120))
    assert found == [TraceRow(0.0, 20, 100)]


def test_json_lines_of_apex(tmp_path: Path) -> None:
    """Nanoseconds; a line without an answer is a failure."""
    path = tmp_path / "t.jsonl"
    lines = [(0, 10, 5), (1_500_000_000, 20, 0), (2_000_000_000, 0, 7)]
    path.write_text(
        "".join(f'{{"StartTimeOffset": {at}, "ContextTokens": {n}, "GeneratedTokens": {g}}}\n' for at, n, g in lines)
    )
    trace = Trace(path)
    assert list(trace) == [TraceRow(0.0, 10, 5), TraceRow(2.0, 1, 7)] and trace.failed == 1


@pytest.mark.parametrize("line", ["{}", "x", '{"StartTimeOffset": -1, "ContextTokens": 1, "GeneratedTokens": 1}'])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(Malformed, match="line 1"):
        list(Trace(path))


APEX = '{"StartTimeOffset": 0, "ContextTokens": 10, "GeneratedTokens": 5}\n'
TABLE = ",".join(COLUMNS) + "\n0,sim,10,5,15,Conversation log\n"


@pytest.mark.parametrize(("name", "text"), [("t.jsonl", APEX), ("t.csv", TABLE)])
def test_a_byte_order_mark_is_ignored_and_another_encoding_is_named(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert [row.prompt for row in Trace(path)] == [10]
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(Malformed, match="UTF-16"):
        list(Trace(path))
