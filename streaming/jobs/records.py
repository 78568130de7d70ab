"""Job records: parses what the store keeps of a job, notes deliveries, and builds the ends of jobs that scripts ended.

While a job runs, its tokens are in the logs of the workers that ran it (one entry per engine step, with all jobs of
that worker). The record names each run and its first frame. When the job has ended, the record holds all tokens.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict

from penstock.engine import Failure
from penstock.loops import ROWS_PER_SLICE, ExpectedErrors, Sliced, at_once, run_periodically
from streaming.errors import DecodeError, MalformedJob, NewerMessage, Unavailable
from streaming.ids import partition_of
from streaming.jobs.codec import (
    Generated,
    Run,
    Terminal,
    decode,
    decode_job,
    decode_metadata,
    decode_record_rows,
    decode_terminal,
    encode,
    served_by,
    total_usage,
)
from streaming.jobs.history import History, LoggedRun
from streaming.jobs.job import CancelledBy, Endpoint, Job, JobState, PastAttempt, Text
from streaming.keys import parse_lane
from streaming.order import Priority
from streaming.redis.client import RedisClient, whole
from telemetry.latency import OF_ANSWER, Stamps
from telemetry.records.schema import RequestRecord

MAX_ATTEMPTS = 20
"""The newest attempts, which a record keeps."""

_ENTRY = re.compile(
    r"([^:;]*):([^:;]+):([0-9]{1,15}):([0-9.]{1,24}):([0-9]{1,15}):([a-z_]+)(?::([0-9]{1,15}))?(?::[^;]*)?;"
)
"""name:worker:run:claimed:ended:outcome; as the scripts write it, and of a lost worker the time of its last write. A
later version may write more behind that. Anything else in the field is passed over: nothing but this log depends on
it."""


def attempt_log(fields: Mapping[str, bytes], last: Run | None, terminal: Terminal | None) -> dict[Run, PastAttempt]:
    """Build the log of a job's attempts, oldest first. The scripts note attempts that did not end the job; the last
    one's end is that of the job.

    Args:
        last: The run of the last attempt; None before the first.
    """
    tokens: dict[Run, int] = {}
    if terminal is not None:
        counts = terminal.tokens or (terminal.usage.completion,)
        tokens = dict(zip((section.run for section in terminal.sections), counts, strict=False))
    found = {}
    for name, worker, number, started, ended, outcome, seen in _ENTRY.findall(_word(fields, "past")):
        run = Run(worker, int(number))
        found[run] = PastAttempt(name or worker, whole(started), int(ended), tokens.get(run), outcome, int(seen or 0))
    if last is not None and last not in found:
        end = (whole(_word(fields, "done")), tokens.get(last), str(terminal.state)) if terminal is not None else ()
        found[last] = PastAttempt(_word(fields, "name") or last.worker, whole(_word(fields, "claimed")), *end)
    return found


def kept_ms(history: History, attempts: Sequence[PastAttempt]) -> int:
    """For how long earlier attempts have generated the text of `history`, which another one continues."""
    if not history.rows:
        return 0
    at_ms = history.at_ms
    seen_ms = next((each.seen_ms or each.ended_ms for each in attempts if each.holds(at_ms)), at_ms)
    return history.kept_ms + max(0, seen_ms - at_ms)


def claimed_ms(first_ms: int, attempts: Sequence[PastAttempt]) -> int:
    """When the attempt was claimed that generated the job's first token; 0: not known."""
    return next((each.started_ms for each in attempts if each.holds(first_ms)), 0)


def _word(fields: Mapping[str, bytes], name: str) -> str:
    return fields.get(name, b"").decode(errors="replace")


log = logging.getLogger(__name__)

WRITE_INTERVAL_S = 0.5
MAX_WAITING = 20_000
MAX_AT_ONCE = 500
"""Entries of one script call, so that it blocks the server for only about half a millisecond."""


class Delivered(msgspec.Struct, frozen=True, array_like=True):
    """When an API process forwarded a job's answer, in microseconds of Redis time, accurate to `clock_us`; 0: never."""

    first_got: int = 0
    first_sent: int = 0
    last_got: int = 0
    last_sent: int = 0
    """`got`: the first token, or the end, came from the worker; `sent`: it was written to the connection."""
    clock_us: int = 0
    whole: bool = False
    """The answer was sent in one piece, so `first_got` and `first_sent` are 0."""


_DELIVERED = msgspec.msgpack.Decoder(Delivered)


class Deliveries:
    """Delivery times of one API process that are not written yet.

    Only `GET /v1/jobs/{id}/timing` and `GET /admin/jobs/{id}` show them. If one is lost, with its process or while the
    store is unavailable, it is missing there; nothing else uses it.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._notes: dict[str, Delivered] = {}

    def note(self, job_id: str, delivered: Delivered) -> None:
        """Buffer when the answer of a job was delivered; dropped if MAX_WAITING entries are buffered."""
        if len(self._notes) < MAX_WAITING:
            self._notes[job_id] = delivered

    def of(self, job_id: str) -> Delivered | None:
        """Return an entry that is not written yet, or None."""
        return self._notes.get(job_id)

    async def keep_writing(self) -> None:
        """Write in a loop until cancelled."""
        expected = ExpectedErrors(Unavailable, log.debug, "deliveries are noted later: %s")
        await run_periodically(self.write, WRITE_INTERVAL_S, expected, wait_first=True)

    async def write(self) -> None:
        """Write the buffered entries. Raises Unavailable; entries that were not written stay buffered."""
        while batch := dict(islice(self._notes.items(), MAX_AT_ONCE)):
            calls: dict[int, list[str | bytes | int]] = {}
            for job_id, delivered in batch.items():
                calls.setdefault(partition_of(job_id) or 0, []).extend((job_id, encode(delivered)))
            await self._client.calls([("deliver", partition, args) for partition, args in calls.items()])
            for job_id in batch:
                del self._notes[job_id]


MAX_NUMBER = 10**18
"""The scripts treat only smaller values as valid numbers of a record."""
MAX_FRAME = 10**15
HELD = "0-0"
"""The entry of a job that waits for its time (streaming/lua/shared/waiting.lua)."""

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
    """The end of an attempt that did not end its job. `ordinal`: of its run among the job's, counted from 1."""

    ordinal: int
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
    queue: str = ""
    """Where it waits if it was put back, `retry` or `suspects`; "": in its lane."""
    created_ms: int = 0
    """When it was accepted, or, after a wait for its time, entered its lane."""
    not_before_ms: int = 0
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
    caller: str = ""
    """Name of the key for which it counts."""
    drafts: tuple[bytes, ...] = ()
    """The texts of a response that were given up before the present one, oldest first, each an encoded Draft."""
    fault: str = ""
    """Why its body cannot be read, or "". If it cannot, `job` has only the fields that the record holds beside it."""
    is_newer_body: bool = False
    """Whether a newer version wrote the body that cannot be read."""

    @property
    def held(self) -> bool:
        """Whether it waits for its time, and so has no place in its lane."""
        return self.entry == HELD

    @property
    def attempts(self) -> tuple[PastAttempt, ...]:
        """The attempts at this job, after those at the job of which it is a replay; the newest twenty of both."""
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

    terminal = end or end_of(job_id, state, raw.get("record"), raw.get("rows", b""), word("reason"))
    if terminal is not None and terminal.state is JobState.CANCELLED and not terminal.cancelled_by:
        terminal = msgspec.structs.replace(terminal, cancelled_by=canceller(raw.get("cancel")))
    if terminal is not None and terminal.failure is REASONS["deadline_exceeded_in_queue"]:
        limits = number("queue_deadline"), number("deadline"), number("attempt")
        terminal = msgspec.structs.replace(terminal, failure=expired_in_queue(*limits))
    job, fault = _job(job_id, body, raw) if bodies else (_beside(job_id, raw), None)
    runs = parse_runs(word("runs"))
    last = runs[-1].run if runs else None
    delivered = None
    with suppress(DecodeError):  # only the timing needs it
        delivered = decode(_DELIVERED, raw["delivered"]) if "delivered" in raw else None
    return JobRecord(
        job=job,
        state=state,
        attempt=number("attempt"),
        worker=word("worker"),
        lane=word("lane"),
        entry=word("entry"),
        queue=word("queue"),
        created_ms=number("created"),
        not_before_ms=number("not_before"),
        started_ms=number("started") or number("claimed"),
        first_ms=terminal.first_ms if terminal else 0,
        done_ms=number("done"),
        deadline_ms=number("deadline"),
        epoch=int(epoch or 0) + 1 + number("epoch"),
        resets=number("epoch"),
        has_lost="born" in raw and number("born") != int(epoch or 0),
        endpoint=_ENDPOINTS.get(word("endpoint"), job.endpoint),  # a newer version may write other letters
        keep_s=number("keep"),
        runs=runs,
        attempts_by_run=attempt_log(raw, last, terminal),
        addresses=tuple(word("reply").split(",")) if raw.get("reply") else (),
        terminal=terminal,
        unrecorded=state.final and end is None and not raw.get("record"),
        stamps=stamps_of(job, state, raw, terminal),
        delivered=delivered,
        preview=raw.get("preview", b"").decode(errors="replace"),
        caller=word("caller"),
        drafts=tuple(draft for _, draft in sorted((int(name[6:]), raw[name]) for name in raw if name[:6] == "draft:")),
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


_CANCELLERS = {each.value.encode(): each.value for each in CancelledBy}
_ENDPOINTS = {each.value: each for each in Endpoint}
"""Looked up, not searched: each beat of a worker reads one for every job that it holds."""


def canceller(data: bytes | None) -> str:
    """Who cancelled a job, by the field `cancel` of its record; "" if that is of a version with other words for it."""
    return _CANCELLERS.get(data, "") if data else ""


def end_of(job_id: str, state: JobState, record: bytes | None, rows: bytes, reason: str) -> Terminal | None:
    """How a job ended; None if it has not. An unreadable result counts as a failure. `record`, `rows`: what a worker
    wrote, if one did; `reason`: why it ended without."""
    if not record:
        return Terminal(job_id, state, 0, failure=REASONS.get(reason)) if state.final else None
    return at_once(read_end(job_id, record, rows))


def read_end(job_id: str, record: bytes, rows: bytes = b"") -> Sliced[Terminal]:
    """Decode how a job ended, with these rows; an unreadable end counts as a failure."""
    try:
        end = decode_terminal(record)
        return msgspec.structs.replace(end, rows=(yield from decode_record_rows(rows, ROWS_PER_SLICE))) if rows else end
    except NewerMessage:
        return Terminal(job_id, JobState.FAILED, 0, failure=NEWER)
    except DecodeError as error:
        log.error("the result of a job cannot be read: %s", error, extra={"job": job_id})
        return malformed_end(job_id)


def malformed_end(job_id: str) -> Terminal:
    """The terminal message of a job whose record is unreadable."""
    return Terminal(job_id, JobState.FAILED, 0, failure=MALFORMED)


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

    def exact(name: str) -> int:
        return round(float(raw.get(name) or 0) * 1000)

    generated, started = terminal.generated if terminal else Generated(), exact("started") or exact("claimed")
    claimed = exact("claimed")
    if not state.final and (state is JobState.QUEUED or claimed != started):
        claimed = 0  # a lost worker's; or how long earlier attempts were of use is not known before the end
    elif claimed and "reason" in raw:
        claimed = exact("done")  # a script ended it: no attempt did
    known = Stamps(
        received=job.received_us,
        accepted=exact("created"),
        started=started,
        claimed=claimed,
        released=generated.released,
        scheduled=generated.scheduled,
        first_token=generated.first,
        last_token=generated.last,
        ended=exact("done"),
    )
    return known.continued(generated.shown, generated.shown_claimed, generated.kept)


def with_delivery(stamps: Stamps, delivered: Delivered) -> Stamps:
    """The stamps of a job with those of its answer."""
    return msgspec.structs.replace(stamps, **{name: getattr(delivered, name) for name in OF_ANSWER})


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
    tenant, adapter = [raw.get(name, b"").decode() for name in ("tenant", "adapter")]
    about: dict[str, Any] = {"model": model, "adapter": adapter, "tenant": tenant, "priority": priority}
    with suppress(DecodeError):
        about["metadata"] = decode_metadata(raw.get("metadata", b""))
    return Job(id=job_id, prompt=Text(("",)), **about)


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


MAX_CHOICES = 1024
"""The most that a request may ask for."""


def was_cut_short(record: JobRecord) -> bool:
    """Whether a script ended the job after a worker had begun it, and its tokens are only in logs."""
    end = record.terminal
    return record.unrecorded and end is not None and end.failure is not MALFORMED and bool(record.runs)


def salvaged(record: JobRecord, history: History) -> Terminal:
    """Build the terminal record of a job that was cut short, as a worker would have written it. If the store has lost
    deltas in the middle, those before them count.

    Scripts cannot decode tokens, so a job that they end (given up, cancelled or expired after its worker was lost) has
    none in its record at first. Any process that reads the record, or sweeps, stores them there; its logs are kept
    until then.
    """
    assert record.terminal is not None
    job, history = record.job, history.intact
    rows = [row for row in history.rows if 0 <= row.index < MAX_CHOICES]
    choices = max([0 if record.fault else job.choices, *(row.index + 1 for row in rows)])
    finishes = {row.index: row.finish for row in rows if row.finish}
    prompts = {row.index: row.prompt for row in reversed(rows) if row.prompt is not None}
    servers = {row.index: row.served_by for row in rows if row.served_by}
    completion = sum([row.n for row in history.rows])
    generated = Generated()
    if history.first_ms:
        claimed = 1000 * claimed_ms(history.first_ms, record.attempts) or record.stamps.started
        generated = Generated(
            shown=1000 * history.first_ms, shown_claimed=claimed, kept=1000 * kept_ms(history, record.attempts)
        )
    return Terminal(
        job.id,
        record.state,
        len(history.rows),
        tuple([finishes.get(index, "") for index in range(choices)]),
        total_usage(prompts, completion, choices, max(1, job.sampling.n)),
        record.terminal.failure,
        record.runs[-1].run.worker,
        history.first_ms,
        history.sections,
        tuple(history.rows),
        generated,
        tokens=history.tokens if len(history.sections) > 1 else (),
        served_by=served_by(choices, servers, job),
        cancelled_by=record.terminal.cancelled_by,
    )


def request_record(record: JobRecord, by: str) -> RequestRecord:
    """The telemetry record of a job that a script ended. `by`: the process that swept.

    A sweep does not read bodies, so the time at which the API process received the request is not known.
    """
    stamps, job = record.stamps, record.job
    return end_record(
        job,
        record.terminal or Terminal(job.id, record.state, 0),
        record.attempts,
        ended_us=stamps.ended or record.done_ms * 1000,
        state=record.state.value,
        model=job.model,
        by=by,
        accepted_us=stamps.accepted,
        started_us=stamps.started,
        claimed_us=stamps.claimed,
        attempts=record.attempt,
    )


def end_record(job: Job, end: Terminal, past: Sequence[PastAttempt], **more: Any) -> RequestRecord:
    """The telemetry record of a job that has ended, whoever ended it. `more`: fields that do not follow from the end
    and from the past attempts."""
    outcomes = Counter([attempt.outcome for attempt in past])
    times = {f"{name.removesuffix('_us')}_us": at for name, at in asdict(end.generated).items()}
    return RequestRecord(
        id=job.id,
        lane=job.priority.value,
        tenant=job.tenant,
        code=end.failure.code if end.failure else "",
        cancelled_by=end.cancelled_by,
        prompt_tokens=end.usage.prompt,
        completion_tokens=end.usage.completion,
        cached_tokens=end.usage.cached,
        lost=outcomes["lost"],
        handed_back=outcomes["handed_back"] + outcomes["returned"],
        preempted=outcomes["preempted"],
        **times,
        **more,
    )
