"""The identity of a store: its format version, its number of partitions and its deployment id.

The first process that uses an empty store writes all three, in one step; every later process compares them with its
own before it does anything else. A store that differs is refused with the fix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from runtime.config import ConfigError
from streaming.ids import new_deployment_id
from streaming.keys import FLEET_SLOT, fixed_keys, fleet_key
from streaming.redis.client import RedisClient
from streaming.redis.failures import translated
from streaming.settings import RedisSettings

FORMAT = 1
"""The version of everything in the store: keys, messages, and what scripts read and write. Every change of these raises
it, for a process of one version must not work on a store of another."""
FORMAT_DIGEST = "b903ded325873f54"
"""Digest of what FORMAT stands for; tests/streaming/store/test_identity.py computes it and fails when it changes."""

LOST_S = 5.0
"""How long a starting process waits for a running one to write a lost identity again, before it takes the store for one
of an earlier version. Running processes look every two seconds."""
POLL_S = 0.25

RESET = "stop Penstock, then `penstock store reset --yes`, which deletes everything Penstock keeps in it"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a store says it is."""

    format: int
    partitions: int
    deployment: str
    """Random: another store, or the same one emptied, has another."""


async def enter_store(wire: RedisClient) -> Identity:
    """Compare the store's identity with this process's settings; an empty store gets one. One round trip, except for
    the first process of all. Raises ConfigError if this process must not use the store, Unavailable."""
    found = await read_identity(wire)
    if found is None and await _is_used(wire):
        found = await _awaited(wire)
        if found is None:
            raise ConfigError("redis.url", f"this store has no format version: {_other_version(0)}", _drain())
    found = found or await identify(wire)
    check_identity(found, wire.settings)
    return found


async def identify(wire: RedisClient) -> Identity:
    """The store's identity, which is written if it has none, as after FLUSHALL or a failover that lost it. It then
    has a new deployment id, so that a folder with the former one shows that the store has lost data. Raises
    Unavailable."""
    args = (FORMAT, wire.settings.partitions, new_deployment_id())
    return _parsed(await wire.call("identify", FLEET_SLOT, *args))


async def read_identity(wire: RedisClient) -> Identity | None:
    """The store's identity; None if it has none. Raises Unavailable."""
    with translated():
        fields = await cast(
            Awaitable[list[Any]],
            wire.redis.hmget(fleet_key("store"), ["format", "partitions", "deployment"]),
        )
    return None if fields[0] is None else _parsed(fields)


def check_identity(identity: Identity, settings: RedisSettings) -> None:
    """Raises ConfigError if a process with these settings must not use the store."""
    if identity.format != FORMAT:
        raise ConfigError(
            "redis.url", f"this store has format {identity.format}: {_other_version(identity.format)}", _drain()
        )
    if identity.partitions != settings.partitions:
        problem = f"this store has {_partitions(identity.partitions)}, the settings say {settings.partitions}"
        hint = f"set redis.partitions = {identity.partitions}; to change the number, drain this deployment: {RESET}"
        raise ConfigError("redis.partitions", problem, hint)


def disagreement(deployment: str, owner: str, folder: Path) -> str:
    """What is wrong, and the fix, if a folder of files is not that of the store's deployment; else "". `owner`: the
    deployment whose files these are, "" if nobody has said so."""
    if owner == deployment:
        return ""
    whose = f"belongs to deployment {owner}" if owner else "has files and does not say which deployment they belong to"
    return (
        f"the folder of files {folder} {whose}, and the store is of deployment {deployment}: the store was emptied or "
        "replaced, or redis.url or files.dir is wrong. Correct that; or, if both are right, run "
        "`penstock store adopt --yes`: files without a record in the store are then moved into quarantine"
    )


def _partitions(number: int) -> str:
    return f"{number} partition{'' if number == 1 else 's'}"


def _other_version(found: int) -> str:
    other = "an earlier" if found < FORMAT else "a later"
    return f"{other} version of Penstock wrote it, and this version needs format {FORMAT}"


def _drain() -> str:
    return f"drain it with the version that wrote it, or use another Redis. To reset it: {RESET}"


def _parsed(fields: list[Any]) -> Identity:
    form, partitions, deployment = (field or b"" for field in fields)
    return Identity(int(form or 0), int(partitions or 0), deployment.decode())


async def _is_used(wire: RedisClient) -> bool:
    """Whether Penstock has run on this store: every version writes some of these keys in its first seconds."""
    with translated():
        for slot in (FLEET_SLOT, 0):
            if await wire.redis.exists(*fixed_keys(slot)):
                return True
    return False


async def _awaited(wire: RedisClient) -> Identity | None:
    """The identity, once a running process has written it: it may be about to, and after a loss it does so again."""
    for _ in range(round(LOST_S / POLL_S)):
        if (found := await read_identity(wire)) is not None:
            return found
        await asyncio.sleep(POLL_S)
    return None
