"""Event-loop lag monitor: logs a warning when the loop was blocked, which explains otherwise unexplained stalls."""

from __future__ import annotations

import asyncio
import logging

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
MIN_LOGGED_S = 1.0
"""A shorter lag is normal on a busy machine and is not logged."""


async def watch_lag() -> None:
    """Measure the loop's lag until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + CHECK_INTERVAL_S
        await asyncio.sleep(CHECK_INTERVAL_S)
        if (late := loop.time() - due) > MIN_LOGGED_S:
            log.warning("the event loop was held up for %.1f s", late)
