"""A process's presence in the fleet: said every two seconds, taken back at the end, never in the way of its work."""

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
from streaming.fleet.processes import Fleet, Process, Role
from streaming.ids import new_life

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 2.0


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
    """Within the block the process is seen in the fleet as `describe` says; set the event to be seen anew at once."""
    process, changed = describe(), asyncio.Event()
    task = asyncio.create_task(_report(fleet, describe, changed))
    try:
        yield changed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(Unavailable):  # it will count as gone a little later
            await fleet.leave(process)


async def _report(fleet: Fleet, describe: Callable[[], Process], changed: asyncio.Event) -> None:
    outage = ExpectedErrors(Unavailable, log.warning, "not seen in the fleet until Redis answers: %s", once=True)
    while True:
        with outage:
            await fleet.report(describe())
        await wait(changed, REPORT_INTERVAL_S)
        changed.clear()
