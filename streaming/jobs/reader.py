"""Job reader: reads the records of jobs, pages of job lists, and tokens from the workers' logs.

It writes only in two cases: if a record is unreadable, it fails the job, so that no client waits for it; and it stores
the logged tokens of a job that a script ended (`streaming/jobs/records.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from streaming.errors import MalformedJob, NewerMessage, UnknownJob
from streaming.ids import partition_of
from streaming.jobs.codec import LONG_BYTES, encode, record_rows, without_rows
from streaming.jobs.history import ROWS_AT_ONCE, Histories
from streaming.jobs.job import Job, JobState
from streaming.jobs.records import JobRecord, malformed_record, parse_record, read_end, salvaged, was_cut_short
from streaming.jobs.waiting import FIRST, QueuePosition, QueuePositions
from streaming.keys import REQUEUED, partition_key
from streaming.order import Priority
from streaming.redis.client import Call, ClientUser, RedisClient, ScriptBatcher

log = logging.getLogger(__name__)

PAGE = 100
"""Records read, and then parsed, before others have their turn."""


class JobReader:
    """Reads records and tokens. Concurrent reads of single records share one command."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._records, self._stands = ScriptBatcher(client, "record"), ScriptBatcher(client, "stand")
        self._positions = QueuePositions(client)
        self.expected_position = self._positions.expected
        """How many jobs of its lane would start before a job that is put now."""
        self.history = Histories(client).read
        """What these runs of a job have logged; concurrent calls share one pass over each log."""
        self._ended: dict[str, asyncio.Task[JobRecord]] = {}
        """Running reads of ended jobs, which concurrent callers share."""

    async def record(self, job_id: str, *, rows: bool = True) -> JobRecord:
        """Read a job's record. Without `rows`, those of a long result are skipped. Raises UnknownJob, Unavailable."""
        return await self._known(_record_call(job_id), rows=rows)

    async def outline(self, job_id: str, tenant: str = "") -> JobRecord:
        """Read a job's record without the rows of a long result. With `tenant`, a job of another tenant is unknown.

        Raises UnknownJob, Unavailable.
        """
        return await self._known(_record_call(job_id, results=False, tenant=tenant))

    async def _known(self, call: Call, *, rows: bool = True) -> JobRecord:
        _, partition, args = call
        record = await self._read(str(args[0]), *await self._records.call(partition, *args), rows=rows)
        if record is None:
            raise UnknownJob(str(args[0]))
        return await self._with_tokens(record) or record

    async def ended(self, job_id: str) -> JobRecord:
        """Read the record of a job that the caller knows to have ended. Raises UnknownJob, Unavailable."""
        reading = self._ended.get(job_id)
        if reading is None:
            reading = self._ended[job_id] = asyncio.create_task(self.record(job_id))
            reading.add_done_callback(partial(self._read_out, job_id))
        return await asyncio.shield(reading)

    async def with_rows(self, record: JobRecord) -> JobRecord:
        """Return the record of a job that has ended, with the deltas of its result. Raises UnknownJob, Unavailable."""
        return await self.ended(record.job.id) if record.rowless else record

    def _read_out(self, job_id: str, reading: asyncio.Task[JobRecord]) -> None:
        del self._ended[job_id]
        if not reading.cancelled():
            reading.exception()  # every waiting caller may have been cancelled: mark the error as retrieved

    async def records(
        self, job_ids: Sequence[str], *, bodies: bool = True, resultless: Container[str] = ()
    ) -> list[JobRecord | None]:
        """Read many records: None for a job that is not kept, a failed one for an unreadable record. Without `bodies`,
        each job has only the fields beside its body. Long results of the `resultless` jobs are not fetched. Raises
        Unavailable."""
        found: list[JobRecord | None] = []
        for first in range(0, len(job_ids), PAGE):
            part = job_ids[first : first + PAGE]
            calls = [_record_call(job_id, bodies=bodies, results=job_id not in resultless) for job_id in part]
            answers = await self._client.calls(calls)
            rows = 0
            answered = zip(part, answers, strict=True)
            read = [await self._read(job_id, *answer, bodies=bodies) for job_id, answer in answered]
            # Together: they share one pass over each log.
            for record in await asyncio.gather(*(self._with_tokens(each, bodies=bodies) for each in read)):
                found.append(record)
                rows += len(record.terminal.rows) if record is not None and record.terminal is not None else 0
                if rows >= ROWS_AT_ONCE:
                    rows = 0
                    await asyncio.sleep(0)
        return found

    async def _read(
        self, job_id: str, fields: Sequence[bytes], epoch: bytes | None, *, bodies: bool = True, rows: bool = True
    ) -> JobRecord | None:
        """Parse a record. An unreadable one fails its own job, not the caller's read. Raises Unavailable."""
        end = None
        if result := _long_result(fields):
            end = await self._client.turns.run(read_end(job_id, *result if rows else result[:1]))
        try:
            return parse_record(job_id, fields, epoch, bodies=bodies, end=end)
        except MalformedJob as error:
            return malformed_record(job_id, fields, await fail_malformed(self._client, job_id, error))

    async def _with_tokens(self, record: JobRecord | None, *, bodies: bool = True) -> JobRecord | None:
        """The record as it is; but of a job that a script ended, store the logged tokens, and return its record with
        them. If a worker of a newer version wrote them, they are left to a process of that version. Raises
        Unavailable."""
        if record is None or not was_cut_short(record):
            return record
        job_id = record.job.id
        try:
            history = await self.history(job_id, record.runs)
        except NewerMessage as error:
            log.debug("the tokens of an ended job are left to a newer version: %s", error, extra={"job": job_id})
            return record
        job = record.job if bodies else await self._job(record)
        end = salvaged(replace(record, job=job), history)
        named = "".join([f"{each.run.worker}:{each.frame}:{each.run.number};" for each in record.runs])
        _, partition, args = _record_call(job_id, bodies=bodies)
        counts = end.usage.completion, end.usage.prompt, end.usage.cached
        stored = (record.state, named, encode(without_rows(end)), record_rows(end), *counts)
        await self._client.call("salvage", partition, job_id, *stored)
        return await self._read(job_id, *await self._records.call(partition, *args), bodies=bodies)

    async def _job(self, record: JobRecord) -> Job:
        """The job as it was put; only what is known beside it, if that can be read no more. Raises Unavailable."""
        _, partition, args = _record_call(record.job.id)
        found = await self._read(record.job.id, *await self._records.call(partition, *args))
        return record.job if found is None or found.fault else found.job

    async def position(self, record: JobRecord, old_s: float = 0.0) -> QueuePosition:
        """The job's position in the order of the queue. The answer may be `old_s` old, so that one read serves many
        callers. Raises Unavailable."""
        if record.state is not JobState.QUEUED or record.held:
            return FIRST
        partition, job = partition_of(record.job.id) or 0, record.job
        queue = record.queue if record.queue in REQUEUED else "lane"
        lane = partition_key(partition, queue, job.model, job.priority)
        return await self._positions.find(partition, lane, job.tenant, record.entry, old_s)

    async def again(self, record: JobRecord) -> JobRecord:
        """Read the job's record again; while it waits, without its body. Raises UnknownJob, Unavailable."""
        job_id = record.job.id
        state, queue, epoch, entry = await self._stands.call(partition_of(job_id) or 0, job_id)
        if state != b"queued":
            return await self.record(job_id)
        epoch, queue, entry = int(epoch or 0) + 1, (queue or b"").decode(), (entry or b"").decode()
        return replace(record, state=JobState.QUEUED, queue=queue, entry=entry, epoch=epoch)

    async def was_known(self, tenant: str, job_id: str) -> bool:
        """Whether a job that is no longer kept was this tenant's. Raises Unavailable."""
        partition = partition_of(job_id) or 0
        jobs = partition_key(partition, "jobs", tenant)
        return await self._client.call("ZSCORE", partition, jobs, job_id) is not None


def _record_call(job_id: str, *, bodies: bool = True, results: bool = True, tenant: str = "") -> Call:
    args = (job_id, "" if bodies else "1", "" if results else LONG_BYTES, tenant)
    return ("record", partition_of(job_id) or 0, args)


def _long_result(fields: Sequence[bytes]) -> tuple[bytes, bytes] | None:
    """The record and the rows of a job that has ended, if they are long."""
    raw = {} if isinstance(fields, bytes) else dict(zip(fields[::2], fields[1::2], strict=True))
    rows = raw.get(b"rows", b"")
    return (raw.get(b"record", b""), rows) if len(rows) >= LONG_BYTES else None


async def fail_malformed(client: RedisClient, job_id: str, error: Exception) -> int:
    """Fail a job whose record cannot be read, unless it has ended, so that nobody waits for it. Returns when it ended
    (ms), 0 if it is not kept. Raises Unavailable."""
    log.error("the record of a job cannot be read, the job fails: %s", error, extra={"job": job_id})
    return int(await client.call("fail_malformed", partition_of(job_id) or 0, job_id, str(error)))


FIELDS = (
    *(b"state", b"lane", b"attempt", b"created", b"claimed", b"started", b"done", b"keep", b"reason", b"record"),
    *(b"metadata", b"epoch", b"runs", b"endpoint", b"cancel", b"preview", b"adapter", b"not_before"),
    b"entry",
)
"""What lists read of a job."""

MAX_LOOKED = 250
"""Jobs read in one round from all partitions together, but from each at least the page's limit. The server is blocked
meanwhile."""
MAX_ROUNDS = 4
"""Maximum rounds of reads for one page: with a filter that few jobs pass, it may be short and still have more."""

PageKey: TypeAlias = tuple[int, str]
"""A job's key in the list of a tenant's jobs: the time (ms) of its acceptance, or of its start + LATER_MS; its id."""
LATER_MS = 10**14
"""As in streaming/lua/shared/waiting.lua."""


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
    """Jobs, newest first, without bodies and rows, and the key behind which the next page begins; None: that is
    all.

    A page reads a bounded number of jobs, in a few rounds of one call per partition. So it may be short, or empty, if
    few jobs are in the requested state; it always has a cursor for the next page, if there is one.
    """

    keyed: Sequence[tuple[PageKey, JobRecord]]
    """Each job behind its key, which its record does not tell once it has ended."""
    behind: PageKey | None

    @property
    def jobs(self) -> list[JobRecord]:
        return [job for _, job in self.keyed]


class Summaries(ClientUser):
    """Reads job lists."""

    async def recent(
        self,
        tenants: Sequence[str],
        before: PageKey | None,
        limit: int,
        wanted: JobFilter = ANY,
        passes: Callable[[JobRecord], bool] = lambda _: True,
    ) -> JobPage:
        """Read a page of these tenants' jobs behind `before`, newest first: of those that the store finds, the ones
        that pass. Raises Unavailable."""
        found: list[tuple[PageKey, JobRecord]] = []
        for _ in range(MAX_ROUNDS):
            rounds = await asyncio.gather(*(self._round(tenant, before, limit, wanted) for tenant in tenants))
            page = merged(rounds, limit)
            found, before = [*found, *(each for each in page.keyed if passes(each[1]))], page.behind
            if len(found) > limit:
                return JobPage(found[:limit], found[limit - 1][0])
            if before is None or len(found) == limit:
                break
        return JobPage(found, before)

    async def _round(self, tenant: str, before: PageKey | None, limit: int, wanted: JobFilter) -> JobPage:
        horizon = await self._client.now_ms() - 2000 * self._client.settings.retention_s
        time, job_id = before or ("", "")
        looked = max(limit, MAX_LOOKED // len(self._client.partitions))
        times = ["" if ms is None else ms for ms in (wanted.since_ms, wanted.until_ms)]
        filters = (wanted.state or "", wanted.model, wanted.lane or "", *times)
        args = (tenant, horizon, time, job_id, looked, limit, *filters, *FIELDS)
        answers = await self._client.calls([("recent", partition, args) for partition in self._client.partitions])
        return merged([await self._part(answer, tenant) for answer in answers], limit)

    async def _part(self, answer: Sequence[Any], tenant: str) -> JobPage:
        """Decode one partition's part; fails a malformed job and shows it so. Raises Unavailable."""
        epoch, reached, *jobs = answer
        found: list[tuple[PageKey, JobRecord]] = []
        for name, time, values in jobs:
            job_id = name.decode()
            fields = [word for pair in zip(FIELDS, values, strict=True) if pair[1] is not None for word in pair]
            fields += (b"tenant", tenant.encode())  # the list that was read is the tenant's
            try:
                record = parse_record(job_id, fields, epoch, bodies=False)
                assert record is not None, "the script leaves out what has no state"
            except MalformedJob as error:
                done_ms = await fail_malformed(self._client, job_id, error)
                record = replace(malformed_record(job_id, fields, done_ms), created_ms=int(time) % LATER_MS)
            found.append(((int(time), job_id), record))
        return JobPage(found, (int(reached[0]), reached[1].decode()) if reached else None)


def merged(pages: Sequence[JobPage], limit: int) -> JobPage:
    """Merge the pages of all partitions, or of several tenants, newest first. Jobs older than the newest `behind` are
    left to the next page: that partition may have newer ones."""
    reached = max((page.behind for page in pages if page.behind is not None), default=None)
    found = [job for page in pages for job in page.keyed if reached is None or job[0] >= reached]
    found.sort(key=lambda job: job[0], reverse=True)
    behind = found[limit - 1][0] if len(found) > limit else reached
    return JobPage(found[:limit], behind)
