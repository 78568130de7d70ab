"""Workloads: the papers' lengths exactly, the user's own from a file, and what a wrong file or name says."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from planner.facts.catalogue import PlanError, UnknownName, model
from planner.load import RequestLengths
from planner.search import requests
from planner.trace import MAX_ROWS, mix_of, workload, workloads

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
    with pytest.raises(UnknownName, match="nearest are sharegpt-512-256"):
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
