"""Worker lease: a worker's side of the queue, with which it claims jobs, logs engine steps, finishes and releases jobs.

`beat` and the logged steps renew the lease several times per lease length. When it lapses any process may fence the
worker; from then on every call raises Fenced, and the worker must stop. Its id is never used again.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from streaming.errors import DecodeError, NewerMessage, Rewound
from streaming.ids import partition_of
from streaming.jobs.codec import (
    LONG_BYTES,
    Control,
    Draft,
    Ended,
    Frame,
    Opening,
    Terminal,
    Wake,
    decode_control,
    decode_job,
    encode,
    packed,
    record_rows,
    without_rows,
)
from streaming.jobs.history import LoggedRun
from streaming.jobs.job import Job, PastAttempt
from streaming.jobs.records import canceller, parse_runs
from streaming.keys import channel
from streaming.redis.client import Call, RedisClient

log = logging.getLogger(__name__)

SILENT = "-"
"""The reply address of deltas without a reader: logged, not published."""

NO_OPENINGS: dict[int, Opening] = {}

FIELDS_OF_JOB = 8
"""How many fields the script `claim` answers for each job."""

LOG_KEEP_S = 86_400
"""The longest time for which a dead worker's log is kept; it expires sooner when the last of its jobs has ended."""

HANDED_BACK, PREEMPTED, RETURNED = "handed_back", "preempted", "returned"
"""Outcomes of an attempt whose job is put back: its worker drains, needs its slot for a job of a higher lane,
or cannot reach its server."""

WRITTEN = frozenset((0, 1))
"""Answers of append, checkpoint and finish that need no repetition: done now (1), or nothing left to do (0). Others:
-1, "fenced", an error."""

TRIM_INTERVAL = 100
"""Frames after which the log is trimmed again, though no further frame has become dispensable."""

MAX_RENEWALS = 20
"""Renewals by steps in the length of a lease: each costs the server a tenth of a step."""


MAX_NAME = 64
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._@/-]")
"""Characters that would end a name in a job's record."""


class Claim(msgspec.Struct, frozen=True):
    """A job that this worker has claimed and runs, until its lease lapses."""

    job: Job
    partition: int
    attempt: int
    run_number: int
    """Number of the run that this claim began; the worker uses it for no other."""
    created_ms: int
    """Redis time of its acceptance."""
    claimed_ms: int
    """Redis time of the claim."""
    deadline_ms: int | None
    """Redis time after which the job has expired."""
    reply: tuple[str, ...]
    """Addresses to which its deltas are published."""
    earlier_runs: tuple[LoggedRun, ...]
    """Their logged deltas come first."""
    first_frame: int
    """No frame before this one can hold a delta of this attempt."""
    accepted_us: int = 0
    claimed_us: int = 0
    """The two times again, to the microsecond."""
    started_us: int = 0
    """Redis time of the job's first claim; 0: this one, or not known."""
    earlier_attempts: tuple[PastAttempt, ...] = ()
    """What became of earlier attempts, oldest first, the newest of them; where its record was read."""
    worker: str = ""
    """Id of the worker that claimed it."""


@dataclass(frozen=True, slots=True)
class UnreadableClaim:
    """A claimed job that this worker cannot decode. `newer`: a worker of a newer version can."""

    id: str
    run_number: int
    """Number of the run, as in Claim."""
    problem: str
    newer: bool = False


@dataclass(frozen=True, slots=True)
class Claimed:
    """Result of a claim. `suspects`: this worker must finish its jobs and then claim `alone`, until it is False."""

    jobs: list[Claim | UnreadableClaim]
    suspects: bool


@dataclass(frozen=True, slots=True)
class HeldJob:
    """A job that this worker holds by the store's records."""

    run_number: int
    """Number of the run under which it does."""
    cancelled: bool
    """Whether the job was cancelled."""
    cancelled_by: str = ""
    """Who cancelled it, as CancelledBy; "": nobody did, or an older version, which did not say."""


class Finish(msgspec.Struct, frozen=True):
    """The end of a claimed job."""

    terminal: Terminal
    run_number: int
    """Number of the run that ends it: refused if the job was claimed again since."""
    with_rows: bool
    """Publish the rows with it: the reader has not received them as deltas. It reads a long result from the record."""
    dead: str = ""
    """Reason for a dead letter; "" for none."""
    prompt: int = 0
    """Tokens of the prompts by the engine, once for each choice; 0: not known."""
    rows: bytes = b""
    """The job's deltas as `encode_record_rows` returns them; required if the rows of `terminal` are packed. b"": encode
    those of `terminal`."""


class Lease:
    """Lease of one worker in every partition. `id` is new at every start of a worker process."""

    def __init__(self, client: RedisClient, model: str, name: str = "") -> None:
        """`name`: of its process in `penstock ps`, for people."""
        self.id = f"{secrets.token_hex(6)}"
        self.name = _NOT_IN_NAMES.sub("_", name)[:MAX_NAME] or self.id
        self._client = client
        self._model = model
        self._lease_ms = client.settings.lease_ms
        self._frames, self._oldest = dict.fromkeys(client.partitions, 0), dict.fromkeys(client.partitions, 0)
        """By partition: the last frame, and the oldest one that was still needed then."""
        self._last_run = 0
        """Number of the last run."""
        self._renewed = dict.fromkeys(client.partitions, 0.0)
        """By partition: when a step last renewed the lease (monotonic)."""

    async def register(self) -> None:
        """Register the worker and take its lease. Raises Unavailable."""
        await self._client.calls(
            [("register", p, (self.id, self._model, self._lease_ms, self.name)) for p in self._client.partitions]
        )

    async def claim(
        self,
        partition: int,
        want: int,
        *,
        alone: bool = False,
        lowest: int | None = None,
        free: int | None = None,
        begins: int | None = None,
        shared: int | None = None,
        crowding: Sequence[str] = (),
        adapters: Sequence[str] | None = None,
    ) -> Claimed:
        """Claim up to `want` waiting jobs, in the order of the queue; or, if `alone`, one suspect. If it gets fewer,
        the worker is marked as idle and will be woken. Raises Fenced, Unavailable.

        Args:
            lowest: most jobs of the lowest lane.
            free: slots that are free, fewer than `want`: jobs beyond them are claimed from the highest lane alone. If
                there are too few of these, the worker is marked as one that makes room, and will be woken for them.
            shared: slots for any tenant; jobs beyond them are claimed from tenants other than `crowding`.
            adapters: those that are loaded, whose jobs go before others of their tenant; None: the model has none.
            begins: how many of `free` begin at once. A worker that got as many is not marked as idle, but as one that
                prefetches: it will be woken if no other is idle.
        """
        most, free_slots, at_once = ["" if alone or each is None else each for each in (lowest, free, begins)]
        want = 1 if alone else want
        before, self._last_run = self._last_run, self._last_run + want
        kept: tuple[str | int, ...] = (shared, "", *crowding) if crowding and shared is not None and not alone else ()
        if adapters is not None and not alone:
            kept = (*(kept[:1] or ("",)), "\n".join(("", *adapters, "")), *kept[2:])
        args = (self.id, self._model, want, self._lease_ms, "1" if alone else "", most, before, free_slots, at_once)
        now, frame, suspects, *taken = await self._client.call("claim", partition, *args, *kept)
        jobs = [taken[at : at + FIELDS_OF_JOB] for at in range(0, len(taken), FIELDS_OF_JOB)]
        if self._last_run == before + want:  # else a concurrent claim has reserved the following numbers
            self._last_run = before + len(jobs)  # reuse unused numbers: small ones are shorter in every frame
        return Claimed([_claim(item, partition, float(now), frame, self.id) for item in jobs], bool(suspects))

    def next_frame(self, partition: int) -> int:
        """The number of the next frame of a partition."""
        return self._frames[partition] + 1

    def append_call(
        self,
        partition: int,
        rows: Mapping[str, Sequence[bytes]],
        oldest: int,
        *,
        openings: Mapping[str, dict[int, Opening]],
        forced: bool = False,
    ) -> Call:
        """Build the call that logs one engine step; pass it to `calls`. It takes the next frame number, by which the
        script recognises a retry, so the call is idempotent.

        Args:
            rows: Encoded deltas by reply address.
            oldest: The oldest frame that a running job still needs.
            openings: By reply address, the runs whose first rows for that address these are.
            forced: Write even if earlier frames are missing, because these rows replace them.
        """
        self._frames[partition] += 1
        number = self._frames[partition]
        lease_ms = self._renewal(partition)
        # Named again now and then: one call trims at most 10,000 frames.
        min_id = f"{oldest}-0" if oldest != self._oldest[partition] or number % TRIM_INTERVAL == 0 else ""
        self._oldest[partition] = oldest
        args: list[str | bytes | int] = [self.id, number, lease_ms, min_id, "1" if forced else ""]
        for address, deltas in rows.items():
            frame = Frame(self.id, number, packed(len(deltas), b"".join(deltas)), openings.get(address, NO_OPENINGS))
            args += [address, encode(frame)]
        return ("append", partition, args)

    def _renewal(self, partition: int) -> int:
        """For how long the next step renews the lease, in ms; 0: not, because it was renewed recently."""
        now = time.monotonic()
        if (now - self._renewed[partition]) * MAX_RENEWALS * 1000 < self._lease_ms:
            return 0
        self._renewed[partition] = now
        return self._lease_ms

    def finish_call(self, finish: Finish, partition: int | None = None) -> Call:
        """Build the call that writes the terminal record and takes the job off its lane; idempotent. `partition`: the
        job's, if the caller knows it."""
        end, record = finish.terminal, encode(without_rows(finish.terminal))
        told, rows = record, finish.rows or record_rows(end)
        if finish.with_rows:
            told = encode(end) if len(rows) < LONG_BYTES else encode(Ended(end.job))
        args = (self.id, end.job, finish.run_number, end.state, record, rows, told, finish.dead, end.usage.completion)
        counts = finish.prompt, end.usage.prompt, end.usage.cached
        return ("finish", partition_of(end.job) or 0 if partition is None else partition, (*args, *counts))

    def checkpoint_call(self, partition: int, job_id: str, run_number: int, frame: int) -> Call:
        """Build the call that records a checkpoint: a run's deltas are read from this frame on; idempotent."""
        return ("checkpoint", partition, (self.id, job_id, run_number, frame))

    async def calls(self, calls: Sequence[Call]) -> None:
        """Run append, checkpoint and finish calls, in order, in one round trip.

        Raises Fenced, Unavailable, Rewound (an append found frames missing before it: repeat the appends of that
        partition and their jobs' finishes).
        """
        answered = zip(calls, await self._client.calls(calls), strict=True)
        if behind := {partition for (name, partition, _), answer in answered if name == "append" and answer == -1}:
            raise Rewound(behind)

    def send_nowait(self, calls: Sequence[Call], on_done: Callable[[Sequence[Any] | None], None]) -> bool:
        """Send the calls before this returns; then `on_done` gets their answers, None if one of them was not written.
        If so, or if this returns False, pass them to `calls`, which raises the reason."""

        def answered(answers: list[Any] | None) -> None:
            on_done(answers if answers is not None and WRITTEN.issuperset(answers) else None)

        return self._client.send_nowait(calls, answered)

    async def beat(self, partition: int) -> dict[str, HeldJob]:
        """Renew the lease in a partition; returns the jobs that this worker holds there by the store's records, by id.

        Raises Fenced, Unavailable.
        """
        answer = await self._client.call("beat", partition, self.id, self._lease_ms)
        return {
            job_id.decode(): HeldJob(int(run_number), bool(cancel), canceller(cancel))
            for job_id, run_number, cancel in answer
        }

    async def release(
        self, job_id: str, run_number: int, frames: Sequence[Frame] = (), *, outcome: str = HANDED_BACK
    ) -> None:
        """Requeue a job for another worker to continue. A late call, when this worker holds the job under a later run,
        changes nothing, so the call is idempotent. Raises Fenced, Unavailable.

        Args:
            frames: everything that the job's runs have generated; this worker's log is then not needed for it.
            outcome: of the attempt, HANDED_BACK, PREEMPTED or RETURNED.
        """
        args: list[str | bytes | int] = [self.id, job_id, run_number, LOG_KEEP_S, outcome]
        args += [encode(frame) for frame in frames]
        await self._client.call("release", partition_of(job_id) or 0, *args)

    async def restart(self, job_id: str, run_number: int, draft: Draft | None = None) -> None:
        """Restart a claimed job from its beginning under a new epoch: deltas of earlier runs become void. `draft`:
        those of them that the job's readers are still told of.

        Raises Fenced, Unavailable.
        """
        kept = encode(draft) if draft is not None else b""
        await self._client.call("restart", partition_of(job_id) or 0, self.id, job_id, run_number, kept)

    async def decline(self, jobs: Sequence[UnreadableClaim]) -> None:
        """Undo the claims of jobs that only a newer version can decode. Raises Fenced, Unavailable."""
        await self._client.calls(
            [("decline", partition_of(each.id) or 0, (self.id, each.id, each.run_number)) for each in jobs]
        )

    async def leave(self) -> int:
        """Give up the lease, unless jobs are still held; returns how many are. Raises Unavailable."""
        return sum(await self._client.calls([("leave", p, (self.id, LOG_KEEP_S)) for p in self._client.partitions]))

    async def controls(self) -> AsyncIterator[Control]:
        """Iterate over control messages to this worker, without malformed ones, behind a wake-up in place of what was
        lost before. Never ends; raises Unavailable."""
        async with self._client.subscribe(channel("worker", self.id)) as subscription:
            yield Wake()
            while True:
                data = await subscription.message()
                try:
                    control = decode_control(data)
                except DecodeError as error:
                    log.warning("a message to this worker is ignored: %s", error)
                else:
                    yield control


def _claim(item: Sequence[bytes], partition: int, now: float, frame: int, worker: str) -> Claim | UnreadableClaim:
    job_id, body, attempt, deadline, reply, runs, created, run_number = item
    try:
        return Claim(
            job=decode_job(body),
            partition=partition,
            attempt=int(attempt),
            run_number=int(run_number),
            created_ms=int(float(created)),
            claimed_ms=int(now),
            deadline_ms=int(float(deadline)) if deadline else None,
            reply=tuple(reply.decode().split(",")) if reply else (),
            earlier_runs=parse_runs(runs.decode()) if runs else (),
            first_frame=frame + 1,
            accepted_us=round(float(created) * 1000),
            claimed_us=round(now * 1000),
            worker=worker,
        )
    except (DecodeError, ValueError, OverflowError) as error:
        return UnreadableClaim(job_id.decode(), int(run_number), str(error), newer=isinstance(error, NewerMessage))
