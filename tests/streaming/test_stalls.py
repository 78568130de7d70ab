"""Stalls: the states in which no worker may ever run a model's jobs, and those that only take a while."""

from __future__ import annotations

from typing import Any

import pytest

from streaming.fleet.plans import Override, Plan, stall_of
from streaming.fleet.process import Cordoned, Process
from streaming.fleet.settings import ModelSettings

ELASTIC = ModelSettings(engine="sim", min_workers=0, max_workers=2)
ZERO = Override(want=0, by="ops")
PAUSED = Override(by="ops")


def worker(state: str, model: str = "m") -> Process:
    return Process(role="worker", id="w", life="l", pid=1, host="h", state=state, since=0.0, model=model, lease="x")


def plan(**more: Any) -> Plan:
    return Plan(**{"model": "m", "want": 0, "reason": "", **more})


@pytest.mark.parametrize(
    ("known", "stalled"),
    [
        ({}, False),
        ({"is_led": False}, True),
        ({"is_led": False, "workers": [worker("ready")]}, False),
        ({"is_led": False, "workers": [worker("starting")]}, False),
        ({"is_led": False, "workers": [worker("ready", "another")]}, True),
        ({"is_led": False, "workers": [worker("draining")]}, True),
        ({"workers": [worker("drained")]}, False),
        ({"is_led": False, "workers": [worker("ready")], "plan": plan(cordon=(Cordoned("x", "slow"),))}, True),
        ({"override": ZERO}, True),
        ({"override": ZERO, "workers": [worker("ready")]}, False),
        ({"override": ZERO, "settings": ModelSettings(engine="sim")}, False),
        ({"override": PAUSED, "plan": plan()}, True),
        ({"override": PAUSED, "plan": plan(want=1)}, False),
        ({"override": Override(want=2, by="ops")}, False),
        ({"plan": plan(want=1, pool="dry-run")}, True),
        ({"settings": ModelSettings(engine="sim", min_workers=0, max_workers=0)}, True),
    ],
)
def test_what_stalls_a_model(known: dict[str, Any], stalled: bool) -> None:
    about = {"settings": ELASTIC, "workers": [], "plan": plan(), "override": None, "is_led": True} | known
    found = stall_of("m", **about)
    assert (found is not None) == stalled
    assert found is None or (found.cause and found.fix)
