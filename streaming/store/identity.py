"""Store identity: format version, number of partitions and deployment id, which every process checks at its start.

The first process that uses an empty store writes all three atomically; every later process compares them with its own
before any other use. A process refuses a store that differs, and its error names the fix.

A reset counts what a store holds and deletes every key of Penstock, in slices, on one server or a cluster. It ignores
the format: a store of another version is counted by the names of its keys, as far as these are the same.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import ConfigError
from penstock.text import counted
from streaming.ids import new_deployment_id
from streaming.keys import FLEET_SLOT, ROOT, fixed_keys, fleet_key, kind_of
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

FORMAT = 4
"""The version of everything in the store: keys, messages, and what scripts read and write. Every change of these must
raise it, because a process of one version must not work on a store of another."""
FORMAT_DIGEST = "5a400e38dedbf972"
"""Digest of everything that FORMAT versions; tests/streaming/store/test_identity.py fails when it changes."""

RECOVERY_TIMEOUT_S = 5.0
"""How long a starting process waits for a running one to write a lost identity again, before it treats the store as one
of an earlier version. Running processes check every two seconds."""
POLL_INTERVAL_S = 0.25

RESET = "stop Penstock, then `penstock store reset --yes`, which deletes everything Penstock keeps in it"

DRAIN = f"drain it with the version that wrote it, or use another Redis. To reset it: {RESET}"


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity that a store holds."""

    format: int
    partitions: int
    deployment: str
    """Random: another store, or the same one after it was emptied, has another id."""


async def enter_store(client: RedisClient) -> Identity:
    """Compare the store's identity with this process's settings; give an empty store one. Takes one round trip, except
    in the first process. Raises ConfigError if this process must not use the store, Unavailable."""
    found = await read_identity(client)
    # Every version writes some of these keys in its first seconds.
    used = [("EXISTS", slot, fixed_keys(slot)) for slot in (FLEET_SLOT, 0)]
    if found is None and any(await client.calls(used)):
        found = await _awaited(client)
        if found is None:
            raise ConfigError("redis.url", f"this store has no format version: {_other_version(0)}", DRAIN)
    found = found or await identify(client)
    check_identity(found, client.settings)
    return found


async def identify(client: RedisClient) -> Identity:
    """Read the store's identity, or write one if it has none, as after FLUSHALL or a failover that lost it. The new
    deployment id differs from the one in the files folder, which shows that the store has lost data. Raises
    Unavailable."""
    args = (FORMAT, client.settings.partitions, new_deployment_id())
    return _parsed(await client.call("identify", FLEET_SLOT, *args))


async def read_identity(client: RedisClient) -> Identity | None:
    """Read the store's identity; None if it has none. Raises Unavailable."""
    fields = await client.call("HMGET", FLEET_SLOT, fleet_key("store"), "format", "partitions", "deployment")
    return None if fields[0] is None else _parsed(fields)


def check_identity(identity: Identity, settings: RedisSettings) -> None:
    """Raises ConfigError if a process with these settings must not use the store."""
    if identity.format != FORMAT:
        raise ConfigError(
            "redis.url", f"this store has format {identity.format}: {_other_version(identity.format)}", DRAIN
        )
    if identity.partitions != settings.partitions:
        problem = f"this store has {counted(identity.partitions, 'partition')}, the settings say {settings.partitions}"
        hint = f"set redis.partitions = {identity.partitions}; to change the number, drain this deployment: {RESET}"
        raise ConfigError("redis.partitions", problem, hint)


def disagreement(deployment: str, owner: str, folder: Path) -> str:
    """Describe the problem and the fix if the files folder belongs to another deployment than the store; else "".
    `owner`: the deployment noted in the folder, "" if there is none."""
    if owner == deployment:
        return ""
    whose = f"belongs to deployment {owner}" if owner else "has files and does not say which deployment they belong to"
    return (
        f"the folder of files {folder} {whose}, and the store is of deployment {deployment}: the store was emptied or "
        "replaced, or redis.url or files.dir is wrong. Correct that; or, if both are right, run "
        "`penstock store adopt --yes`: files without a record in the store are then moved into quarantine"
    )


def _other_version(found: int) -> str:
    other = "an earlier" if found < FORMAT else "a later"
    return f"{other} version of Penstock wrote it, and this version needs format {FORMAT}"


def _parsed(fields: list[Any]) -> Identity:
    form, partitions, deployment = (field or b"" for field in fields)
    return Identity(int(form or 0), int(partitions or 0), deployment.decode())


async def _awaited(client: RedisClient) -> Identity | None:
    """Wait for a running process to write the identity, at its start or again after a loss. None: it took too long."""
    for _ in range(round(RECOVERY_TIMEOUT_S / POLL_INTERVAL_S)):
        if (found := await read_identity(client)) is not None:
            return found
        await asyncio.sleep(POLL_INTERVAL_S)
    return None


# --- reset ------------------------------------------------------------------------------------------------------------


RECORDS = {"job": "jobs", "batch": "batches", "file": "files"}
"""What each key of a kind is counted as."""
SIZES = {
    "lane": ("XLEN", "unfinished"),
    "claims": ("SCARD", "running"),
    "due": ("ZCARD", "batches_unfinished"),
    "dead": ("XLEN", "dead_letters"),
    "outbox": ("XLEN", "events"),
    "hook_due": ("ZCARD", "webhooks"),
}
"""By kind of key: the command that returns its size, and what that is counted as."""


async def count_contents(client: RedisClient) -> dict[str, int]:
    """Count what a reset would delete, by the names in RECORDS and SIZES, and all `keys`. It reads the names of all
    keys. Raises Unavailable."""
    found = dict.fromkeys(["keys", *RECORDS.values(), *(name for _, name in SIZES.values())], 0)
    async for server, keys in client.scan(f"{ROOT}*"):
        found["keys"] += len(keys)
        kinds = [(kind_of(key), key) for key in keys]
        for kind, _ in kinds:
            if kind in RECORDS:
                found[RECORDS[kind]] += 1
        sized = [(*SIZES[kind], key) for kind, key in kinds if kind in SIZES]
        answers = await client.run_at(server, [(command, key) for command, _, key in sized])
        for (_, name, _), size in zip(sized, answers, strict=True):
            found[name] += size
    return found


CONDEMN = "#!lua flags=allow-oom\nreturn redis.call('HSET', KEYS[1], 'format', 0, 'partitions', 0, 'deployment', '')"
"""Marks the store as unusable by any process. A full store runs it too, but would refuse to load our functions."""


async def reset_store(client: RedisClient) -> int:
    """Delete every key of Penstock; returns their number. If interrupted, the store stays unusable until it is reset
    again: its identity is deleted last, and marked as without a format before. Raises Unavailable."""
    identity = fleet_key("store")
    await client.call("EVAL", FLEET_SLOT, CONDEMN, 1, identity)
    deleted = 0
    async for server, keys in client.scan(f"{ROOT}*"):
        doomed = [key for key in keys if key != identity]
        deleted += sum(await client.run_at(server, [("UNLINK", key) for key in doomed]))
    return deleted + int(await client.call("UNLINK", FLEET_SLOT, identity))


async def live_processes(client: RedisClient) -> list[str]:
    """List the processes, of any version, whose heartbeat has not expired, as role:name. Raises Unavailable."""
    now_ms = await client.now_ms()
    names = await client.call("ZRANGEBYSCORE", FLEET_SLOT, fleet_key("procs"), str(now_ms / 1000), "+inf")
    return [name.decode() for name in names]
