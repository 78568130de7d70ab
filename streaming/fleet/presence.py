"""Heartbeat of a process: registers it in the fleet every two seconds, and removes it at its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable

from runtime.loops import ExpectedErrors, wait
from streaming.errors import Unavailable
from streaming.fleet.process import Process, Role
from streaming.fleet.processes import Fleet
from streaming.ids import new_life

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 2.0


def this_process(role: Role, process_id: str) -> Process:
    """Entry of this process in the fleet while it starts, with a new life."""
    return Process(
        role=role,
        id=process_id,
        life=new_life(),
        pid=os.getpid(),
        host=socket.gethostname(),
        state="starting",
        since=time.time(),
    )


@contextlib.asynccontextmanager
async def present(fleet: Fleet, describe: Callable[[], Process]) -> AsyncIterator[asyncio.Event]:
    """Register the process as `describe` returns it while the block runs; set the yielded event to report at once."""
    process, changed = describe(), asyncio.Event()
    task = asyncio.create_task(_report(fleet, describe, changed))
    try:
        yield changed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(Unavailable):  # its entry expires a little later
            await fleet.leave(process)


async def _report(fleet: Fleet, describe: Callable[[], Process], changed: asyncio.Event) -> None:
    outage = ExpectedErrors(Unavailable, log.warning, "not seen in the fleet until Redis answers: %s", once=True)
    while True:
        with outage:
            await fleet.report(describe())
        await wait(changed, HEARTBEAT_INTERVAL_S)
        changed.clear()
