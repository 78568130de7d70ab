"""What is written about a job: its record, and its tokens from the log. Reading only, but for one thing: a job whose
record cannot be read is failed by whoever finds it, so that nobody waits for it.

While a job runs its tokens lie in the logs of the workers that ran it (one entry per engine step, all jobs of that
worker together); the record names each run and the frame it began with. At the end the record holds them all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from runtime.turns import ROWS_A_SLICE, Sliced, at_once
from streaming.errors import DecodeError, MalformedJob, NewerMessage, UnknownJob
from streaming.ids import partition_of
from streaming.jobs.codec import decode_in_slices, decode_job, decode_rowless, decode_terminal
from streaming.jobs.deliveries import Delivered, decode_delivered
from streaming.jobs.frames import Frame, Run
from streaming.jobs.history import ROWS_AT_ONCE, Histories, History, HistoryRequest, LoggedRun, read_log
from streaming.jobs.job import Job, JobState, Text
from streaming.jobs.places import QueuePositions
from streaming.jobs.terminal import Failure, Generated, Terminal
from streaming.keys import parse_lane, partition_key
from streaming.priority import Priority
from streaming.redis.batcher import ScriptBatcher
from streaming.redis.client import Call, RedisClient, translated
from telemetry.latency import Stamps

log = logging.getLogger(__name__)

MAX_NUMBER = 10**18
"""What the scripts take for a number of a record is less."""
MAX_FRAME = 10**15
PAGE = 100
"""Records read, and then parsed, before others have their turn."""

LONG_BYTES = 64 * 1024
"""A result of so many bytes is read in slices, a millisecond or two of work, and only by those who want its rows."""

NEWER = Failure(
    "newer_version",
    "A newer version of Penstock wrote this job, and this process cannot read it. Ask again: another process may.",
    503,
)
MALFORMED = Failure("malformed_job", "What the store holds of this job cannot be read. Send the request again.", 500)

REASONS = {
    "cancelled": Failure("job_cancelled", "The job was cancelled.", 409),
    "deadline_exceeded_in_queue": Failure(
        "deadline_exceeded_in_queue", "The job's time ran out while it waited for a worker.", 408
    ),
    "attempts_exhausted": Failure(
        "attempts_exhausted", "Every worker that took this job was lost; it was given up.", 500
    ),
    "malformed": MALFORMED,
    "poison": Failure("poison", "Workers die of this job, the last one with nothing beside it; it was given up.", 500),
}


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as it stands. Times are Redis milliseconds, 0 for "not yet"."""

    job: Job
    state: JobState
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
    """Of its events: grows when the store was found to have lost data, and when the job begins anew."""
    resets: int
    """The job's own part of it."""
    keep_s: int
    runs: tuple[LoggedRun, ...]
    addresses: tuple[str, ...]
    """Where its tokens are sent to."""
    terminal: Terminal | None
    """Of a job that has ended."""
    stamps: Stamps = field(default_factory=Stamps)
    """Microseconds of Redis time. Those of the answer are there when `delivered` is."""
    delivered: Delivered | None = None
    """When its answer was handed on, if somebody waited for it."""
    fault: str = ""
    """Why its body cannot be read: `job` then holds only what stands beside the body."""

    @property
    def rowless(self) -> bool:
        """Whether the rows of its end were left out."""
        return self.terminal is not None and self.terminal.seq > 0 and not self.terminal.rows

    @property
    def completed(self) -> bool:
        """Whether there is a result, as far as it has been read."""
        return self.terminal is not None and self.state is self.terminal.state is JobState.COMPLETED

    @property
    def newer(self) -> bool:
        """Whether the end of the job is there, but only a newer version can read it."""
        return self.terminal is not None and self.terminal.failure is NEWER


class JobReader:
    """Many may share a wire; single records asked of one of them are read together."""

    def __init__(self, wire: RedisClient) -> None:
        self._wire = wire
        self._records, self._stands = ScriptBatcher(wire, "record"), ScriptBatcher(wire, "stand")
        self._places, self._histories = QueuePositions(wire), Histories(wire)
        self._ended: dict[str, asyncio.Task[JobRecord]] = {}
        """Reads of jobs that had ended before, which serve all who ask meanwhile."""

    async def record(self, job_id: str, *, rows: bool = True) -> JobRecord:
        """Without `rows` those of a long result are passed over. Raises UnknownJob, Unavailable."""
        _, partition, args = _record_call(job_id)
        record = await self._read(job_id, *await self._records.call(partition, *args), rows=rows)
        if record is None:
            raise UnknownJob(job_id)
        return record

    async def outline(self, job_id: str, tenant: str = "") -> JobRecord:
        """The same, but that a long result is not fetched at all: its end then has neither rows nor `generated`. With
        `tenant`: one of another's is not fetched either. Raises UnknownJob (also of another tenant's), Unavailable."""
        _, partition, args = _record_call(job_id, results=False, tenant=tenant)
        record = await self._read(job_id, *await self._records.call(partition, *args))
        if record is None:
            raise UnknownJob(job_id)
        return record

    async def ended(self, job_id: str) -> JobRecord:
        """The record of a job that has ended, as the caller knows. Raises UnknownJob, Unavailable."""
        reading = self._ended.get(job_id)
        if reading is None:
            reading = self._ended[job_id] = asyncio.create_task(self.record(job_id))
            reading.add_done_callback(partial(self._read_out, job_id))
        return await asyncio.shield(reading)

    def _read_out(self, job_id: str, reading: asyncio.Task[JobRecord]) -> None:
        del self._ended[job_id]
        if not reading.cancelled():
            reading.exception()  # nobody may have waited for it to the end

    async def records(
        self, job_ids: Sequence[str], *, bodies: bool = True, resultless: Container[str] = ()
    ) -> list[JobRecord | None]:
        """Many at once; None for one that is not kept, a failed one for one that cannot be read. Without `bodies` the
        job of each is only what stands beside its body; of the `resultless` a long result is not fetched. Raises
        Unavailable."""
        found: list[JobRecord | None] = []
        for first in range(0, len(job_ids), PAGE):
            part = job_ids[first : first + PAGE]
            calls = [_record_call(job_id, bodies=bodies, results=job_id not in resultless) for job_id in part]
            answers = await self._wire.calls(calls)
            rows = 0
            for job_id, answer in zip(part, answers, strict=True):
                record = await self._read(job_id, *answer, bodies=bodies)
                found.append(record)
                rows += len(record.terminal.rows) if record is not None and record.terminal is not None else 0
                if rows >= ROWS_AT_ONCE:
                    rows = 0
                    await asyncio.sleep(0)
        return found

    async def _read(
        self, job_id: str, fields: Sequence[bytes], epoch: bytes | None, *, bodies: bool = True, rows: bool = True
    ) -> JobRecord | None:
        """A record that cannot be read fails its own job, and nobody else's read. Raises Unavailable."""
        end = None
        if result := _long_result(fields):
            end = await self._wire.turns.run(_end(job_id, result, rows=rows))
        try:
            return parse_record(job_id, fields, epoch, bodies=bodies, end=end)
        except MalformedJob as error:
            return _malformed(job_id, fields, await fail_malformed(self._wire, job_id, error))

    async def history(self, job_id: str, runs: Sequence[LoggedRun]) -> History:
        """What these runs of a job have logged; jobs asked for at the same time share one pass over each log.

        Raises Unavailable, NewerMessage (one of its workers is of a newer version).
        """
        return await self._histories.read(HistoryRequest(job_id, runs))

    def frames(self, partition: int, worker: str, first: int) -> AsyncGenerator[Frame, None]:
        """A worker's log from frame `first` on: every frame of every reply address. One that cannot be read is left
        out. Raises Unavailable, NewerMessage."""
        return read_log(self._wire, partition, worker, first)

    async def position(self, record: JobRecord, old_s: float = 0.0) -> int:
        """How many jobs of the same lane come first (at most 1000 are counted), as it was at most `old_s` ago: then one
        look serves all who ask. Raises Unavailable."""
        if record.state is not JobState.QUEUED:
            return 0
        return await self._places.before(partition_of(record.job.id) or 0, record.lane, record.entry, old_s)

    async def again(self, record: JobRecord) -> JobRecord:
        """The same job as it stands now; while it waits its body is not read again. Raises UnknownJob, Unavailable."""
        job_id = record.job.id
        state, lane, entry, epoch = await self._stands.call(partition_of(job_id) or 0, job_id)
        if state != b"queued":
            return await self.record(job_id)
        return replace(
            record, state=JobState.QUEUED, lane=lane.decode(), entry=entry.decode(), epoch=int(epoch or 0) + 1
        )

    async def was_known(self, tenant: str, job_id: str) -> bool:
        """Whether a job that is no longer kept was this tenant's. Raises Unavailable."""
        key = partition_key(partition_of(job_id) or 0, "jobs", tenant)
        with translated():
            return await self._wire.redis.zscore(key, job_id) is not None


def _record_call(job_id: str, *, bodies: bool = True, results: bool = True, tenant: str = "") -> Call:
    args = (job_id, "" if bodies else "1", "" if results else LONG_BYTES, tenant)
    return ("record", partition_of(job_id) or 0, args)


def _long_result(fields: Sequence[bytes]) -> bytes:
    """What a worker wrote of a job's end, if it is long; else b""."""
    if isinstance(fields, bytes) or b"record" not in fields[::2]:
        return b""
    result = fields[2 * fields[::2].index(b"record") + 1]
    return result if len(result) >= LONG_BYTES else b""


def parse_record(
    job_id: str, fields: Sequence[bytes], epoch: bytes | None, *, bodies: bool = True, end: Terminal | None = None
) -> JobRecord | None:
    """The fields of a job hash, each before its value, and its partition's epoch, as a Record; None if there is none.
    `end`: its result, where that has been decoded already.

    Raises MalformedJob.
    """
    if isinstance(fields, bytes):
        raise MalformedJob("the key holds no hash")
    try:
        return _parsed(job_id, fields, epoch, bodies=bodies, end=end)
    except (DecodeError, ValueError, OverflowError, LookupError, TypeError) as error:
        raise MalformedJob(f"{type(error).__name__}: {error}") from error


def _parsed(
    job_id: str, fields: Sequence[bytes], epoch: bytes | None, *, bodies: bool, end: Terminal | None
) -> JobRecord | None:
    """Raises what a record that is not ours makes the parts of it raise."""
    raw = {name.decode(): value for name, value in zip(fields[::2], fields[1::2], strict=True)}
    state_bytes, body = raw.get("state"), raw.get("body") if bodies else b""
    if state_bytes is None or body is None:
        return None
    state = JobState(state_bytes.decode())

    def number(name: str) -> int:
        return read_number(raw.get(name))

    def word(name: str) -> str:
        return raw.get(name, b"").decode()

    terminal = end or end_of(job_id, state, raw.get("record") or raw.get("summary"), word("reason"))
    job, fault = _job(job_id, body, word) if bodies else (_beside(job_id, word), "")
    return JobRecord(
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
        epoch=int(epoch or 0) + 1 + number("epoch"),
        resets=number("epoch"),
        keep_s=number("keep"),
        runs=parse_runs(word("runs")),
        addresses=tuple(word("reply").split(",")) if raw.get("reply") else (),
        terminal=terminal,
        stamps=stamps_of(job, state, raw, terminal),
        delivered=_delivered(raw.get("delivered")),
        fault=fault,
    )


def end_of(job_id: str, state: JobState, data: bytes | None, reason: str) -> Terminal | None:
    """The end of a job, None if it has not ended; of one that cannot be read, that it cannot. `data`: its record or its
    summary, if a worker wrote one; `reason`: why it ended without."""
    if not data:
        return Terminal(job_id, state, 0, failure=REASONS.get(reason)) if state.final else None
    return at_once(_end(job_id, data))


def _end(job_id: str, data: bytes, *, rows: bool = True) -> Sliced[Terminal]:
    """What a worker wrote of a job's end. Where that cannot be read, that it cannot."""
    try:
        if len(data) < LONG_BYTES:
            return decode_terminal(data)
        return (yield from decode_in_slices(data, ROWS_A_SLICE)) if rows else decode_rowless(data)
    except NewerMessage:
        return Terminal(job_id, JobState.FAILED, 0, failure=NEWER)
    except DecodeError as error:
        log.error("the result of a job cannot be read: %s", error, extra={"job": job_id})
        return malformed_end(job_id)


def malformed_end(job_id: str) -> Terminal:
    """The end of a job of which something cannot be read."""
    return Terminal(job_id, JobState.FAILED, 0, failure=MALFORMED)


async def fail_malformed(wire: RedisClient, job_id: str, error: Exception) -> int:
    """Fail a job whose record cannot be read, unless it has ended, so that nobody waits for it. Returns when it ended
    (ms), 0 if it is not kept. Raises Unavailable."""
    log.error("the record of a job cannot be read, the job fails: %s", error, extra={"job": job_id})
    return int(await wire.call("fail_malformed", partition_of(job_id) or 0, job_id, str(error)))


def _delivered(data: bytes | None) -> Delivered | None:
    """Only people who look at the timing miss one that cannot be read."""
    try:
        return decode_delivered(data) if data else None
    except DecodeError:
        return None


def malformed_keep_s(data: bytes | None) -> int:
    """How long a job whose record cannot be read is kept after its end, as the script that fails it decides."""
    return int(data) if data and data.isdigit() and len(data) < 16 else 3600


def _malformed(job_id: str, fields: Sequence[bytes], done_ms: int) -> JobRecord:
    """What is shown of a job whose record cannot be read: its id, whose it is, that it failed, and when."""
    words = list(fields) if not isinstance(fields, bytes) else []
    raw = dict(zip(words[::2], words[1::2], strict=False))
    tenant = raw.get(b"tenant", b"").decode(errors="replace")
    job = Job(id=job_id, model="", tenant=tenant, priority=Priority.BATCH, prompt=Text(("",)))
    return JobRecord(
        job=job,
        state=JobState.FAILED,
        attempt=0,
        worker="",
        lane="",
        entry="",
        created_ms=0,
        started_ms=0,
        first_ms=0,
        done_ms=done_ms,
        deadline_ms=0,
        epoch=1,
        resets=0,
        keep_s=malformed_keep_s(raw.get(b"keep")),
        runs=(),
        addresses=(),
        terminal=malformed_end(job_id),
        fault=MALFORMED.message,
    )


def stamps_of(job: Job, state: JobState, raw: Mapping[str, bytes], terminal: Terminal | None) -> Stamps:
    """What is written of a job's way, but for its answer's; see `with_delivery`."""

    def exact(name: str) -> int | None:
        return round(float(raw.get(name) or 0) * 1000) or None

    generated = terminal.generated if terminal else Generated()
    return Stamps(
        received=job.received_us or None,
        accepted=exact("created"),
        started=exact("started") or exact("claimed"),
        claimed=None if state is JobState.QUEUED else exact("claimed"),  # else the claim of a worker that was lost
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


def _job(job_id: str, body: bytes, word: Callable[[str], str]) -> tuple[Job, str]:
    """The job as it was put, and ""; of one whose body cannot be read what stands beside the body, so that it can be
    shown, and why."""
    try:
        return decode_job(body), ""
    except DecodeError as error:
        return _beside(job_id, word), str(error)


def _beside(job_id: str, word: Callable[[str], str]) -> Job:
    """What a record says of a job beside its body."""
    model, priority = parse_lane(word("lane"))
    return Job(id=job_id, model=model, tenant=word("tenant"), priority=priority, prompt=Text(("",)))


def read_number(data: bytes | None) -> int:
    """A number of a record, 0 where there is none, as the scripts take it for one. Raises ValueError."""
    found = float(data or 0)
    if not 0 <= found < MAX_NUMBER:
        raise ValueError(f"{data!r} is out of range")
    return int(found)


def parse_runs(text: str) -> tuple[LoggedRun, ...]:
    """`worker:frame:number;worker:frame:number;` as written by the claim script. Raises ValueError."""
    parts = [part.split(":") for part in text.split(";")[:-1]]
    runs = tuple(LoggedRun(Run(worker, int(number)), int(frame)) for worker, frame, number in parts)
    if not all(0 <= run.frame < MAX_FRAME for run in runs):
        raise ValueError("the number of a frame is out of range")
    return runs
