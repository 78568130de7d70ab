"""Checks of the values of an answer: each takes what is right, and refuses each way to be wrong."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from answer_checks import (
    AnswerCheck,
    NoField,
    adds_up,
    best_first,
    columns_with_alternatives,
    counts_at_the_end,
    counts_its_tokens,
    fits,
    found_at,
    json_object,
    numbers_in_base64,
    of_length,
    of_schema,
    one_finish_reason,
    one_role,
    other_than,
    streams,
    tokens_with_alternatives,
)

COUNTED = of_schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})


def chunk(text: str = "", reason: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text, **delta}, "finish_reason": reason}]}


def rows(*counts: int) -> list[dict[str, Any]]:
    return [{"logprob": -1.0, "top_logprobs": [{"token": str(at)} for at in range(count)]} for count in counts]


def columns(*counts: int) -> dict[str, Any]:
    names = ("tokens", "token_logprobs", "text_offset")
    return {name: [0] * len(counts) for name in names} | {
        "top_logprobs": [{str(at): -1.0 for at in range(count)} for count in counts]
    }


def scores(*values: float) -> list[dict[str, Any]]:
    return [{"relevance_score": value} for value in values]


def usage(prompt: int, completion: int, total: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


COUNTS = {"choices": [], "usage": {"total_tokens": 3}}
CASES: tuple[tuple[AnswerCheck, Any, tuple[Any, ...]], ...] = (
    (adds_up, usage(3, 5, 8), (usage(3, 5, -2), usage(0, 5, 5), {"total_tokens": 8})),
    (adds_up, {"input_tokens": 3, "output_tokens": 5, "total_tokens": 8}, ({"input_tokens": 3, "total_tokens": 8},)),
    (counts_its_tokens, {"tokens": [7], "count": 1, "max_model_len": 9},
     ({"tokens": [7], "count": 2, "max_model_len": 9}, {"tokens": [], "count": 0, "max_model_len": 9},
      {"tokens": [7], "count": 1})),
    (best_first, scores(0.9, 0.1), (scores(0.1, 0.9), scores(0.9), scores(0.5, 0.5))),
    (json_object, '{"a": 1}', ("[1]", "{", "text {}", "")),
    (COUNTED, '{"n": 1}', ("{}", '{"n": "1"}', '{"n": 1')),
    (tokens_with_alternatives(2, 5), rows(5, 5), (rows(5), rows(5, 6), rows(5, 4), rows(5, 5, 5))),
    (tokens_with_alternatives(1, 2), rows(2), ([{"logprob": -1.0, "top_logprobs": [{"token": "a"}] * 2}],)),
    (columns_with_alternatives(2, 5), columns(5, 5), (columns(5), columns(5, 6), columns(4, 5))),
    (numbers_in_base64(2), base64.b64encode(b"12345678").decode(), ("AAAA", "?", [0.1, 0.2])),
    (of_length(2), [0, 0], ([0], [0, 0, 0], "ab")),
    (other_than("a"), "b", ("a", "")),
    (one_finish_reason, [chunk("a"), chunk(reason="stop"), COUNTS],
     ([chunk("a")], [chunk("a", "stop"), chunk(reason="stop")], [chunk("a", "stop"), chunk("b")])),
    (streams("ab"), [chunk("a"), chunk("b"), COUNTS], ([chunk("a")], [chunk("b"), chunk("a")])),
    (one_role, [chunk("a", role="assistant"), chunk("b")],
     ([chunk("a"), chunk("b")], [chunk("a", role="assistant")] * 2)),
    (counts_at_the_end, [chunk("a"), COUNTS],
     ([COUNTS, chunk("a")], [COUNTS, COUNTS], [chunk("a"), chunk("b") | {"usage": {"total_tokens": 3}}])),
)  # fmt: skip


@pytest.mark.parametrize(("check", "right", "wrong"), CASES)
def test_a_check_takes_what_is_right_alone(check: AnswerCheck, right: Any, wrong: tuple[Any, ...]) -> None:
    assert check(right)
    assert [each for each in (*wrong, None, 7, [None], {}) if check(each)] == []


def test_a_row_wants_nothing_or_a_type_or_a_value_or_a_check() -> None:
    document = json.loads('{"a": [{"b": "text", "empty": ""}]}')
    assert found_at(document, "a.0.b") == "text" and found_at(document, "") is document
    assert [found_at(document, path) for path in ("a.1.b", "a.x", "c", "a.0.b.c")] == [None] * 4
    assert fits(None, NoField) and not fits("", NoField)
    assert fits("text", str) and not fits("", str) and not fits(1, str) and fits("text", "text")
    assert fits("b", other_than("a")) and not fits("a", other_than("a"))
