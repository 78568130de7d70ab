"""The number of token ids in an answer of the tokenizer."""

from __future__ import annotations

import pytest

from api.openai.results import count_of
from workers.engines.task_answers import told_tokens


@pytest.mark.parametrize("ids", [[], [7], [1, 22, 333], list(range(1000))], ids=len)
def test_ids_are_counted_without_parsing_them(ids: list[int]) -> None:
    assert count_of(told_tokens(ids, 4096)) == len(ids)
