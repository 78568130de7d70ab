"""Store reset: counts what a store holds, and deletes every key of Penstock, in slices, on one server or a cluster.

Both ignore the store's format: a store of another version is counted by the names of its keys, as far as these are the
same.
"""

from __future__ import annotations

from dataclasses import dataclass

from streaming.catalogue import ROOT
from streaming.keys import FLEET_SLOT, fleet_key, kind_of
from streaming.redis.client import RedisClient

SIZES = {
    "lane": ("XLEN", "unfinished"),
    "retry": ("XLEN", "unfinished"),
    "suspects": ("XLEN", "unfinished"),
    "claims": ("SCARD", "running"),
    "due": ("ZCARD", "batches_unfinished"),
    "dead": ("XLEN", "dead_letters"),
    "outbox": ("XLEN", "events"),
    "hook_due": ("ZCARD", "webhooks"),
}
"""By kind of key: the command that returns its size, and the field of Contents that it counts in."""
COUNTED = {"job": "jobs", "batch": "batches", "file": "files"}


@dataclass(slots=True)
class Contents:
    """Counts of what a reset would delete."""

    keys: int = 0
    jobs: int = 0
    """Records, of finished jobs too."""
    unfinished: int = 0
    """Jobs that wait or run."""
    running: int = 0
    batches: int = 0
    batches_unfinished: int = 0
    files: int = 0
    """Records of files; their bytes are in the files folder."""
    dead_letters: int = 0
    events: int = 0
    """Not delivered to the broker or the webhooks yet."""
    webhooks: int = 0
    """Not delivered yet."""


async def count_contents(client: RedisClient) -> Contents:
    """Count by reading the names of all keys. Raises Unavailable."""
    found = Contents()
    async for place, keys in client.scan(f"{ROOT}*"):
        found.keys += len(keys)
        sized = []
        for key in keys:
            kind = kind_of(key)
            if kind in COUNTED:
                _add(found, COUNTED[kind], 1)
            elif kind in SIZES:
                sized.append((kind, key))
        answers = await client.run_at(place, [(SIZES[kind][0], key) for kind, key in sized])
        for (kind, _), answer in zip(sized, answers, strict=True):
            _add(found, SIZES[kind][1], answer)
    return found


async def reset_store(client: RedisClient) -> int:
    """Delete every key of Penstock; returns their number. If interrupted, the store stays unusable until it is reset
    again: its identity is deleted last, and marked as without a format before. Raises Unavailable."""
    identity = fleet_key("store")
    await client.call("condemn", FLEET_SLOT)
    deleted = 0
    async for place, keys in client.scan(f"{ROOT}*"):
        doomed = [key for key in keys if key != identity]
        deleted += sum(await client.run_at(place, [("UNLINK", key) for key in doomed]))
    return deleted + int(await client.call("UNLINK", FLEET_SLOT, identity))


async def live_processes(client: RedisClient) -> list[str]:
    """List the processes, of any version, whose heartbeat has not expired, as role:name. Raises Unavailable."""
    now_ms = await client.now_ms()
    names = await client.call("ZRANGEBYSCORE", FLEET_SLOT, fleet_key("procs"), str(now_ms / 1000), "+inf")
    return [name.decode() for name in names]


def _add(found: Contents, name: str, number: int) -> None:
    setattr(found, name, getattr(found, name) + number)
