"""What the machine itself does to an answer while a row runs: a bare server is asked all the time.

Where the machine stands still, as a shared one does, everything on it is late; only what is late beside this is ours.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.chaos.asks import Ask
from bench.chaos.http import Cut, fetch
from bench.chaos.processes import ManagedProcess, until
from bench.chaos.stage import FaultTestbed
from bench.ports import free_port

EVERY_S = 0.04
PASSES = 2
"""An answer of ours passes several processes, each of which may be made to wait; a bare one passes its server."""


@asynccontextmanager
async def yardstick(stage: FaultTestbed) -> AsyncIterator[list[float]]:
    """How long a bare server's answers took so far, asked at even intervals; milliseconds. Clear it to begin anew."""
    port, ask, took = free_port(), Ask("bare", 1), list[float]()
    child = ManagedProcess(
        "bare", [sys.executable, "-m", "bench.bare_server", str(port), "refuse"], dict(os.environ), stage.folder
    )

    async def answered() -> bool:
        began = time.monotonic()
        try:
            await fetch(port, "POST", ask.path, ask.body)
        except Cut:
            return False
        took.append(1000 * (time.monotonic() - began))
        return True

    async def go_on() -> None:
        async with asyncio.TaskGroup() as asking:
            while True:
                asking.create_task(answered())
                await asyncio.sleep(EVERY_S)

    await child.start()
    try:
        await until(answered, 10.0, 0.05)
        asked = asyncio.create_task(go_on())
        try:
            yield took
        finally:
            asked.cancel()
            await asyncio.wait([asked])
    finally:
        await child.end()
