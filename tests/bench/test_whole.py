"""Answers in one piece: what is asked for, what counts as whole, what is judged, and a short real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.report import load
from bench.whole.__main__ import AnswerSize, Came, fault_of, main, ratios_of, row_of
from bench.whole.control import CompletionAsk


@pytest.mark.parametrize(("choices", "prompts", "n"), [(1, 1, 1), (7, 1, 7), (16, 2, 8), (1024, 128, 8), (22, 11, 2)])
def test_choices_are_asked_for_within_what_one_prompt_may_have(choices: int, prompts: int, n: int) -> None:
    body = AnswerSize(choices, 4).body("bench", 3)
    asked = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    assert (len(asked), body["n"], body["max_tokens"]) == (prompts, n, 4) and len(set(asked)) == prompts
    assert len(CompletionAsk(body["prompt"], body["max_tokens"], body["n"]).prompts) == choices


def answer(*texts: str) -> dict[str, Any]:
    return {"choices": [{"index": at, "text": text} for at, text in enumerate(texts)]}


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (answer("a0 b1", "c0 d1"), ""),
        (answer("a0 b1"), "1 choices instead of 2"),
        ({"choices": answer("a0 b1", "c0 d1")["choices"][::-1]}, "out of order"),
        (answer("a0 b1", "c0"), "1 tokens instead of 2"),
        (answer("a0 b1", "c0 d0"), "'d0' where token 1 belongs"),
    ],
)
def test_an_answer_is_whole_with_every_token_of_every_choice(found: dict[str, Any], fault: str) -> None:
    said = fault_of(found, AnswerSize(2, 2))
    assert fault in said and bool(said) == bool(fault)


def came(behind_ms: float | None, wrong: str = "") -> Came:
    return Came(0.0, 8000.0, behind_ms, 0.2, wrong)


def judged(*found: Came, choices: int = 1) -> list[str]:
    return [ratio.verdict for ratio in ratios_of([row_of("penstock", AnswerSize(choices, 4000), found)])]


def test_the_longest_wait_of_one_long_text_is_judged_and_every_answer_must_come() -> None:
    row = row_of("penstock", AnswerSize(1, 4000), [came(3), came(60), came(5), came(None, "cut off")])
    assert (row["asked"], row["came"], row["timed"], row["behind_ms"], row["behind_max_ms"]) == (4, 3, 3, 5, 60)
    assert judged(came(49), came(50)) == ["reached", "reached"]
    assert judged(came(3), came(50.1)) == ["missed", "reached"]
    assert judged(came(3), came(None, "cut off")) == ["missed", "missed"]
    assert judged(came(None)) == ["missed", "reached"]  # it came, and nobody can say how late
    assert judged(came(3), *[came(None)] * 4) == ["missed", "reached"]  # nor of four of five
    assert judged(came(9000), choices=1024) == ["reached"]
    assert judged(came(None, "timed out"), choices=1024) == ["missed"]


@pytest.mark.slow
def test_a_short_run_against_real_processes(tmp_path: Path) -> None:
    """Whether it is in time depends on the machine; that all of it comes does not."""
    words = ["--tokens", "40", "--choices", "16", "--choice-tokens", "4", "--answers", "1", "--step-ms", "1"]
    main([*words, "--out", str(tmp_path)])
    found = load(tmp_path / "whole.json")
    assert [(row["system"], row["choices"], row["tokens"], row["came"]) for row in found.rows] == [
        ("control", 1, 40, 1),
        ("control", 16, 4, 1),
        ("penstock", 1, 40, 1),
        ("penstock", 16, 4, 1),
    ]
    for row in found.rows:
        assert -5 < row["behind_ms"] < row["spent_ms"]
