"""Cursor paging over a sorted set: reads its members in the order of their times, starting after any of them."""

from __future__ import annotations

from typing import Any

from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from streaming.redis.failures import translated


async def page(
    client: RedisClient, key: str, after: tuple[int, str] | None, limit: int, *, newest_first: bool = True
) -> list[tuple[str, int]]:
    """Read up to `limit` members with their scores, after the cursor `after` (score, member). Members of the same
    score are ordered by name, so no page skips one. Raises Unavailable."""
    found: list[tuple[str, int]] = []
    skip, start = 0, str(after[0]) if after else None
    while len(found) < limit:
        with translated():
            if newest_first:
                rows: Any = await client.redis.zrevrangebyscore(
                    key, start or "+inf", "-inf", skip, limit, withscores=True
                )
            else:
                rows = await client.redis.zrangebyscore(key, start or "-inf", "+inf", skip, limit, withscores=True)
        items = [(member.decode(errors="replace"), int(score)) for member, score in rows]
        found += [item for item in items if after is None or _behind(item, after, newest_first=newest_first)]
        skip += len(items)
        if len(items) < limit:
            break
    return found[:limit]


async def place_of(client: RedisClient, partition: int, name: str, tenant: str) -> int | None:
    """Return the place that a deleted member had in its list. None if it is not known: it never was there, was deleted
    more than a day ago, or a thousand others of the tenant since. Raises Unavailable."""
    with translated():
        kept: Any = await client.redis.lrange(partition_key(partition, "places", tenant), 0, -1)
    beginning = f"{name} ".encode()
    found = next((each for each in kept if each.startswith(beginning)), None)
    return None if found is None else int(float(found.rpartition(b" ")[2]))


async def cursor_after(client: RedisClient, partition: int, key: str, name: str, tenant: str) -> tuple[int, str] | None:
    """Return the cursor of a member of a tenant's sorted set, also of one that was deleted since. None if it is not
    known. Raises Unavailable."""
    with translated():
        score: Any = await client.redis.zscore(key, name)
    place = int(score) if score is not None else await place_of(client, partition, name, tenant)
    return None if place is None else (place, name)


async def overdue(client: RedisClient, key: str, now_ms: int, limit: int) -> list[str]:
    """Read up to `limit` members whose time (ms) is not after `now_ms`, the oldest first. Raises Unavailable."""
    with translated():
        rows: Any = await client.redis.zrangebyscore(key, "-inf", now_ms, 0, limit)
    return [member.decode(errors="replace") for member in rows]


def owned(member: str) -> tuple[str, str]:
    """Split a member of the `expiring` index into id and tenant."""
    name, _, tenant = member.partition(":")
    return name, tenant


def _behind(item: tuple[str, int], after: tuple[int, str], *, newest_first: bool) -> bool:
    place = (item[1], item[0])
    return place < after if newest_first else place > after
