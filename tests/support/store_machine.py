"""State machine that hypothesis runs on a real store, and the test that runs it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from redis import Redis

T = TypeVar("T")


class StoreMachine(RuleBasedStateMachine):
    """Each run begins with an empty store, and has an event loop of its own."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        with Redis.from_url(self.url) as client:
            client.flushall()
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)


def run_machine(machine: type[StoreMachine], redis_url: str, steps: int) -> None:
    """Try as many runs as PENSTOCK_EXAMPLES says, each of so many steps at most."""
    run_state_machine_as_test(
        type("Bound", (machine,), {"url": redis_url}),
        settings=settings(
            max_examples=int(os.environ.get("PENSTOCK_EXAMPLES", "60")),
            derandomize=settings.default.derandomize and "PENSTOCK_EXAMPLES" not in os.environ,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            # A failure is told as it was found: making it smaller takes minutes against a real server.
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
