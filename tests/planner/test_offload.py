"""Offloading: formulas and their limits."""

from __future__ import annotations

import pytest

from planner.facts.catalogue import device, model
from planner.load import PlanInput
from planner.memory import attention_offloaded, streamed_step_s
from planner.roofline import decode

GIVEN = PlanInput(model("opt-13b"), device("h200"))


def test_with_a_free_link_the_step_is_the_sum_of_two_rooflines() -> None:
    found = attention_offloaded(GIVEN, device("l4"), 4, 1e30)
    parts = decode(GIVEN, found.batch, 640).parts
    rest = sum(part.seconds for part in parts if part.name != "attention")
    reads = found.batch * 640 * 819_200 / (4 * 300e9)
    hops = 40 * device("h200").hop_s
    assert found.seconds == pytest.approx(rest + reads + hops)


def test_the_batch_is_what_the_memory_devices_hold() -> None:
    one, four = (attention_offloaded(GIVEN, device("l4"), count, 25e9) for count in (1, 4))
    assert one.batch == int(0.9 * 24e9 / (640 * 819_200)) and four.batch >= 4 * one.batch
    assert four.link_s > one.link_s
    assert four.tokens_s == pytest.approx(four.batch / four.seconds)


def test_a_slow_disk_is_the_step() -> None:
    weights = 2 * model("opt-13b").weights
    assert streamed_step_s(GIVEN, 1, 640, 3e9) == pytest.approx(weights / 3e9)
    assert streamed_step_s(GIVEN, 1, 640, 1e15) == pytest.approx(decode(GIVEN, 1, 640).seconds)
