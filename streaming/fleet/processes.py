"""Registry of running processes and of model cards.

No guarantee depends on it: operators, the scheduler and the supervisor read it.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Literal, TypeAlias, cast

import msgspec

from penstock.engine import ModelCard
from streaming.fleet.entries import entries, entry
from streaming.keys import FLEET_SLOT, fleet_key
from streaming.redis.client import RedisClient
from streaming.redis.failures import translated

GONE_S = 10
"""A process without a heartbeat for so long counts as gone."""


Role: TypeAlias = Literal["redis", "api", "worker", "scheduler", "offline"]


class Served(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has ended of one lane since its start."""

    jobs: int = 0
    tokens: int = 0
    """Prompts and answers together."""
    failed: int = 0
    """Jobs among them that failed by the engine's fault."""


class Process(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process as it says of itself, every few seconds. What counts up does so from its start."""

    role: Role
    id: str
    """Its name for people; several machines may use the same one."""
    life: str
    """Random, and new with each start: what tells processes of the same name apart."""
    pid: int
    host: str
    state: str
    """starting | ready | draining | drained (cordoned, done, and still there)"""
    since: float
    """Unix seconds of its start: a scheduler's in Redis time, others' by their machine's clock. For people only."""
    model: str = ""
    url: str = ""
    lease: str = ""
    """Under which a worker holds its jobs: new in each of its lives."""
    slots: int = 0
    running: int = 0
    reserved: int = 0
    """Slots of a worker that lane batch may not fill."""
    waiting: int = 0
    """Jobs a worker holds that wait inside its engine."""
    kv_tokens: int = 0
    """Room of a worker's KV cache; 0: not limited beyond the slots."""
    kv_used: int = 0
    steps: int = 0
    """Engine steps whose time is known, in all `step_s` seconds with `step_tokens` tokens."""
    step_s: float = 0.0
    step_tokens: int = 0
    served: dict[str, Served] = {}
    """By lane."""
    shape: str = ""
    """Which of its model's pools a worker belongs to."""


class Fleet:
    """The registry in the store. Stateless; many may share a client. Every method raises Unavailable."""

    def __init__(self, wire: RedisClient) -> None:
        self._wire = wire

    async def report(self, process: Process) -> None:
        """Heartbeat: store the process's description for GONE_S seconds."""
        await self._wire.call("report", FLEET_SLOT, _key_name(process), msgspec.json.encode(process), GONE_S)

    async def leave(self, process: Process) -> None:
        """Remove the process."""
        name = _key_name(process)
        with translated():
            pipeline = self._wire.redis.pipeline(transaction=False)
            pipeline.delete(fleet_key("proc", name))
            pipeline.zrem(fleet_key("procs"), name)
            await pipeline.execute()

    async def processes(self, role: Role | None = None) -> list[Process]:
        """List the processes with a heartbeat in the last GONE_S seconds, by role, name and host."""
        with translated():
            names = await cast(Awaitable[list[bytes]], self._wire.redis.zrange(fleet_key("procs"), 0, -1))
            if not names:
                return []
            values = await cast(
                Awaitable[list[bytes | None]],
                self._wire.redis.mget([fleet_key("proc", name.decode(errors="replace")) for name in names]),
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
        await self._wire.call("card", FLEET_SLOT, card.name, msgspec.json.encode(kept))

    async def cards(self) -> dict[str, ModelCard]:
        """Read the cards, by name, of every model that was ever loaded."""
        return entries(await self._hash("card"), ModelCard)

    async def _hash(self, name: str) -> dict[str, bytes]:
        with translated():
            raw = await cast(Awaitable[dict[Any, Any]], self._wire.redis.hgetall(fleet_key(name)))
        return {key.decode(errors="replace"): value for key, value in raw.items()}


def _key_name(process: Process) -> str:
    return f"{process.role}:{process.life}"
