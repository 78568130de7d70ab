"""Registry of running processes, which report every two seconds; also model cards and console logins.

No guarantee depends on it: operators, the scheduler and the supervisor read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.engine import ModelCard
from penstock.loops import ExpectedErrors, coalesced, wait
from penstock.process import LIFE
from streaming.errors import Unavailable
from streaming.fleet.plans import entries, entry, hash_of
from streaming.fleet.process import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S, Process, Role
from streaming.ids import new_life
from streaming.keys import FLEET_SLOT, fleet_key
from streaming.redis.client import ClientUser, Query

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
        listed = ("ZREM", FLEET_SLOT, (fleet_key("procs"), name))
        await self._client.calls([("DEL", FLEET_SLOT, (fleet_key("proc", name),)), listed])

    async def remove(self, lease: str) -> None:
        """Remove the worker that held this lease, whose process has exited without a word."""
        for process in await self.processes("worker"):
            if process.lease == lease:
                await self.leave(process)

    async def processes(self, role: Role | None = None) -> list[Process]:
        """List the processes with a heartbeat in the last HEARTBEAT_TIMEOUT_S seconds, by role, name and host."""
        return await self._client.ask(processes_of(role))

    async def publish_card(self, card: ModelCard) -> None:
        """Store the card that a worker made when it loaded a model; keeps the time of the first load."""
        known = (await self.cards()).get(card.name)
        kept = card if known is None else msgspec.structs.replace(card, created=known.created)
        await self._client.call("card", FLEET_SLOT, card.name, msgspec.json.encode(kept))

    async def cards(self) -> dict[str, ModelCard]:
        """Read the cards, by name, of every model that was ever loaded."""
        return await self._client.ask(CARDS)


CARDS = hash_of("card", ModelCard)
"""The cards, by name, of every model that was ever loaded."""


def processes_of(role: Role | None = None) -> Query[list[Process]]:
    """List the processes with a heartbeat in the last HEARTBEAT_TIMEOUT_S seconds, by role, name and host."""

    def parse(answers: list[Any]) -> list[Process]:
        found = [each for each in entries(answers[0], Process).values() if role in (None, each.role)]
        return sorted(found, key=lambda each: (each.role, each.id, each.host, each.since, each.life))

    return Query([("processes", FLEET_SLOT, ())], parse)


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
async def present(
    fleet: Fleet, describe: Callable[[], Process], entered: asyncio.Event | None = None
) -> AsyncIterator[asyncio.Event]:
    """Register the process as `describe` returns it while the block runs; set the yielded event to report at once.

    Args:
        entered: StoreMonitor.entered. Nothing is written before it is set: others would take what a process wrote to a
            new store for that of an earlier version. None: the store was entered.
    """
    process, changed = describe(), asyncio.Event()
    task = asyncio.create_task(_report(fleet, describe, changed, entered))
    try:
        yield changed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(Unavailable):  # its entry expires a little later
            await fleet.leave(process)


async def _report(
    fleet: Fleet, describe: Callable[[], Process], changed: asyncio.Event, entered: asyncio.Event | None
) -> None:
    if entered is not None:
        await entered.wait()
    outage = ExpectedErrors(Unavailable, log.warning, "not seen in the fleet until Redis answers: %s", once=True)
    while True:
        with outage:
            await fleet.report(describe())
        await wait(changed, coalesced(HEARTBEAT_INTERVAL_S))
        changed.clear()


LINK_S = 3600
"""Seconds for which a link can be opened: long enough to read what `up` printed, or to forward a port."""
SESSION_S = 12 * 3600
"""Seconds for which a session lasts, whether it is used or not."""


LoginKind: TypeAlias = Literal["session", "link"]


class ConsoleLogin(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a session or link is."""

    by: str
    """Name of the admin key; "" for the admin token."""
    seal: str
    """Proves that the holder of that key has logged in (`Keyring.seal`)."""


class ConsoleSessions(ClientUser):
    """Sessions and links in the store. Every method raises Unavailable.

    A browser or a terminal holds the secret; the store holds only its digest, so nobody can log in with what they read
    there. What the store says is not trusted either: the record carries a seal that only the holder of the key can have
    made (api/auth/keys.py).
    """

    async def keep(self, kind: LoginKind, secret: str, login: ConsoleLogin) -> None:
        """Keep a session for SESSION_S, or a link for LINK_S."""
        life_s = LINK_S if kind == "link" else SESSION_S
        args = (_digest(kind, secret), msgspec.json.encode(login), 1000 * life_s)
        await self._client.call("console", FLEET_SLOT, *args)

    async def find(self, secret: str) -> ConsoleLogin | None:
        """Return whose session this is; None if there is none, or if it is over."""
        key = fleet_key("console", _digest("session", secret))
        return _login(await self._client.call("GET", FLEET_SLOT, key))

    async def take(self, kind: LoginKind, secret: str) -> ConsoleLogin | None:
        """End a session, or use up a link; None if there is none, or if it is over."""
        key = fleet_key("console", _digest(kind, secret))
        data, was_there = await self._client.calls([("GET", FLEET_SLOT, (key,)), ("DEL", FLEET_SLOT, (key,))])
        return _login(data) if was_there else None  # else somebody has taken it since it was read


def _digest(kind: LoginKind, secret: str) -> str:
    return hashlib.sha256(f"{kind}:{secret}".encode()).hexdigest()


def _login(data: bytes | None) -> ConsoleLogin | None:
    return None if data is None else entry("a session of the console", data, ConsoleLogin)
