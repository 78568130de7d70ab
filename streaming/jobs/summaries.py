"""Job list: reads pages of a tenant's jobs without their bodies and answers.

A page reads a bounded number of jobs, in a few rounds of one call per partition. So it may be short, or empty, if few
jobs are in the requested state; it always has a cursor for the next page, if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from streaming.errors import MalformedJob
from streaming.jobs.job import JobState
from streaming.jobs.reader import fail_malformed
from streaming.jobs.records import JobRecord, malformed_record, parse_record
from streaming.priority import Priority
from streaming.redis.client import ClientUser

FIELDS = (
    *(b"state", b"lane", b"attempt", b"created", b"claimed", b"started", b"done", b"keep", b"reason", b"summary"),
    *(b"metadata", b"epoch", b"runs", b"endpoint", b"cancel", b"preview"),
)
"""Fields of a job, in the order in which `recent.lua` returns them."""

MAX_LOOKED = 250
"""Jobs read in one round from all partitions together, but from each at least the page's limit. The server is blocked
meanwhile."""
MAX_ROUNDS = 4
"""Maximum rounds of reads for one page."""

Place: TypeAlias = tuple[int, str]
"""A job's place in the list: the time (ms) of its acceptance, and its id."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs of a tenant to list; what is None or "" lets all pass. Times are Redis ms of the acceptance."""

    state: JobState | None = None
    model: str = ""
    lane: Priority | None = None
    since_ms: int | None = None
    until_ms: int | None = None


ANY = JobFilter()


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs, newest first, without bodies and rows, and the place behind which the next page begins; None: that is
    all."""

    jobs: list[JobRecord]
    behind: Place | None


@dataclass(frozen=True, slots=True)
class PagePart:
    """One partition's part of a page. `reached`: the last place that was read; None: the partition has no more."""

    jobs: Sequence[tuple[Place, JobRecord]]
    reached: Place | None


class Summaries(ClientUser):
    """Reads job lists."""

    async def recent(self, tenant: str, before: Place | None, limit: int, wanted: JobFilter = ANY) -> JobPage:
        """Read a page of a tenant's jobs behind `before`, newest first. Raises Unavailable."""
        found: list[JobRecord] = []
        for _ in range(MAX_ROUNDS):
            page = await self._round(tenant, before, limit - len(found), wanted)
            found, before = found + page.jobs, page.behind
            if before is None or len(found) >= limit:
                break
        return JobPage(found, before)

    async def _round(self, tenant: str, before: Place | None, limit: int, wanted: JobFilter) -> JobPage:
        horizon = await self._client.now_ms() - 2000 * self._client.settings.retention_s
        time, job_id = before or ("", "")
        looked = max(limit, MAX_LOOKED // len(self._client.partitions))
        times = ["" if ms is None else ms for ms in (wanted.since_ms, wanted.until_ms)]
        args = (
            tenant,
            horizon,
            time,
            job_id,
            looked,
            limit,
            wanted.state or "",
            wanted.model,
            wanted.lane or "",
            *times,
        )
        answers = await self._client.calls([("recent", partition, args) for partition in self._client.partitions])
        return merged([await self._part(answer, tenant) for answer in answers], limit)

    async def _part(self, answer: Sequence[Any], tenant: str) -> PagePart:
        """Decode one partition's part; fails a malformed job and shows it so. Raises Unavailable."""
        epoch, reached, *jobs = answer
        found: list[tuple[Place, JobRecord]] = []
        for name, time, values in jobs:
            job_id = name.decode()
            fields = [word for pair in zip(FIELDS, values, strict=True) if pair[1] is not None for word in pair]
            fields += (b"tenant", tenant.encode())  # the list that was read is the tenant's
            try:
                record = _listed(job_id, fields, epoch)
            except MalformedJob as error:
                done_ms = await fail_malformed(self._client, job_id, error)
                record = replace(malformed_record(job_id, fields, done_ms), created_ms=int(time))
            found.append(((int(time), job_id), record))
        return PagePart(found, (int(reached[0]), reached[1].decode()) if reached else None)


def merged(parts: Sequence[PagePart], limit: int) -> JobPage:
    """Merge the parts of all partitions, newest first. Jobs older than the newest `reached` are left to the next page:
    that partition may have newer ones."""
    reached = max((part.reached for part in parts if part.reached is not None), default=None)
    found = [job for part in parts for job in part.jobs if reached is None or job[0] >= reached]
    found.sort(key=lambda job: job[0], reverse=True)
    behind = found[limit - 1][0] if len(found) > limit else reached
    return JobPage([record for _, record in found[:limit]], behind)


def _listed(job_id: str, fields: Sequence[bytes], epoch: bytes | None) -> JobRecord:
    """Raises MalformedJob."""
    record = parse_record(job_id, fields, epoch, bodies=False)
    if record is None:
        raise MalformedJob("it has no state")
    return record
