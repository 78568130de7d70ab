"""How many workers each model should have, and why: published by the scheduler that leads, followed by the pools.

Both sides are fenced. A plan is taken only from whoever leads at that moment, and a pool notes what it is about to do
under the plan's epoch: when another leader has come since, it is refused and nothing is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import msgspec

from runtime.loops import ExpectedErrors, run_periodically, wait
from streaming.errors import Unavailable
from streaming.fleet.entries import entries, entry
from streaming.fleet.leader import Lead
from streaming.keys import FLEET_SLOT, channel, fleet_key
from streaming.redis.client import RedisClient
from streaming.redis.failures import translated

SHARE_S = 10
"""A machine that has not asked for its share of a pool for so long counts as gone."""

PoolKind: TypeAlias = Literal["local", "kubernetes", "dry-run"]
"""Who makes a plan come true: the supervisors of each machine, a cluster's controllers, or nobody."""


class Cordoned(msgspec.Struct, frozen=True, array_like=True):
    """A worker, by its lease, that is to finish what it has and be replaced."""

    worker: str
    reason: str


class Prospect(msgspec.Struct, frozen=True, array_like=True):
    """What a job that is put into a lane now may expect."""

    wait_s: float | None
    """Until it is begun; None: nobody will begin it."""
    each_s: float = 0.0
    """More for each further job before it."""
    waiting: int = 0
    """Jobs that were in the lane when this was decided."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many workers a model should have, and why."""

    model: str
    want: int
    """Without those that are cordoned; of all shapes together."""
    reason: str
    epoch: int = 0
    """Of the leader that published it."""
    at_ms: int = 0
    """Redis time of what it was decided on."""
    pool: PoolKind = "local"
    cordon: tuple[Cordoned, ...] = ()
    leaving: tuple[str, ...] = ()
    """What its workers live in, where pools have names for that (pods): chosen to go, and still there."""
    lanes: dict[str, Prospect] = {}
    wake_s: float = 0.0
    """Until the first worker is there; 0 when one is."""
    cold_start_s: float = 0.0
    """From ordering a worker to having it."""
    shapes: dict[str, int] = {}
    """Workers wanted of each shape, where the model has several."""
    shape: str = ""
    """The shape its load calls for."""
    takes: tuple[str, ...] = ()
    """The shapes that take new jobs: that one, as soon as it can."""

    @property
    def pools(self) -> dict[str, int]:
        """Workers wanted of each of its pools; a model of one pool is under ""."""
        return self.shapes or {"": self.want}


ActionKind: TypeAlias = Literal[
    "lead", "up", "down", "switch", "cordon", "start", "drain", "scale", "remove", "set", "pause", "resume"
]
"""What a leader decides, what a pool does, what people decide."""


class Action(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that was decided, or done to a pool."""

    model: str
    kind: ActionKind
    reason: str
    by: str
    """The scheduler, the machine, or the API key."""
    want: int | None = None
    was: int | None = None
    worker: str = ""
    shape: str = ""
    """Of which pool, where the model has several."""


@dataclass(frozen=True, slots=True)
class Noted:
    """An action with the place it has among the others."""

    action: Action
    at_ms: int
    epoch: int


class Plans:
    """Stateless; many may share a wire. Every method raises Unavailable."""

    def __init__(self, wire: RedisClient) -> None:
        self._wire = wire

    async def publish(
        self,
        lead: Lead,
        plans: Iterable[Plan],
        actions: Iterable[Action] = (),
        cold: Mapping[str, float] | None = None,
        holds: Mapping[str, int] | None = None,
    ) -> bool:
        """Write what the leader has decided and tell whom it concerns, in one step; cordoned workers are told each
        time. `cold`: cold starts in seconds, by model or `pool_name`; `holds`: milliseconds for which a worker, by its
        lease, is to leave new jobs to others. False: another leads now, and nothing was done."""
        rows: list[str] = []
        for plan in plans:
            rows += ["plan", plan.model, _text(plan)]
            for cordoned in plan.cordon if plan.pool != "dry-run" else ():
                rows += ["cordon", cordoned.worker, cordoned.reason]
        for model, seconds in (cold or {}).items():
            rows += ["cold", model, f"{seconds:.3f}"]
        for worker, hold_ms in (holds or {}).items():
            rows += ["hold", worker, str(hold_ms)]
        for action in actions:
            rows += ["act", action.model, _text(action)]
        return bool(await self._wire.call("plan", FLEET_SLOT, lead.holder, lead.epoch, *rows))

    async def act(self, epoch: int, action: Action) -> bool:
        """To be asked before anything is done for a plan of this epoch. False: another leads now, do not."""
        return bool(await self._wire.call("act", FLEET_SLOT, epoch, action.model, _text(action)))

    async def share(self, epoch: int, pool: str, machine: str, has: int, want: int) -> int | None:
        """How many of the `want` workers of a pool this machine is to have; it asks again at least every SHARE_S.
        None: another leads now, do nothing."""
        args = (epoch, pool, machine, has, want, 1000 * SHARE_S)
        share = await self._wire.call("share", FLEET_SLOT, *args)
        return None if share < 0 else int(share)

    async def read(self) -> dict[str, Plan]:
        """Plans by model."""
        return entries(await self._hash("plan"), Plan)

    async def cold_starts(self) -> dict[str, float]:
        """Seconds from ordering a worker to having it, as last measured, by `pool_name`."""
        return entries(await self._hash("cold"), float)

    async def actions(self, count: int) -> list[Noted]:
        """The newest first."""
        with translated():
            rows: Any = await self._wire.redis.xrevrange(fleet_key("actions"), count=count)
        return [noted for name, fields in rows if (noted := _noted(name, fields))]

    async def news(self, every_s: float) -> AsyncGenerator[None]:
        """When to read the plans: now, whenever one has changed, and every `every_s` whatever is heard. Ends never."""
        changed = asyncio.Event()
        hearing = asyncio.create_task(self._hear(changed, every_s))
        try:
            while True:
                changed.clear()
                yield
                await wait(changed, every_s)
        finally:
            hearing.cancel()

    async def _hear(self, changed: asyncio.Event, again_s: float) -> None:
        async def listen() -> None:
            async for _ in told(self._wire, "pools", "plan"):
                changed.set()

        await run_periodically(listen, again_s, ExpectedErrors(Unavailable))

    async def woken(self) -> AsyncIterator[None]:
        """Whenever a scheduler should look at once, or may have missed that. Ends never."""
        async for _ in told(self._wire, "scheduler", "wake"):
            yield

    async def _hash(self, name: str) -> dict[str, bytes]:
        with translated():
            raw = await cast(Awaitable[dict[Any, Any]], self._wire.redis.hgetall(fleet_key(name)))
        return {key.decode(errors="replace"): value for key, value in raw.items()}


def pool_name(model: str, shape: str) -> str:
    """One of a model's pools, where one word names it; no model's name has a #."""
    return f"{model}#{shape}" if shape else model


async def told(wire: RedisClient, kind: str, name: str) -> AsyncIterator[None]:
    """Every message of a channel, and each time it is listened to anew. Ends never; raises Unavailable."""
    async with wire.subscribe(channel(kind, name)) as subscription:
        yield
        while True:
            await subscription.message()
            yield


def _noted(name: bytes, fields: Mapping[bytes, bytes]) -> Noted | None:
    """None for an entry that cannot be read."""
    action, epoch = entry("an action", fields.get(b"action", b""), Action), fields.get(b"epoch", b"")
    return Noted(action, int(name.split(b"-")[0]), int(epoch)) if action and epoch.isdigit() else None


def _text(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()
