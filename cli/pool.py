"""Pool supervisor: keeps this machine's workers of one pool at its share of the leading scheduler's plan.

Several machines with the same settings may follow one plan: Redis gives each its share (streaming/lua/fleet.lua). Each
action is first recorded in Redis under the plan's epoch. If Redis refuses, because a newer leader exists, the action is
dropped: the newer leader's plan applies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from cli.supervisor import Child, ProcessLimits, Program, Supervisor
from penstock.text import counted
from streaming.errors import Unavailable
from streaming.fleet.plans import Action, ActionKind, Plan, Plans, pool_name
from streaming.fleet.processes import Fleet
from streaming.fleet.settings import ModelSettings
from streaming.jobs.reaper import Reaper

POLL_INTERVAL_S = 0.5

log = logging.getLogger(__name__)


class PoolSupervisor:
    """One pool on this machine. `program` builds the worker with a given id; `shape` is "" for a model's only pool."""

    def __init__(
        self,
        supervisor: Supervisor,
        model: str,
        settings: ModelSettings,
        program: Callable[[str], Program],
        shape: str = "",
    ) -> None:
        self._supervisor, self._program, self._resources = supervisor, program, settings.resources
        self.model, self.shape, self.least, self.most = model, shape, settings.min_workers, settings.most_workers

    @property
    def members(self) -> list[Child]:
        """Workers that are not stopping, oldest first."""
        return [child for child in self._workers() if not child.stopping]

    def fill(self) -> None:
        """Start workers up to the minimum."""
        for _ in range(self.least - len(self.members)):
            self._start(self._free_id())

    async def follow(self, plan: Plan, plans: Plans, by: str) -> None:
        """Start workers, or drain the newest ones; replace cordoned ones. `by`: unique name of this machine. Raises
        Unavailable."""
        for child in self.members:
            if child.status.state == "draining":  # the scheduler has cordoned it
                log.info("%s drains and is replaced: %s", child.program.id, child.status.detail)
                child.stop()
        members = self.members
        want = plan.pools.get(self.shape)
        if want is None:  # the plan is older than the model's shapes
            return
        total = min(max(want, self.least), self.most)
        pool = pool_name(self.model, self.shape)
        size = await plans.share(plan.epoch, pool, by, len(members), total)
        if size is None:
            return
        for _ in range(size - len(members)):
            name = self._free_id()
            if not await plans.act(plan.epoch, self._action("start", name, plan, by)):
                return
            self._start(name)
        for child in reversed(members[size:]):
            if not await plans.act(plan.epoch, self._action("drain", child.program.id, plan, by)):
                return
            child.stop()

    def _action(self, kind: ActionKind, worker: str, plan: Plan, by: str) -> Action:
        log.info("%s %s of %s (%s)", kind, worker, pool_name(self.model, self.shape), plan.reason)
        return Action(model=self.model, kind=kind, worker=worker, shape=self.shape, reason=plan.reason, by=by)

    def _start(self, name: str) -> None:
        program = self._program(name)
        bounds = ProcessLimits.of(self._resources, [child.program.bounds for child in self._supervisor.of("worker")])
        self._supervisor.start(replace(program, bounds=bounds))

    def _workers(self) -> list[Child]:
        return [child for child in self._supervisor.of("worker") if self._is_ours(child.program)]

    def _is_ours(self, program: Program) -> bool:
        return (program.model, program.shape) == (self.model, self.shape)

    def _free_id(self) -> str:
        names = (f"worker-{number}" for number in itertools.count(1))
        return next(name for name in names if name not in self._supervisor.children)


async def follow(pools: Sequence[PoolSupervisor], plans: Plans, by: str, on_store: Callable[[str], object]) -> None:
    """Keep every pool at the planned size. While Redis is unavailable, pools stay as they are.

    Args:
        on_store: told in each round why Redis is unavailable; "" while it is not.
    """
    async with contextlib.aclosing(plans.news(POLL_INTERVAL_S)) as news:
        async for _ in news:
            why = ""
            try:
                found = await plans.read()
                for pool in pools:
                    if (plan := found.get(pool.model)) and plan.pool == "local":
                        await pool.follow(plan, plans, by)
            except Unavailable as error:
                why = str(error)
                log.warning("the plan cannot be followed, the pools stay as they are: %s", error)
            on_store(why)


class LeaseRelease:
    """Gives up the lease of each worker of one supervisor that has exited.

    It knows a lease only from the lifeline of the process that held it: the lease of a stopped (SIGSTOP) worker, of a
    successor or of another machine's worker is never touched. If Redis does not answer, the lease lapses as usual.
    """

    def __init__(self, reaper: Reaper, fleet: Fleet) -> None:
        """`fleet`: an exited worker is removed from it, so that its slots and tokens count no longer."""
        self._reaper, self._fleet = reaper, fleet
        self._leases: dict[str, str] = {}
        """Lease of each running worker process, by the worker's id."""
        self._tasks: set[asyncio.Task[None]] = set()

    def noticed(self, child: Child) -> None:
        """Call this whenever the status of a worker has changed."""
        name, status = child.program.id, child.status
        if status.state == "ready":
            self._leases[name] = status.detail
        elif status.pid is None and (lease := self._leases.pop(name, "")):
            self._tasks.add(task := asyncio.create_task(self._release(name, lease, status.cause)))
            task.add_done_callback(self._tasks.discard)

    async def close(self, timeout_s: float) -> None:
        """Wait for the releases that have begun, at most `timeout_s`, and drop the others."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _release(self, worker: str, lease: str, cause: str) -> None:
        """End the lease, and log with which last words its worker left which jobs."""
        try:
            swept = await self._reaper.sweep(ended=lease)
        except Unavailable as error:
            log.warning("%s: its jobs wait until lease %s lapses: %s", worker, lease, error)
        else:
            own = f"{worker}@{socket.gethostname()}"  # other machines have workers of the same id
            held = [job_id for lapse in swept.lapses if lapse.worker == own for job_id in lapse.jobs]
            said = f"{worker} has exited{f' ({cause})' if cause else ''}"
            back, jobs = counted(swept.requeued, "job"), {"jobs": held} if held else {}
            log.info("%s: lease %s ends, %s back in the queue", said, lease, back, extra=jobs)
        with contextlib.suppress(Unavailable):  # its entry expires a little later
            await self._fleet.remove(lease)
