"""A held-up event loop is told."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.loops import LAG_CHECK_INTERVAL_S, MIN_LOGGED_LAG_S, watch_lag


async def test_a_held_up_loop_is_said_and_a_free_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    """A synchronous sleep is the worst thing a coroutine can do."""
    watching = asyncio.create_task(watch_lag())
    await asyncio.sleep(LAG_CHECK_INTERVAL_S / 2)
    time.sleep(LAG_CHECK_INTERVAL_S + MIN_LOGGED_LAG_S + 0.2)
    deadline = time.monotonic() + 10
    while "held up" not in caplog.text and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    watching.cancel()
    assert "held up" in caplog.text
