"""Job list: reads pages of a tenant's jobs without their bodies and answers.

A page reads a bounded number of jobs, in a few rounds of one call per partition. So it may be short, or empty, if few
jobs are in the requested state; it always has a cursor for the next page, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from streaming.errors import DecodeError
from streaming.jobs.codec import decode_metadata
from streaming.jobs.frames import Run
from streaming.jobs.job import JobState
from streaming.jobs.reader import fail_malformed
from streaming.jobs.records import end_of, malformed_end, malformed_keep_s, parse_runs, read_number
from streaming.jobs.terminal import Terminal
from streaming.keys import parse_lane
from streaming.priority import Priority
from streaming.redis.client import RedisClient

FIELDS = (
    *("state", "lane", "attempt", "created", "claimed", "started", "done", "keep", "reason", "summary"),
    *("metadata", "epoch", "runs"),
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
class Summary:
    """A job as a list shows it. Times are Redis milliseconds, 0 for "not yet"."""

    id: str
    model: str
    priority: Priority
    state: JobState
    attempt: int
    created_ms: int
    started_ms: int
    done_ms: int
    keep_s: int
    epoch: int
    terminal: Terminal | None
    """How the job ended, without its rows; None while it has not."""
    runs: Sequence[Run] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs, newest first, and the place behind which the next page begins; None: there are no more."""

    jobs: list[Summary]
    behind: Place | None


@dataclass(frozen=True, slots=True)
class PagePart:
    """One partition's part of a page. `reached`: the last place that was read; None: the partition has no more."""

    jobs: Sequence[tuple[Place, Summary]]
    reached: Place | None


class Summaries:
    """Reads job lists. Stateless; many may share a client."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def recent(self, tenant: str, before: Place | None, limit: int, state: JobState | None = None) -> JobPage:
        """Read a page of a tenant's jobs behind `before`, newest first, in any state or in one. Raises Unavailable."""
        found: list[Summary] = []
        for _ in range(MAX_ROUNDS):
            page = await self._round(tenant, before, limit - len(found), state)
            found, before = found + page.jobs, page.behind
            if before is None or len(found) >= limit:
                break
        return JobPage(found, before)

    async def _round(self, tenant: str, before: Place | None, limit: int, state: JobState | None) -> JobPage:
        horizon = await self._client.now_ms() - 2000 * self._client.settings.retention_s
        time, job_id = before or ("", "")
        looked = max(limit, MAX_LOOKED // len(self._client.partitions))
        args = (tenant, horizon, time, job_id, looked, limit, state or "")
        answers = await self._client.calls([("recent", partition, args) for partition in self._client.partitions])
        return merged([await self._part(answer) for answer in answers], limit)

    async def _part(self, answer: Sequence[Any]) -> PagePart:
        """Decode one partition's part; fails a malformed job and shows it so. Raises Unavailable."""
        epoch, reached, *jobs = answer
        found: list[tuple[Place, Summary]] = []
        for name, time, values in jobs:
            job_id = name.decode()
            try:
                summary = _summary(job_id, values, epoch)
            except (ValueError, OverflowError, LookupError, TypeError) as error:
                done_ms = await fail_malformed(self._client, job_id, error)
                summary = _malformed(job_id, int(time), done_ms, malformed_keep_s(values[FIELDS.index("keep")]))
            found.append(((int(time), job_id), summary))
        return PagePart(found, (int(reached[0]), reached[1].decode()) if reached else None)


def merged(parts: Sequence[PagePart], limit: int) -> JobPage:
    """Merge the parts of all partitions, newest first. Jobs older than the newest `reached` are left to the next page:
    that partition may have newer ones."""
    reached = max((part.reached for part in parts if part.reached is not None), default=None)
    found = [job for part in parts for job in part.jobs if reached is None or job[0] >= reached]
    found.sort(key=lambda job: job[0], reverse=True)
    behind = found[limit - 1][0] if len(found) > limit else reached
    return JobPage([summary for _, summary in found[:limit]], behind)


def _malformed(job_id: str, created_ms: int, done_ms: int, keep_s: int) -> Summary:
    """Summary of a job whose record is malformed; its time of acceptance is known from the list."""
    return Summary(
        id=job_id,
        model="",
        priority=Priority.BATCH,
        state=JobState.FAILED,
        attempt=0,
        created_ms=created_ms,
        started_ms=0,
        done_ms=done_ms,
        keep_s=keep_s,
        epoch=1,
        terminal=malformed_end(job_id),
    )


def _summary(job_id: str, values: Sequence[bytes | None], epoch: bytes | None) -> Summary:
    raw = {name: value or b"" for name, value in zip(FIELDS, values, strict=True)}
    state = JobState(raw["state"].decode())
    model, priority = parse_lane(raw["lane"].decode())

    def number(name: str) -> int:
        return read_number(raw[name])

    return Summary(
        id=job_id,
        model=model,
        priority=priority,
        state=state,
        attempt=number("attempt"),
        created_ms=number("created"),
        started_ms=number("started") or number("claimed"),
        done_ms=number("done"),
        keep_s=number("keep"),
        epoch=int(epoch or 0) + 1 + number("epoch"),
        runs=[logged.run for logged in parse_runs(raw["runs"].decode())],
        terminal=end_of(job_id, state, raw["summary"], raw["reason"].decode()),
        metadata=_metadata(raw["metadata"]),
    )


def _metadata(data: bytes) -> Mapping[str, str]:
    try:
        return decode_metadata(data)
    except DecodeError:
        return {}
