"""A word in the log when the event loop was held up: the cause of every stall that nothing else explains."""

from __future__ import annotations

import asyncio
import logging

log = logging.getLogger(__name__)

EVERY_S = 0.5
TOLD_S = 1.0
"""Being later than this is said; less happens on a busy machine."""


async def watch_lag() -> None:
    """Look for ever at how late the loop wakes what it should."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + EVERY_S
        await asyncio.sleep(EVERY_S)
        if (late := loop.time() - due) > TOLD_S:
            log.warning("the event loop was held up for %.1f s", late)
