"""Job records: what the store keeps of each job, and the parser of it.

While a job runs, its tokens are in the logs of the workers that ran it (one entry per engine step, with all jobs of
that worker). The record names each run and its first frame. When the job has ended, the record holds all tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from penstock.engine import Failure
from penstock.loops import ROWS_PER_SLICE, Sliced, at_once
from streaming.errors import DecodeError, MalformedJob, NewerMessage
from streaming.jobs.attempts import MAX_ATTEMPTS, attempt_log
from streaming.jobs.codec import decode_in_slices, decode_job, decode_metadata, decode_rowless, decode_terminal
from streaming.jobs.deliveries import Delivered, decode_delivered
from streaming.jobs.frames import Run
from streaming.jobs.history import LoggedRun
from streaming.jobs.job import CancelledBy, Endpoint, Job, JobState, PastAttempt, Text
from streaming.jobs.terminal import Generated, Terminal
from streaming.keys import parse_lane
from streaming.priority import Priority
from telemetry.latency import Stamps

log = logging.getLogger(__name__)

MAX_NUMBER = 10**18
"""The scripts treat only smaller values as valid numbers of a record."""
MAX_FRAME = 10**15

LONG_BYTES = 64 * 1024
"""A result of at least this size is decoded in slices of a few ms, and only for callers who want its rows."""

NEWER = Failure(
    "newer_version",
    "A newer version of Penstock wrote this job, and this process cannot read it. Ask again: another process may.",
    503,
)
MALFORMED = Failure("malformed_job", "What the store holds of this job cannot be read. Send the request again.", 500)

REASONS = {
    "cancelled": Failure("job_cancelled", "The job was cancelled.", 409),
    "deadline_exceeded_in_queue": Failure("deadline_exceeded_in_queue", "", 408),  # its words: expired_in_queue
    "attempts_exhausted": Failure(
        "attempts_exhausted", "Every worker that took this job was lost; it was given up.", 500
    ),
    "malformed": MALFORMED,
    "poison": Failure(
        "poison", "Each worker that ran this job died, the last one while it ran nothing else. It was given up.", 500
    ),
}


class Interruption(NamedTuple):
    """The end of an attempt that did not end its job. `place`: of its run among the job's, counted from 1."""

    place: int
    attempt: PastAttempt


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job's present state. Times are Redis milliseconds, 0 for "not yet"."""

    job: Job
    state: JobState
    attempt: int = 0
    worker: str = ""
    lane: str = ""
    entry: str = ""
    created_ms: int = 0
    started_ms: int = 0
    first_ms: int = 0
    done_ms: int = 0
    deadline_ms: int = 0
    epoch: int = 1
    """Of its events: grows when the store was found to have lost data, and when the job begins anew."""
    resets: int = 0
    """The job's own part of it."""
    has_lost: bool = False
    """The store has lost data since a response was accepted: its readers may have events that are lost, and the numbers
    of these may have come again for others. Not known of jobs of other endpoints."""
    endpoint: Endpoint = Endpoint.CHAT
    """Whose request it is."""
    keep_s: int
    runs: tuple[LoggedRun, ...] = ()
    attempts_by_run: Mapping[Run, PastAttempt] = field(default_factory=dict)
    """What became of each attempt, oldest first; the newest twenty."""
    addresses: tuple[str, ...] = ()
    """Where its tokens are sent to."""
    terminal: Terminal | None
    """How it ended; None while it has not."""
    unrecorded: bool = False
    """A script ended it, and its tokens are not in its record."""
    stamps: Stamps = field(default_factory=Stamps)
    """Microseconds of Redis time; without those in `delivered`."""
    delivered: Delivered | None = None
    """When its answer was sent, if a client waited for it."""
    preview: str = ""
    """The first words of its prompt; "" of a batch's line, and of a job that an older version put."""
    drafts: tuple[bytes, ...] = ()
    """The texts of a response that were given up before the present one, oldest first, each an encoded Draft."""
    fault: str = ""
    """Why its body cannot be read, or "". If it cannot, `job` has only the fields that the record holds beside it."""
    is_newer_body: bool = False
    """Whether a newer version wrote the body that cannot be read."""

    @property
    def attempts(self) -> tuple[PastAttempt, ...]:
        """The same, after the attempts at the job of which this one is a replay; the newest twenty of both."""
        return (*self.job.past, *self.attempts_by_run.values())[-MAX_ATTEMPTS:]

    def attempt_before(self, run: Run) -> PastAttempt | None:
        """The attempt that this run followed; None if it was the first, or is not known."""
        runs = list(self.attempts_by_run)
        at = runs.index(run) if run in self.attempts_by_run else 0
        return self.attempts_by_run[runs[at - 1]] if at else None

    @property
    def interruption(self) -> Interruption | None:
        """The end of the last attempt, if the job waits for another worker since then."""
        if self.state is not JobState.QUEUED or not self.runs:
            return None
        attempt = self.attempts_by_run.get(self.runs[-1].run)
        return None if attempt is None else Interruption(len(self.runs), attempt)

    @property
    def unread(self) -> Failure:
        """The failure of whoever needs the body that cannot be read."""
        return NEWER if self.is_newer_body else MALFORMED

    @property
    def rowless(self) -> bool:
        """Whether the rows of its result were not read."""
        return self.terminal is not None and self.terminal.seq > 0 and not self.terminal.rows

    @property
    def completed(self) -> bool:
        """Whether the job has a readable result."""
        return self.terminal is not None and self.state is self.terminal.state is JobState.COMPLETED

    @property
    def newer(self) -> bool:
        """Whether the job has ended, but only a newer version can read how."""
        return self.terminal is not None and self.terminal.failure is NEWER


def parse_record(
    job_id: str, fields: Sequence[bytes], epoch: bytes | None, *, bodies: bool = True, end: Terminal | None = None
) -> JobRecord | None:
    """Parse a job's hash (names and values in turn) and its partition's epoch. None if there is no such job. `end`: its
    result, if it is already decoded.

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
    """Raises any error that parsing an invalid record may cause; the caller maps them to MalformedJob."""
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
    if terminal is not None and terminal.state is JobState.CANCELLED and not terminal.cancelled_by:
        terminal = msgspec.structs.replace(terminal, cancelled_by=canceller(raw.get("cancel")))
    if terminal is not None and terminal.failure is REASONS["deadline_exceeded_in_queue"]:
        limits = number("queue_deadline"), number("deadline"), number("attempt")
        terminal = msgspec.structs.replace(terminal, failure=expired_in_queue(*limits))
    job, fault = _job(job_id, body, raw) if bodies else (_beside(job_id, raw), None)
    runs = parse_runs(word("runs"))
    last = runs[-1].run if runs else None
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
        has_lost="born" in raw and number("born") != int(epoch or 0),
        endpoint=_endpoint(word("endpoint"), job.endpoint),
        keep_s=number("keep"),
        runs=runs,
        attempts_by_run=attempt_log(raw, last, terminal),
        addresses=tuple(word("reply").split(",")) if raw.get("reply") else (),
        terminal=terminal,
        unrecorded=state.final and end is None and not (raw.get("record") or raw.get("summary")),
        stamps=stamps_of(job, state, raw, terminal),
        delivered=_delivered(raw.get("delivered")),
        preview=raw.get("preview", b"").decode(errors="replace"),
        drafts=_drafts(raw),
        fault="" if fault is None else str(fault),
        is_newer_body=isinstance(fault, NewerMessage),
    )


def expired_in_queue(queue_deadline_ms: int, deadline_ms: int, attempt: int) -> Failure:
    """Why a job ended that waited until the earlier of these times (0: none); after its first attempt, the first one
    counts no longer."""
    is_first = queue_deadline_ms and not attempt and (not deadline_ms or queue_deadline_ms <= deadline_ms)
    limit = "queue.max_queue_ms" if is_first else "queue.deadline_ms"
    return Failure(
        "deadline_exceeded_in_queue", f"The job waited for a worker until its {limit} had passed.", 408, limit
    )


def canceller(data: bytes | None) -> str:
    """Who cancelled a job, by the field `cancel` of its record; "" if that is of a version with other words for it."""
    return next((each.value for each in CancelledBy if each.value.encode() == data), "")


def _endpoint(letter: str, otherwise: Endpoint) -> Endpoint:
    """The endpoint of a record's letter; `otherwise` if it has none, or one that a newer version wrote."""
    return next((each for each in Endpoint if each == letter), otherwise)


def _drafts(raw: Mapping[str, bytes]) -> tuple[bytes, ...]:
    """Raises ValueError."""
    epochs = sorted([int(name[6:]) for name in raw if name.startswith("draft:")])
    return tuple([raw[f"draft:{epoch}"] for epoch in epochs])


def end_of(job_id: str, state: JobState, data: bytes | None, reason: str) -> Terminal | None:
    """How a job ended; None if it has not. An unreadable result counts as a failure. `data`: its record or its summary,
    if a worker wrote one; `reason`: why it ended without one."""
    if not data:
        return Terminal(job_id, state, 0, failure=REASONS.get(reason)) if state.final else None
    return at_once(read_end(job_id, data))


def read_end(job_id: str, data: bytes, *, rows: bool = True) -> Sliced[Terminal]:
    """Decode the terminal message that a worker wrote; an unreadable one counts as a failure."""
    try:
        if len(data) < LONG_BYTES:
            return decode_terminal(data)
        return (yield from decode_in_slices(data, ROWS_PER_SLICE)) if rows else decode_rowless(data)
    except NewerMessage:
        return Terminal(job_id, JobState.FAILED, 0, failure=NEWER)
    except DecodeError as error:
        log.error("the result of a job cannot be read: %s", error, extra={"job": job_id})
        return malformed_end(job_id)


def malformed_end(job_id: str) -> Terminal:
    """The terminal message of a job whose record is unreadable."""
    return Terminal(job_id, JobState.FAILED, 0, failure=MALFORMED)


def _delivered(data: bytes | None) -> Delivered | None:
    """Decode delivery times; None if they are unreadable, because only the timing needs them."""
    try:
        return decode_delivered(data) if data else None
    except DecodeError:
        return None


def malformed_keep_s(data: bytes | None) -> int:
    """How long a job whose record cannot be read is kept after its end, as the script that fails it decides."""
    return int(data) if data and data.isdigit() and len(data) < 16 else 3600


def malformed_record(job_id: str, fields: Sequence[bytes], done_ms: int) -> JobRecord:
    """The record to show for an unreadable one: id and tenant of the job, that it failed, and when."""
    words = list(fields) if not isinstance(fields, bytes) else []
    raw = dict(zip(words[::2], words[1::2], strict=False))
    tenant = raw.get(b"tenant", b"").decode(errors="replace")
    job = Job(id=job_id, model="", tenant=tenant, priority=Priority.BATCH, prompt=Text(("",)))
    return JobRecord(
        job=job,
        state=JobState.FAILED,
        done_ms=done_ms,
        keep_s=malformed_keep_s(raw.get(b"keep")),
        terminal=malformed_end(job_id),
        fault=MALFORMED.message,
    )


def stamps_of(job: Job, state: JobState, raw: Mapping[str, bytes], terminal: Terminal | None) -> Stamps:
    """The job's timestamps in its record, without those of its answer (see `with_delivery`)."""

    def exact(name: str) -> int | None:
        return round(float(raw.get(name) or 0) * 1000) or None

    generated, started = terminal.generated if terminal else Generated(), exact("started") or exact("claimed")
    claimed = exact("claimed")
    if not state.final and (state is JobState.QUEUED or claimed != started):
        claimed = None  # a lost worker's; or how long earlier attempts were of use is not known before the end
    elif claimed and "reason" in raw:
        claimed = exact("done")  # a script ended it: no attempt did
    known = Stamps(
        received=job.received_us or None,
        accepted=exact("created"),
        started=started,
        claimed=claimed,
        released=generated.released or None,
        scheduled=generated.scheduled or None,
        first_token=generated.first or None,
        last_token=generated.last or None,
        ended=exact("done"),
    )
    return known.continued(generated.shown, generated.shown_claimed, generated.kept)


def with_delivery(stamps: Stamps, delivered: Delivered) -> Stamps:
    """The stamps of a job with those of its answer."""
    return replace(
        stamps,
        first_got=delivered.first_got or None,
        first_sent=delivered.first_sent or None,
        last_got=delivered.last_got or None,
        last_sent=delivered.last_sent or None,
    )


def _job(job_id: str, body: bytes, raw: Mapping[str, bytes]) -> tuple[Job, DecodeError | None]:
    """The job as it was put; of one whose body cannot be read what stands beside the body, so that it can be shown, and
    why."""
    try:
        return decode_job(body), None
    except DecodeError as error:
        return _beside(job_id, raw), error


def _beside(job_id: str, raw: Mapping[str, bytes]) -> Job:
    """What a record says of a job beside its body; malformed metadata are left out."""
    model, priority = parse_lane(raw.get("lane", b"").decode())
    tenant, metadata = raw.get("tenant", b"").decode(), dict[str, str]()
    with suppress(DecodeError):
        metadata = decode_metadata(raw.get("metadata", b""))
    return Job(id=job_id, model=model, tenant=tenant, priority=priority, prompt=Text(("",)), metadata=metadata)


def read_number(data: bytes | None) -> int:
    """Parse a number of a record by the rules of the scripts; 0 if there is none. Raises ValueError."""
    found = float(data or 0)
    if not 0 <= found < MAX_NUMBER:
        raise ValueError(f"{data!r} is out of range")
    return int(found)


def parse_runs(text: str) -> tuple[LoggedRun, ...]:
    """Parse `worker:frame:number;worker:frame:number;` as the claim script writes it. Raises ValueError."""
    parts = [part.split(":") for part in text.split(";")[:-1]]
    runs = tuple(LoggedRun(Run(worker, int(number)), int(frame)) for worker, frame, number in parts)
    if not all(0 <= run.frame < MAX_FRAME for run in runs):
        raise ValueError("the number of a frame is out of range")
    return runs
