"""The requests of a replay: lengths by Zipf's law, and the same load for the same seed."""

from __future__ import annotations

from statistics import fmean

import pytest

from bench.order.arrivals import requests


def test_lengths_are_zipfs_and_the_same_seed_is_the_same_load() -> None:
    """The first rank twice as often as the second, and none beyond the cap."""
    found = list(requests(40.0, 1.5, seed=1, seconds=5000))
    drawn = [each.answer for each in found]
    assert drawn.count(6) / drawn.count(12) == pytest.approx(2, rel=0.05)
    assert max(drawn) == 6 * 256 and fmean(drawn) == pytest.approx(
        6 * 256 / sum(1 / n for n in range(1, 257)), rel=0.02
    )
    assert sum(each.lane == "standard" for each in found) == pytest.approx(0.3 * len(found), rel=0.05)
    again, other = (list(requests(40.0, 1.5, seed, 100)) for seed in (1, 2))
    assert again == found[: len(again)] != other
