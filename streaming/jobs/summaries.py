"""What a list shows of a tenant's jobs: their small fields, never their bodies or answers.

A page looks at a bounded number of jobs, in a few rounds of one call for each partition. So it may be short, or empty,
where few of them are in the state that is asked for; it says where the next one begins.
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
"""As `recent.lua` returns them."""

MAX_LOOKED = 250
"""Jobs looked at in one round, all partitions together; but in each at least as many as the page may hold. The server
does nothing else meanwhile."""
ROUNDS = 4
"""For one page, at most."""

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
    """Of a job that has ended, without its rows."""
    runs: Sequence[Run] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs, newest first, and the place behind which the next page begins; None: there are no more."""

    jobs: list[Summary]
    behind: Place | None


@dataclass(frozen=True, slots=True)
class PagePart:
    """What one partition has of a page. `reached` is the last place it looked at; None: it has no more."""

    jobs: Sequence[tuple[Place, Summary]]
    reached: Place | None


class Summaries:
    """Stateless; many may share a wire."""

    def __init__(self, wire: RedisClient) -> None:
        self._wire = wire

    async def recent(self, tenant: str, before: Place | None, limit: int, state: JobState | None = None) -> JobPage:
        """A tenant's jobs behind `before`, newest first, in any state or in one. Raises Unavailable."""
        found: list[Summary] = []
        for _ in range(ROUNDS):
            page = await self._round(tenant, before, limit - len(found), state)
            found, before = found + page.jobs, page.behind
            if before is None or len(found) >= limit:
                break
        return JobPage(found, before)

    async def _round(self, tenant: str, before: Place | None, limit: int, state: JobState | None) -> JobPage:
        horizon = await self._wire.now_ms() - 2000 * self._wire.settings.retention_s
        time, job_id = before or ("", "")
        looked = max(limit, MAX_LOOKED // len(self._wire.partitions))
        args = (tenant, horizon, time, job_id, looked, limit, state or "")
        answers = await self._wire.calls([("recent", partition, args) for partition in self._wire.partitions])
        return merged([await self._part(answer) for answer in answers], limit)

    async def _part(self, answer: Sequence[Any]) -> PagePart:
        """One job that cannot be read fails, and the others are shown. Raises Unavailable."""
        epoch, reached, *jobs = answer
        found: list[tuple[Place, Summary]] = []
        for name, time, values in jobs:
            job_id = name.decode()
            try:
                summary = _summary(job_id, values, epoch)
            except (ValueError, OverflowError, LookupError, TypeError) as error:
                done_ms = await fail_malformed(self._wire, job_id, error)
                summary = _malformed(job_id, int(time), done_ms, malformed_keep_s(values[FIELDS.index("keep")]))
            found.append(((int(time), job_id), summary))
        return PagePart(found, (int(reached[0]), reached[1].decode()) if reached else None)


def merged(parts: Sequence[PagePart], limit: int) -> JobPage:
    """The newest jobs of all partitions. Nothing older is shown than the newest place at which a partition stopped
    looking: it may have jobs behind it that come first."""
    reached = max((part.reached for part in parts if part.reached is not None), default=None)
    found = [job for part in parts for job in part.jobs if reached is None or job[0] >= reached]
    found.sort(key=lambda job: job[0], reverse=True)
    behind = found[limit - 1][0] if len(found) > limit else reached
    return JobPage([summary for _, summary in found[:limit]], behind)


def _malformed(job_id: str, created_ms: int, done_ms: int, keep_s: int) -> Summary:
    """What is shown of a job whose record cannot be read. The list itself says when it was accepted."""
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
