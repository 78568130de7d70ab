"""Storage quotas: reads what one tenant keeps in the store, and how much of its limits is left in one partition.

The scripts that put, end and delete jobs and files maintain the counts. A script sees only its own partition, so
`Quotas` subtracts the usage of the other partitions from the limit. It reads that at most once a second, so with
several partitions a tenant may exceed its limit by what it adds within that second; with one partition the limit is
exact. While a partition is unavailable its last known usage counts (zero if there is none), so that its loss refuses no
job elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from streaming.errors import QuotaExceeded, Unavailable
from streaming.ids import tenant_partition
from streaming.jobs.settings import QuotaSettings
from streaming.redis.client import RedisClient

log = logging.getLogger(__name__)

NAMES = {"jobs": "jobs", "requests": "job_bytes", "results": "result_bytes", "files": "file_bytes"}
"""Fields of QuotaSettings and of TenantUsage by their names in the scripts."""

OTHERS_MAX_AGE_S = 1.0
UNAVAILABLE_RETRY_DELAY_S = 5.0
"""Before an unavailable partition is asked again: each time a put waits for it."""
MAX_TENANTS = 4096
"""Tenants whose usage of other partitions is cached."""
MAX_LOOKED = 1000
"""Jobs read in one call, which blocks the server."""
MAX_COUNTED = 20_000
"""The newest jobs of a tenant, whose states are counted."""


class TenantUsage(msgspec.Struct, frozen=True):
    """A tenant's usage. `waiting` and `running` count among its newest MAX_COUNTED jobs."""

    jobs: int = 0
    job_bytes: int = 0
    result_bytes: int = 0
    files: int = 0
    file_bytes: int = 0
    waiting: int = 0
    running: int = 0


class Quotas:
    """Quota reader of one process that accepts work; caches the usage of other partitions for a second."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._seen: dict[str, tuple[float, list[TenantUsage]]] = {}
        """By tenant: when its usage was read (monotonic), and the usage by partition."""
        self._away: dict[int, float] = {}
        """Unavailable partitions, and until when (monotonic) they are not asked again."""

    async def usage(self, tenant: str) -> TenantUsage:
        """Read the tenant's usage of all partitions. Raises Unavailable."""
        total, looked = _sum(await self._read(tenant, self._client.partitions, 0, MAX_LOOKED)), MAX_LOOKED
        waiting, running = total.waiting, total.running
        while looked < MAX_COUNTED and looked < total.jobs:
            more = _sum(await self._read(tenant, self._client.partitions, looked, MAX_LOOKED))
            waiting, running, looked = waiting + more.waiting, running + more.running, looked + MAX_LOOKED
        return msgspec.structs.replace(total, waiting=waiting, running=running)

    async def file_bytes(self, tenant: str) -> int:
        """Read the bytes of the tenant's files, which are all in one partition. Raises Unavailable."""
        partition = tenant_partition(tenant, self._client.settings.partitions)
        return (await self._read(tenant, [partition]))[0].file_bytes

    async def left(self, tenant: str, partition: int, quota: QuotaSettings) -> dict[str, int]:
        """The tenant's remaining `jobs`, bytes of `requests` and bytes of `results` in a partition, where they are
        limited, as `put` has them. Other partitions may be unavailable."""
        alone = len(self._client.partitions) == 1 or not quota.bounds_jobs
        others = TenantUsage() if alone else _sum(await self._others(tenant, partition))
        limits = {name: getattr(quota, NAMES[name]) for name in ("jobs", "requests", "results")}
        used = {name: getattr(others, NAMES[name]) for name in limits}
        return {name: max(0, limit - used[name]) for name, limit in limits.items() if limit is not None}

    async def _others(self, tenant: str, partition: int) -> list[TenantUsage]:
        """Usage of the other partitions, at most a second old; of unavailable ones the last known usage."""
        asked, parts = self._seen.get(tenant, (-math.inf, [TenantUsage()] * len(self._client.partitions)))
        if time.monotonic() - asked > OTHERS_MAX_AGE_S:
            if len(self._seen) >= MAX_TENANTS:
                self._seen.clear()
            parts = await asyncio.gather(*(self._slice(tenant, number, known) for number, known in enumerate(parts)))
            self._seen[tenant] = time.monotonic(), parts
        return [part for number, part in enumerate(parts) if number != partition]

    async def _slice(self, tenant: str, partition: int, known: TenantUsage) -> TenantUsage:
        """Read the usage of one partition; returns `known` while it is unavailable."""
        if time.monotonic() < self._away.get(partition, -math.inf):
            return known
        try:
            (part,) = await self._read(tenant, [partition])
        except Unavailable as error:
            if partition not in self._away:
                log.warning("quotas go by what was last known of partition %d: %s", partition, error)
            self._away[partition] = time.monotonic() + UNAVAILABLE_RETRY_DELAY_S
            return known
        self._away.pop(partition, None)
        return part

    async def _read(self, tenant: str, partitions: Iterable[int], rank: int = 0, most: int = 0) -> list[TenantUsage]:
        """Read the usage of these partitions, with the states of up to `most` jobs of each from `rank` on."""
        args = (tenant, self._client.settings.retention_s, rank, most)
        answers = await self._client.calls([("usage", partition, args) for partition in partitions])
        return [TenantUsage(*map(int, answer)) for answer in answers]


def exceeded(quota: QuotaSettings, answer: Sequence[Any], left: Mapping[str, int]) -> QuotaExceeded:
    """The error of a write that a quota refused, with the usage of all partitions. `left`: as the script had it."""
    which = answer[1].decode()
    if which == "share":
        return QuotaExceeded("store_share", answer[2], 0)  # how large the store is, is not for tenants
    limit = getattr(quota, NAMES[which]) or 0
    return QuotaExceeded(NAMES[which], answer[2] + limit - left[which], limit)


def _sum(parts: Sequence[TenantUsage]) -> TenantUsage:
    return TenantUsage(*(sum(getattr(part, name) for part in parts) for name in TenantUsage.__struct_fields__))
