"""What is written about a job: its record, and its tokens from the log. Reading only.

While a job runs its tokens lie in the logs of the workers that ran it (one entry per engine step, all jobs of that
worker together); the record names each run and the frame it began with. At the end the record holds them all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from streaming.bundle import Bundle
from streaming.errors import DecodeError, UnknownJob
from streaming.keys import parse_lane, partition_key, partition_of
from streaming.listing import page
from streaming.messages import (
    Delivered,
    Delta,
    Failure,
    Frame,
    Generated,
    Job,
    State,
    Terminal,
    Text,
    decode_delivered,
    decode_job,
    decode_reply,
    decode_terminal,
)
from streaming.wire import Call, Wire, translated
from telemetry.latency import Stamps

PAGE = 500

REASONS = {
    "cancelled": Failure("job_cancelled", "The job was cancelled.", 409),
    "deadline_exceeded_in_queue": Failure(
        "deadline_exceeded_in_queue", "The job's time ran out while it waited for a worker.", 408
    ),
    "attempts_exhausted": Failure(
        "attempts_exhausted", "Every worker that took this job was lost; it was given up.", 500
    ),
    "poison": Failure("poison", "Workers die of this job, the last one with nothing beside it; it was given up.", 500),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One attempt: the worker and the number of the first frame that may hold its tokens."""

    worker: str
    frame: int


@dataclass(frozen=True, slots=True)
class Record:
    """A job as it stands. Times are Redis milliseconds, 0 for "not yet"."""

    job: Job
    state: State
    attempt: int
    worker: str
    lane: str
    entry: str
    created_ms: int
    started_ms: int
    first_ms: int
    done_ms: int
    deadline_ms: int
    epoch: int
    keep_s: int
    runs: tuple[Run, ...]
    readers: int
    """Addresses its tokens are sent to."""
    terminal: Terminal | None
    """Of a job that has ended."""
    stamps: Stamps = field(default_factory=Stamps)
    """Microseconds of Redis time. Those of the answer are there when `delivered` is."""
    delivered: Delivered | None = None
    """When its answer was handed on, if somebody waited for it."""


class Journal:
    """Many may share a wire; single records asked of one of them are read together."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._records = Bundle(wire, "record")

    async def record(self, job_id: str) -> Record:
        """Raises UnknownJob, Unavailable."""
        _, partition, args = _record_call(job_id)
        record = parse_record(job_id, *await self._records.call(partition, *args))
        if record is None:
            raise UnknownJob(job_id)
        return record

    async def records(self, job_ids: Sequence[str]) -> list[Record | None]:
        """Many at once; None for one that is not kept. Raises Unavailable."""
        found: list[Any] = []
        for first in range(0, len(job_ids), PAGE):
            found += await self._wire.calls([_record_call(job_id) for job_id in job_ids[first : first + PAGE]])
        return [parse_record(job_id, *item) for job_id, item in zip(job_ids, found, strict=True)]

    async def deltas(self, record: Record, after: int = 0) -> list[Delta]:
        """The job's deltas with seq > after, in order, as far as they are logged. Raises Unavailable."""
        if record.terminal is not None and record.terminal.rows:
            return [row for row in record.terminal.rows if row.seq > after]
        logged = await self._logged(record, after)
        # It may have ended since its record was read: then its log may be trimmed, and a new record holds them all.
        (now,) = await self.records([record.job.id])
        if now is not None and now.terminal is not None and now.terminal.rows:
            return [row for row in now.terminal.rows if row.seq > after]
        return logged

    async def _logged(self, record: Record, after: int) -> list[Delta]:
        rows: dict[int, Delta] = {}
        job_id = record.job.id
        for run in record.runs:
            ours: set[int] = set()
            async for frame in self.frames(partition_of(job_id) or 0, run.worker, run.frame):
                ours.update(number for number, name in frame.names.items() if name == job_id)
                rows |= {row.seq: row for row in frame.rows if row.stream in ours and row.seq > after}
        return [rows[seq] for seq in sorted(rows)]

    async def frames(self, partition: int, worker: str, first: int) -> AsyncIterator[Frame]:
        """A worker's log from frame `first` on: every frame of every reply address. Raises Unavailable."""
        key = partition_key(partition, "log", worker)
        start = f"{first}-0"
        while True:
            with translated():
                entries = await cast(Awaitable[Any], self._wire.redis.xrange(key, start, "+", count=PAGE))
            for _, fields in entries:
                for data in fields.values():
                    reply = decode_reply(data)
                    if isinstance(reply, Frame):
                        yield reply
            if len(entries) < PAGE:
                return
            start = f"({entries[-1][0].decode()}"

    async def position(self, record: Record) -> int:
        """How many jobs of the same lane come first (at most 1000 are counted). Raises Unavailable."""
        if record.state is not State.QUEUED:
            return 0
        redis = self._wire.redis
        with translated():
            groups = (
                await cast(Awaitable[Any], redis.xinfo_groups(record.lane)) if await redis.exists(record.lane) else []
            )
            last = groups[0]["last-delivered-id"].decode() if groups else "0-0"
            before = await cast(Awaitable[Any], redis.xrange(record.lane, f"({last}", f"({record.entry}", count=1000))
        return len(before)

    async def recent(self, tenant: str, before: tuple[int, str] | None, limit: int) -> list[tuple[str, int]]:
        """A tenant's job ids with their acceptance time (ms), newest first, behind `before` (time, id).

        Raises Unavailable.
        """
        horizon = await self._wire.now_ms() - 2000 * self._wire.settings.retention_s
        found: list[tuple[str, int]] = []
        for partition in self._wire.partitions:
            key = partition_key(partition, "jobs", tenant)
            with translated():
                await self._wire.redis.zremrangebyscore(key, "-inf", horizon)
            found += await page(self._wire, key, before, limit)
        return sorted(found, key=lambda item: (item[1], item[0]), reverse=True)[:limit]

    async def was_known(self, tenant: str, job_id: str) -> bool:
        """Whether a job that is no longer kept was this tenant's. Raises Unavailable."""
        key = partition_key(partition_of(job_id) or 0, "jobs", tenant)
        with translated():
            return await self._wire.redis.zscore(key, job_id) is not None


def _record_call(job_id: str) -> Call:
    return ("record", partition_of(job_id) or 0, (job_id,))


def parse_record(job_id: str, fields: Sequence[bytes], epoch: bytes | None) -> Record | None:
    """The fields of a job hash, each before its value, and its partition's epoch, as a Record; None if there is none.

    Raises DecodeError.
    """
    raw = {name.decode(): value for name, value in zip(fields[::2], fields[1::2], strict=True)}
    state_bytes, body = raw.get("state"), raw.get("body")
    if state_bytes is None or body is None:
        return None
    state = State(state_bytes.decode())

    def number(name: str) -> int:
        return int(float(raw.get(name) or 0))

    def word(name: str) -> str:
        return raw.get(name, b"").decode()

    terminal = None
    if raw.get("record"):
        terminal = decode_terminal(raw["record"])
    elif state.final:
        terminal = Terminal(job_id, state, 0, failure=REASONS.get(word("reason")))
    job = _job(job_id, body, word)
    delivered = decode_delivered(raw["delivered"]) if raw.get("delivered") else None
    return Record(
        job=job,
        state=state,
        attempt=number("attempt"),
        worker=word("worker"),
        lane=word("lane"),
        entry=word("entry"),
        created_ms=number("created"),
        started_ms=number("started") or number("claimed"),
        first_ms=terminal.first_ms if terminal else 0,
        done_ms=number("done"),
        deadline_ms=number("deadline"),
        epoch=int(epoch or 0) + 1,
        keep_s=number("keep"),
        runs=parse_runs(word("runs")),
        readers=len(word("reply").split(",")) if raw.get("reply") else 0,
        terminal=terminal,
        stamps=stamps_of(job, state, raw, terminal),
        delivered=delivered,
    )


def stamps_of(job: Job, state: State, raw: Mapping[str, bytes], terminal: Terminal | None) -> Stamps:
    """What is written of a job's way, but for its answer's; see `with_delivery`."""

    def exact(name: str) -> int | None:
        return round(float(raw.get(name) or 0) * 1000) or None

    generated = terminal.generated if terminal else Generated()
    return Stamps(
        received=job.received_us or None,
        accepted=exact("created"),
        started=exact("started") or exact("claimed"),
        claimed=None if state is State.QUEUED else exact("claimed"),  # else the claim of a worker that was lost
        released=generated.released or None,
        scheduled=generated.scheduled or None,
        first_token=generated.first or None,
        last_token=generated.last or None,
        ended=exact("done"),
    )


def with_delivery(stamps: Stamps, delivered: Delivered) -> Stamps:
    """The stamps of a job with those of its answer."""
    return replace(
        stamps,
        first_got=delivered.first_got or None,
        first_sent=delivered.first_sent or None,
        last_got=delivered.last_got or None,
        last_sent=delivered.last_sent or None,
    )


def _job(job_id: str, body: bytes, word: Callable[[str], str]) -> Job:
    """The job as it was put; of one that nobody can read, what stands beside its body, so that it can be shown."""
    try:
        return decode_job(body)
    except DecodeError:
        model, priority = parse_lane(word("lane"))
        return Job(id=job_id, model=model, tenant=word("tenant"), priority=priority, prompt=Text(("",)))


def parse_runs(text: str) -> tuple[Run, ...]:
    """`worker:frame;worker:frame;` as written by the claim script."""
    return tuple(
        Run(worker, int(frame)) for worker, _, frame in (part.rpartition(":") for part in text.split(";")[:-1])
    )
