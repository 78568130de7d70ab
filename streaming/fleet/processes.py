"""Registry of running processes, each of which reports itself every two seconds, and of model cards.

No guarantee depends on it: operators, the scheduler and the supervisor read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import msgspec

from penstock.engine import ModelCard
from penstock.loops import ExpectedErrors, wait
from penstock.process import LIFE
from streaming.errors import Unavailable
from streaming.fleet.entries import entry, read_hash
from streaming.fleet.process import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S, Process, Role
from streaming.ids import new_life
from streaming.keys import FLEET_SLOT, fleet_key
from streaming.redis.client import ClientUser
from streaming.redis.failures import translated

log = logging.getLogger(__name__)


class Fleet(ClientUser):
    """The registry in the store. Every method raises Unavailable."""

    async def report(self, process: Process) -> None:
        """Heartbeat: store the process's description for HEARTBEAT_TIMEOUT_S seconds."""
        await self._client.call(
            "report", FLEET_SLOT, _key_name(process), msgspec.json.encode(process), HEARTBEAT_TIMEOUT_S
        )

    async def leave(self, process: Process) -> None:
        """Remove the process."""
        name = _key_name(process)
        with translated():
            pipeline = self._client.redis.pipeline(transaction=False)
            pipeline.delete(fleet_key("proc", name))
            pipeline.zrem(fleet_key("procs"), name)
            await pipeline.execute()

    async def remove(self, lease: str) -> None:
        """Remove the worker that held this lease, whose process has exited without a word."""
        for process in await self.processes("worker"):
            if process.lease == lease:
                await self.leave(process)

    async def processes(self, role: Role | None = None) -> list[Process]:
        """List the processes with a heartbeat in the last HEARTBEAT_TIMEOUT_S seconds, by role, name and host."""
        with translated():
            names = await cast(Awaitable[list[bytes]], self._client.redis.zrange(fleet_key("procs"), 0, -1))
            if not names:
                return []
            values = await cast(
                Awaitable[list[bytes | None]],
                self._client.redis.mget([fleet_key("proc", name.decode(errors="replace")) for name in names]),
            )
        pairs = zip(names, values, strict=True)
        found = [entry(str(name), value, Process) for name, value in pairs if value is not None]
        return sorted(
            (p for p in found if p and role in (None, p.role)), key=lambda p: (p.role, p.id, p.host, p.since, p.life)
        )

    async def publish_card(self, card: ModelCard) -> None:
        """Store the card that a worker made when it loaded a model; keeps the time of the first load."""
        known = (await self.cards()).get(card.name)
        kept = card if known is None else msgspec.structs.replace(card, created=known.created)
        await self._client.call("card", FLEET_SLOT, card.name, msgspec.json.encode(kept))

    async def cards(self) -> dict[str, ModelCard]:
        """Read the cards, by name, of every model that was ever loaded."""
        return await read_hash(self._client, "card", ModelCard)


def _key_name(process: Process) -> str:
    return f"{process.role}:{process.life}"


def this_process(role: Role, process_id: str) -> Process:
    """Entry of this process in the fleet while it starts, with the life that its supervisor chose, or a new one."""
    return Process(
        role=role,
        id=process_id,
        life=os.environ.pop(LIFE, "") or new_life(),
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
