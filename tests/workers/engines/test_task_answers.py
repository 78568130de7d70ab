"""Answers to tasks: what an engine gives reads as it was, and what no reader could use fails its job alone."""

from __future__ import annotations

import base64
import math
from array import array

import pytest

from penstock.engine import Input, Task, TaskKind
from workers.engines.task_answers import check_task_answer, joined_vectors, reported_scores, reported_tokens

INPUTS: tuple[Input, ...] = ("a", (1, 2))


def encoded(*numbers: float) -> str:
    return base64.b64encode(array("f", numbers).tobytes()).decode()


def check(kind: TaskKind, text: str, dimensions: int | None = None) -> None:
    check_task_answer(Task(kind=kind, dimensions=dimensions), INPUTS, text)


def test_what_an_engine_gives_is_taken() -> None:
    """Vectors of any numbers; the score of each document; ids; any text."""
    assert joined_vectors([[1.0, -2.5], (0.5, 3)]) == f"{encoded(1, -2.5)},{encoded(0.5, 3)}"
    check("embed", joined_vectors([[1.0, -2.5], [0.5, 3.0]]))
    check("embed", joined_vectors([array("f", [1.0]), array("f", [2.0])]), dimensions=1)
    check("rerank", reported_scores([0.5]))
    check("tokenize", reported_tokens([], 5))
    check("tokenize", reported_tokens([7, 2**31 - 1], 4096))
    check("detokenize", "")


@pytest.mark.parametrize(("kind", "text", "words"), [
    ("embed", "", "1 vectors for 2 inputs"),
    ("embed", encoded(1), "1 vectors for 2"),
    ("embed", f"{encoded(1)},{encoded(2)},{encoded(3)}", "3 vectors for 2"),
    ("embed", f"{encoded(1)},{encoded(1, 2)}", "vectors of"),
    ("embed", ",", "vectors of"),
    ("embed", f"{encoded(1)},{encoded(math.nan)}", "contains NaN or infinity"),
    ("embed", f"{encoded(1, 1)},{encoded(math.inf, -math.inf)}", "contains NaN or infinity"),
    ("embed", f"{encoded(1)},%%%%", None),
    ("embed", f"{encoded(1)},{base64.b64encode(b'abc').decode()}", None),
    ("rerank", "[]", "0 scores for 1"),
    ("rerank", "[1, 2]", "2 scores for 1"),
    ("rerank", "{}", None),
    ("rerank", "1", None),
    ("tokenize", "[1]", None),
    ("tokenize", '{"tokens": ["a"], "max_model_len": 1}', None),
    ("tokenize", '{"tokens": [1]}', None),
])  # fmt: skip
def test_what_no_reader_could_use_is_refused(kind: TaskKind, text: str, words: str | None) -> None:
    with pytest.raises(ValueError, match=words):
        check(kind, text)


def test_vectors_of_another_length_than_asked_for_are_refused() -> None:
    with pytest.raises(ValueError, match="vectors of"):
        check("embed", joined_vectors([[1.0], [2.0]]), dimensions=2)
