"""Waking at a moment: never before it, soon after it, wherever the machine has timers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from house import eventually

from workers.engines.sim.alarm import Alarm

LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)


def lateness_ms(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> list[float]:
    """Of twenty wakings, sorted."""

    async def wake() -> list[float]:
        loop, late = asyncio.get_running_loop(), []
        with Alarm() as alarm:
            for _ in range(20):
                moment = loop.time() + 0.0043
                await alarm.sleep_until(moment)
                late.append(1e3 * (loop.time() - moment))
        return sorted(late)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(wake())


@pytest.mark.parametrize("new_loop", LOOPS)
def test_it_wakes_at_its_moment_and_never_before(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    slack_ms = 1.0 if new_loop is uvloop.new_event_loop else 0.001  # uvloop's clock counts whole milliseconds
    assert lateness_ms(new_loop)[0] >= -slack_ms
    eventually(lambda: lateness_ms(new_loop)[10] < 1.0)


def test_where_there_is_no_timerfd_it_still_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "plan9")
    assert lateness_ms(asyncio.new_event_loop)[0] >= -0.001


async def test_a_moment_that_is_past_lets_others_run() -> None:
    ran = []
    asyncio.get_running_loop().call_soon(ran.append, True)
    with Alarm() as alarm:
        await alarm.sleep_until(0.0)
    assert ran


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
async def test_it_leaves_no_descriptor() -> None:
    before = descriptors()
    with Alarm() as alarm:
        await alarm.sleep_until(asyncio.get_running_loop().time() + 0.001)
        assert descriptors() == before + 1
    assert descriptors() == before
