"""Lease release: ends the lease of each worker process of this machine that has exited, so that its jobs need not wait
until it lapses.

It knows a lease only from the lifeline of the process that held it, and acts only once that process has exited: the
lease of a stopped (SIGSTOP) worker, of a successor or of another machine's worker is never touched. If Redis does not
answer, the lease lapses as it would without this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import TypeAlias

from cli.child import Child, Status
from penstock.text import counted
from streaming.errors import Unavailable
from streaming.fleet.processes import Fleet
from streaming.jobs.reaper import Lapse, Reaper

log = logging.getLogger(__name__)

OnReleased: TypeAlias = Callable[[Child, Sequence[Lapse]], None]


class LeaseRelease:
    """Watches the workers of one supervisor."""

    def __init__(self, reaper: Reaper, on_released: OnReleased = lambda *_: None, fleet: Fleet | None = None) -> None:
        """`on_released`: told what became of the jobs of an exited worker, by partition; nothing if Redis does not
        answer or the lease had lapsed. `fleet`: an exited worker is removed from it, so that its slots and tokens count
        no longer."""
        self._reaper, self._on_released, self._fleet = reaper, on_released, fleet
        self._leases: dict[str, str] = {}
        """Lease of each running worker process, by the worker's id."""
        self._tasks: set[asyncio.Task[None]] = set()

    def noticed(self, child: Child) -> bool:
        """Call this whenever the status of a worker has changed. Returns whether `on_released` follows."""
        name, status = child.program.id, child.status
        if status.state == "ready":
            self._leases[name] = status.detail
        elif status.pid is None and (lease := self._leases.pop(name, "")):
            task = asyncio.create_task(self._release(child, lease, status))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return True
        return False

    async def close(self, timeout_s: float) -> None:
        """Wait for the releases that have begun, at most `timeout_s`, and drop the others."""
        tasks = set(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _release(self, child: Child, lease: str, status: Status) -> None:
        """End the lease, and log with which last words its worker left which jobs."""
        worker, lapses = child.program.id, list[Lapse]()
        try:
            swept = await self._reaper.sweep(ended=lease)
        except Unavailable as error:
            log.warning("%s: its jobs wait until lease %s lapses: %s", worker, lease, error)
        else:
            own = f"{worker}@{socket.gethostname()}"  # other machines have workers of the same id
            lapses = [lapse for lapse in swept.lapses if lapse.worker == own]
            words = status.cause.partition(", running only ")[0]
            said = f"{worker} has exited{f' ({words})' if words else ''}"
            held = [job_id for lapse in lapses for job_id in lapse.jobs]
            back, jobs = counted(swept.requeued, "job"), {"jobs": held} if held else {}
            log.info("%s: lease %s ends, %s back in the queue", said, lease, back, extra=jobs)
        self._on_released(child, lapses)
        if self._fleet is not None:
            with contextlib.suppress(Unavailable):  # its entry expires a little later
                await self._fleet.remove(lease)
