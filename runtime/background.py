"""Work beside the requests that must not end before its process does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


async def keep_going(work: Callable[[], Awaitable[None]], pause_s: float) -> None:
    """Do `work` until it returns; begin it again, after a pause, whenever it breaks.

    What it expects it handles itself. This is for what nobody expected: without the work, readers would wait for ever
    and nobody would say a word.
    """
    while True:
        try:
            return await work()
        except Exception:  # the boundary of a task: told in full, and tried again
            log.exception("%s broke and is begun again", getattr(work, "__qualname__", work))
            await asyncio.sleep(pause_s)
