"""What a store holds, counted, and its end: every key of Penstock deleted, in slices, on one server or on a cluster.

Neither looks at the store's format: a store of another version is counted by the names of its keys, as far as these
are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from streaming.catalogue import ROOT
from streaming.keys import FLEET_SLOT, fleet_key, kind_of
from streaming.redis.client import RedisClient
from streaming.redis.failures import translated

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
"""By kind of key: the command that tells how much is in it, and what that is added to."""
COUNTED = {"job": "jobs", "batch": "batches", "file": "files"}


@dataclass(slots=True)
class Contents:
    """What would be lost."""

    keys: int = 0
    jobs: int = 0
    """Records, of finished jobs too."""
    unfinished: int = 0
    """Jobs that wait or run."""
    running: int = 0
    batches: int = 0
    batches_unfinished: int = 0
    files: int = 0
    """Records of files; their bytes lie in the folder of files."""
    dead_letters: int = 0
    events: int = 0
    """Not passed on yet."""
    webhooks: int = 0
    """Not delivered yet."""


async def count_contents(wire: RedisClient) -> Contents:
    """Read the names of all keys. Raises Unavailable."""
    found = Contents()
    async for place, keys in wire.scan(f"{ROOT}*"):
        found.keys += len(keys)
        sized = []
        for key in keys:
            kind = kind_of(key)
            if kind in COUNTED:
                _add(found, COUNTED[kind], 1)
            elif kind in SIZES:
                sized.append((kind, key))
        answers = await wire.run_at(place, [(SIZES[kind][0], key) for kind, key in sized])
        for (kind, _), answer in zip(sized, answers, strict=True):
            _add(found, SIZES[kind][1], answer)
    return found


async def reset_store(wire: RedisClient) -> int:
    """Delete every key of Penstock; the number of keys. Interrupted, the store stays unusable until it is done again:
    its identity goes last, and until then it names no format. Raises Unavailable."""
    identity = fleet_key("store")
    await wire.call("condemn", FLEET_SLOT)
    deleted = 0
    async for place, keys in wire.scan(f"{ROOT}*"):
        doomed = [key for key in keys if key != identity]
        deleted += sum(await wire.run_at(place, [("UNLINK", key) for key in doomed]))
    with translated():
        return deleted + int(await wire.redis.unlink(identity))


async def live_processes(wire: RedisClient) -> list[str]:
    """The processes that have said in the last seconds that they are there, of whatever version: role and a name.
    Raises Unavailable."""
    now_ms = await wire.now_ms()
    with translated():
        names = cast(list[bytes], await wire.redis.zrangebyscore(fleet_key("procs"), now_ms / 1000, "+inf"))
    return [name.decode() for name in names]


def _add(found: Contents, name: str, number: int) -> None:
    setattr(found, name, getattr(found, name) + number)
