"""The peak of KV use, against counting it step by step."""

from __future__ import annotations

from random import Random

import pytest

from workers.gate import Holding, future_peak, worlds


def counted(texts: list[Holding]) -> int:
    """The peak as an engine would see it: every text grows by a token per step and is gone after its last one."""
    most = 0
    for step in range(max((remaining for remaining, _ in texts), default=-1) + 1):
        most = max(most, sum(held + step for remaining, held in texts if remaining >= step))
    return most


def a_batch(random: Random, *, least: int = 0) -> list[Holding]:
    return [(random.randint(0, 60), random.randint(1, 200)) for _ in range(random.randint(least, 12))]


def test_the_formula_equals_counting_on_a_thousand_random_batches() -> None:
    random = Random(20)
    batches = [a_batch(random) for _ in range(1000)]
    assert [future_peak(each) for each in batches] == [counted(each) for each in batches]
    assert sum(len(each) > 5 for each in batches) > 300  # it was no test of empty batches


def test_the_peak_is_of_texts_together_not_of_the_end() -> None:
    """The two short texts are gone when the long one is at its longest."""
    assert future_peak([(100, 10), (5, 50), (5, 50)]) == 125
    assert future_peak([(200, 10), (5, 50), (5, 50)]) == 210
    assert future_peak([]) == 0


@pytest.mark.parametrize(("texts", "count"), [(0, 5), (1, 5), (49, 5), (50, 5), (51, 4), (128, 2), (200, 2), (201, 1)])
def test_fewer_worlds_for_more_texts(texts: int, count: int) -> None:
    assert worlds(texts) == count
