"""Lease release: ends the lease of each worker process of this machine that has exited, so that its jobs need not wait
until it lapses.

It knows a lease only from the lifeline of the process that held it, and acts only once that process has exited: the
lease of a stopped (SIGSTOP) worker, of a successor or of another machine's worker is never touched. If Redis does not
answer, the lease lapses as it would without this.
"""

from __future__ import annotations

import asyncio
import logging

from cli.child import Child
from runtime.plurals import counted
from streaming.errors import Unavailable
from streaming.jobs.reaper import Reaper

log = logging.getLogger(__name__)


class LeaseRelease:
    """Watches the workers of one supervisor."""

    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper
        self._leases: dict[str, str] = {}
        """Lease of each running worker process, by the worker's id."""
        self._tasks: set[asyncio.Task[None]] = set()

    def noticed(self, child: Child) -> None:
        """Call this whenever the status of a worker has changed."""
        name, status = child.program.id, child.status
        if status.state == "ready":
            self._leases[name] = status.detail
        elif status.pid is None and (lease := self._leases.pop(name, "")):
            task = asyncio.create_task(self._release(name, lease, status.cause))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self, timeout_s: float) -> None:
        """Wait for the releases that have begun, at most `timeout_s`, and drop the others."""
        tasks = set(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _release(self, worker: str, lease: str, cause: str) -> None:
        """End the lease, and log with which last words its worker left which jobs."""
        try:
            swept = await self._reaper.sweep(ended=lease)
        except Unavailable as error:
            log.warning("%s: its jobs wait until lease %s lapses: %s", worker, lease, error)
        else:
            words = cause.partition(", running only ")[0]
            said = f"{worker} has exited{f' ({words})' if words else ''}"
            jobs = {"jobs": list(swept.jobs)} if swept.jobs else {}
            log.info("%s: lease %s ends, %s back in the queue", said, lease, counted(swept.requeued, "job"), extra=jobs)
