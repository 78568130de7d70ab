"""Collectives: closed forms, and the latency from which a star is faster than a ring."""

from __future__ import annotations

import pytest

from planner.roofline import (
    all_reduce_s,
    all_to_all_s,
    ring_all_reduce_s,
    send_s,
    star_all_reduce_s,
    streamed_layer_s,
)


def test_closed_forms() -> None:
    assert ring_all_reduce_s(8e6, 4, 1e9, 1e-3) == pytest.approx(2 * 3 / 4 * 8e6 / 1e9 + 6e-3)
    assert star_all_reduce_s(8e6, 4, 1e9, 1e-3) == pytest.approx(2 * (1e-3 + 4 * 8e6 / 1e9))
    assert all_to_all_s(8e6, 4, 1e9, 1e-3) == pytest.approx(3 / 4 * 8e6 / 1e9 + 1e-3)
    assert send_s(8e6, 1e9, 1e-3) == pytest.approx(9e-3)
    assert ring_all_reduce_s(8e6, 1, 1e9, 1) == star_all_reduce_s(8e6, 1, 1e9, 1) == all_to_all_s(8e6, 1, 1e9, 1) == 0


@pytest.mark.parametrize("devices", [3, 4, 8])
def test_ring_and_star_cross_at_the_closed_form(devices: int) -> None:
    """TPI-LLM: at the edge, latency decides."""
    hop = 1e6 * (devices / 1e9 - (devices - 1) / (devices * 1e9)) / (devices - 2)
    assert ring_all_reduce_s(1e6, devices, 1e9, hop) == pytest.approx(star_all_reduce_s(1e6, devices, 1e9, hop))
    slow, fast = 1.1 * hop, 0.9 * hop
    assert all_reduce_s(1e6, devices, 1e9, slow) == star_all_reduce_s(1e6, devices, 1e9, slow)
    assert all_reduce_s(1e6, devices, 1e9, fast) == ring_all_reduce_s(1e6, devices, 1e9, fast)


def test_a_hub_that_is_fast_enough_always_wins() -> None:
    assert star_all_reduce_s(1e6, 4, 1e12, 0.0) < ring_all_reduce_s(1e6, 4, 1e9, 0.0)


def test_a_streamed_layer_waits_for_its_disk() -> None:
    assert streamed_layer_s(0.010, 100e6, 2e9) == 0.050
    assert streamed_layer_s(0.010, 1e6, 2e9) == 0.010
