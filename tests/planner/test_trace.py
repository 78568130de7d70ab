"""Traces and workloads that are read, scaled and cut to a context; what a wrong file or name says."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from planner.facts.catalogue import PlanError, model
from planner.load import RequestLengths
from planner.search import requests
from planner.trace import COLUMNS, MAX_ROWS, Malformed, Trace, TraceRow, cut, mix_of, workload, workloads


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


def test_a_cut_is_scaled_and_clipped() -> None:
    found = list(cut([TraceRow(10.0, 100, 100)], scale=2, longest=120))
    assert found == [TraceRow(5.0, 20, 100)]


def test_json_lines_of_apex(tmp_path: Path) -> None:
    """Nanoseconds; a line without an answer is a failure."""
    path = tmp_path / "t.jsonl"
    lines = [(0, 10, 5), (1_500_000_000, 20, 0), (2_000_000_000, 0, 7)]
    path.write_text(
        "".join(f'{{"StartTimeOffset": {at}, "ContextTokens": {n}, "GeneratedTokens": {g}}}\n' for at, n, g in lines)
    )
    trace = Trace(path)
    assert list(trace) == [TraceRow(0.0, 10, 5), TraceRow(2.0, 1, 7)] and trace.failed == 1


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


BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_the_papers_lengths_and_counts() -> None:
    protocol = workload("sharegpt-512-256")
    assert (protocol.requests, protocol.lengths) == (500, RequestLengths(512, 256))
    sweep = [each.lengths for name, each in workloads().items() if name.startswith("outputs-")]
    assert [(each.prompt, each.answer) for each in sweep] == [(512, 32), (512, 64), (512, 128), (512, 256)]
    assert all(each.source for each in workloads().values())


@pytest.mark.parametrize(("name", "text"), [
    ("mix.csv", "prompt,answer\n100,10\n300,30\n"),
    ("trace.csv", f"{BURSTGPT}0,GPT-4,100,10,110,API log\n1,GPT-4,5,0,5,API log\n2,GPT-4,300,30,330,API log\n"),
    (
        "trace.jsonl",
        '{"StartTimeOffset":0,"ContextTokens":100,"GeneratedTokens":10}\n'
        '{"StartTimeOffset":1,"ContextTokens":300,"GeneratedTokens":30}\n',
    ),
])  # fmt: skip
def test_a_file_of_ones_own(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert workload(str(tmp_path / name)).lengths == RequestLengths(200, 20, ((100, 10), (300, 30)))


@pytest.mark.parametrize(("name", "text", "says"), [
    ("mix.csv", "prompt,answer\n100,-1\n", "line 2: a number is negative"),
    ("mix.csv", "prompt,answer\n100,ten\n", "line 2: .*ten"),
    ("mix.csv", "prompt,answer\n", "no request with an answer"),
    ("mix.csv", "a,b\n1,2\n", "no column 'Timestamp'"),
    ("mix.csv", "\x00\xff", "--workload"),
])  # fmt: skip
def test_a_wrong_file(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(PlanError, match=says):
        workload(str(tmp_path / name))


def test_an_unknown_name() -> None:
    with pytest.raises(PlanError, match="nearest are sharegpt-512-256"):
        workload("sharegpt-512")
    with pytest.raises(PlanError, match="no such file"):
        workload("lengths.csv")


def test_few_requests_stand_for_the_whole_mix() -> None:
    """Evenly over it, the same for the same seed; all of them, if as many are asked for."""
    mix = mix_of(((n, n) for n in range(1, 1001)), "it")
    drawn = mix.sample(10, Random(1))
    assert sorted(drawn) == [(n, n) for n in range(51, 1001, 100)] and drawn == mix.sample(10, Random(1))
    assert sorted(mix.sample(1000, Random(2))) == sorted(mix.mix) and len(mix.sample(2500, Random(3))) == 2500
    assert RequestLengths(5, 6).sample(2, Random(1)) == [(5, 6), (5, 6)]
    assert len(mix_of(((1, 1) for _ in range(MAX_ROWS + 5)), "it").mix) == MAX_ROWS


def test_a_simulation_serves_the_mix() -> None:
    mix = mix_of([(100, 10), (300, 30)], "it")
    assert sorted((text.prompt, text.output) for text in requests(mix, 4, 1.0)) == [(100, 10)] * 2 + [(300, 30)] * 2


def test_the_longest_request_must_fit() -> None:
    mix = mix_of([(100, 10), (3000, 30)], "it")
    assert (mix.longest, mix.longest_prompt, mix.whole) == (3030, 3000, 1570)
    mix.check(model("llama-3.1-8b"))
    with pytest.raises(PlanError, match=r"1 of the 2 requests are longer than the 2048 tokens"):
        mix.check(model("opt-13b"))
