"""A worker's side of the protocol: take a lease, claim, write steps, finish, hand back. Everything it writes is fenced.

The lease is renewed by `beat` and by the steps written, a few times in its length. When it lapses anybody may fence the
worker; from then on each call raises Fenced, and the worker must stop. It never comes back under the same name.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from streaming.errors import DecodeError, NewerMessage, Rewound
from streaming.ids import partition_of
from streaming.jobs.codec import decode_control, decode_job, encode, packed
from streaming.jobs.control import Control
from streaming.jobs.frames import Frame, Opening
from streaming.jobs.history import LoggedRun
from streaming.jobs.job import Job
from streaming.jobs.records import parse_runs
from streaming.jobs.terminal import Terminal
from streaming.keys import channel
from streaming.redis.client import Call, RedisClient

log = logging.getLogger(__name__)

SILENT = "-"
"""The reply address of deltas nobody listens to: logged, not published."""

NO_OPENINGS: dict[int, Opening] = {}

LOG_KEEP_S = 86_400
"""The log of a worker that is gone is kept until the last of the jobs it was lost with has ended, but no longer."""

RENEWALS = 20
"""In the length of a lease, at most, by steps: each costs the server a tenth of what a step does."""


class Claim(msgspec.Struct, frozen=True):
    """A job that is this worker's to run, until its lease lapses."""

    job: Job
    partition: int
    attempt: int
    number: int
    """Of the run that this claim began: the worker uses it for no other."""
    created_ms: int
    """Redis time of its acceptance."""
    claimed_ms: int
    """Redis time of the claim."""
    deadline_ms: int | None
    """Redis time after which the job has expired."""
    reply: tuple[str, ...]
    """Addresses its deltas go to."""
    past: tuple[LoggedRun, ...]
    """Earlier attempts, whose logged deltas come first."""
    first_frame: int
    """No frame before this one can hold a delta of this attempt."""


@dataclass(frozen=True, slots=True)
class UnreadableClaim:
    """A claimed job that cannot be read. `newer`: only by this version, and it is for a newer worker."""

    id: str
    number: int
    """As a claim's."""
    problem: str
    newer: bool = False


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim gave. `suspects`: this worker is to finish what it has and then claim alone, until it is False."""

    jobs: list[Claim | UnreadableClaim]
    suspects: bool


@dataclass(frozen=True, slots=True)
class HeldJob:
    """What the server says of a job that it counts as this worker's."""

    number: int
    """Of the run under which it does."""
    cancelled: bool
    """Somebody has asked for its end."""


class Finish(msgspec.Struct, frozen=True):
    """The end of a claimed job."""

    terminal: Terminal
    number: int
    """Of the run that ends it: refused when the job has been claimed anew since."""
    with_rows: bool
    """Publish the rows with it: the reader has not had them as deltas."""
    dead: str = ""
    """Why people should look at it: it becomes a dead letter too."""


class Lease:
    """One worker's hold on its jobs, in every partition. `id` is new in every life of a worker process."""

    def __init__(self, wire: RedisClient, model: str) -> None:
        self.id = f"{secrets.token_hex(6)}"
        self._wire = wire
        self._model = model
        self._lease_ms = wire.settings.lease_ms
        self._frames = dict.fromkeys(wire.partitions, 0)
        self._run = 0
        """The last number given to a run."""
        self._renewed = dict.fromkeys(wire.partitions, 0.0)
        """When a step last did it (monotonic)."""

    async def register(self) -> None:
        """Raises Unavailable."""
        await self._wire.calls([("register", p, (self.id, self._model, self._lease_ms)) for p in self._wire.partitions])

    async def claim(self, partition: int, want: int, *, alone: bool = False, lowest: int | None = None) -> Claimed:
        """Up to `want` waiting jobs, highest lane first, at most `lowest` of them from the lowest; or, `alone`, one
        suspect. Fewer than asked: this worker is noted as idle and will be woken. Raises Fenced, Unavailable."""
        most = "" if alone or lowest is None else lowest
        want = 1 if alone else want
        before, self._run = self._run, self._run + want
        args = (self.id, self._model, want, self._lease_ms, "1" if alone else "", most, before)
        now, frame, suspects, *taken = await self._wire.call("claim", partition, *args)
        if self._run == before + want:  # else another claim has taken numbers behind these
            self._run = before + len(taken)  # small numbers are short in every frame
        return Claimed([_claim(item, partition, now, frame) for item in taken], bool(suspects))

    def next_frame(self, partition: int) -> int:
        """The number the next frame of a partition will have."""
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
        """One engine step for `calls`: encoded deltas by reply address, the oldest frame a running job still needs, and
        the runs whose first rows for an address these are.

        The number is taken here: the call may be repeated until it is answered, the script knows a repetition.
        `forced` writes it even where earlier frames are missing, once these rows make up for them.
        """
        self._frames[partition] += 1
        number = self._frames[partition]
        lease_ms = self._renewal(partition)
        args: list[str | bytes | int] = [self.id, number, lease_ms, f"{oldest}-0", "1" if forced else ""]
        for address, deltas in rows.items():
            frame = Frame(self.id, number, packed(len(deltas), b"".join(deltas)), openings.get(address, NO_OPENINGS))
            args += [address, encode(frame)]
        return ("append", partition, args)

    def _renewal(self, partition: int) -> int:
        """For how long the next step renews the lease, in ms; 0: it was renewed just now."""
        now = time.monotonic()
        if (now - self._renewed[partition]) * RENEWALS * 1000 < self._lease_ms:
            return 0
        self._renewed[partition] = now
        return self._lease_ms

    def finish_call(self, finish: Finish) -> Call:
        """The terminal record and the acknowledgement for `calls`; harmless when repeated."""
        end = finish.terminal
        summary, whole = encode(without_rows(end)), "1" if finish.with_rows else ""
        args = (self.id, end.job, finish.number, end.state, encode(end), summary, whole, finish.dead)
        return ("finish", partition_of(end.job) or 0, args)

    def checkpoint_call(self, partition: int, job_id: str, number: int, frame: int) -> Call:
        """That the deltas of a run are read from this frame on, for `calls`; harmless when repeated."""
        return ("checkpoint", partition, (self.id, job_id, number, frame))

    async def calls(self, calls: Sequence[Call]) -> None:
        """Write appends and finishes, in order, in one round trip.

        Raises Fenced, Unavailable, Rewound (an append found frames missing before it; appends of that partition and
        their jobs' finishes are to be written anew).
        """
        if behind := _behind(calls, await self._wire.calls(calls)):
            raise Rewound(behind)

    def send_nowait(self, calls: Sequence[Call], on_done: Callable[[bool], None]) -> bool:
        """Send the same calls before this returns; `on_done` is told whether all of them were written. If they were
        not, or if this returns False, pass them to `calls`, which raises the reason."""

        def answered(answers: list[Any] | None) -> None:
            if answers is None or any(each == b"fenced" or isinstance(each, Exception) for each in answers):
                on_done(False)
            else:
                on_done(not _behind(calls, answers))

        return self._wire.send_nowait(calls, answered)

    async def beat(self, partition: int) -> dict[str, HeldJob]:
        """Renew the lease in a partition; the jobs held there, by id, as the server sees it.

        Raises Fenced, Unavailable.
        """
        answer = await self._wire.call("beat", partition, self.id, self._lease_ms)
        return {job_id.decode(): HeldJob(int(number), bool(cancelled)) for job_id, number, cancelled in answer}

    async def release(self, job_id: str, number: int) -> None:
        """Hand a job back for another worker to go on with. A call that arrives late, when this worker holds the job
        under a later run, changes nothing. Raises Fenced, Unavailable."""
        await self._wire.call("release", partition_of(job_id) or 0, self.id, job_id, number, LOG_KEEP_S)

    async def restart(self, job_id: str, number: int) -> None:
        """Begin a claimed job anew under a new epoch: what earlier runs logged of it counts no more.

        Raises Fenced, Unavailable.
        """
        await self._wire.call("restart", partition_of(job_id) or 0, self.id, job_id, number)

    async def decline(self, jobs: Sequence[UnreadableClaim]) -> None:
        """Put jobs back that only a newer version can read, as if they had never been claimed. Raises Fenced,
        Unavailable."""
        await self._wire.calls(
            [("decline", partition_of(each.id) or 0, (self.id, each.id, each.number)) for each in jobs]
        )

    async def unfollow(self, partition: int, address: str, job_ids: Sequence[str]) -> None:
        """Have these jobs, held here, send nothing more to an address. Raises Fenced, Unavailable."""
        await self._wire.call("unfollow", partition, self.id, address, *job_ids)

    async def leave(self) -> int:
        """Give the lease up; returns how many jobs are still held (then it is kept). Raises Unavailable."""
        return sum(await self._wire.calls([("leave", p, (self.id, LOG_KEEP_S)) for p in self._wire.partitions]))

    async def controls(self) -> AsyncIterator[Control]:
        """What this worker is told, as it is told. Skips what it cannot read. Ends never; raises Unavailable."""
        async with self._wire.subscribe(channel("worker", self.id)) as subscription:
            while True:
                data = await subscription.message()
                try:
                    control = decode_control(data)
                except DecodeError as error:
                    log.warning("a message to this worker is ignored: %s", error)
                else:
                    yield control


def _behind(calls: Sequence[Call], answers: Sequence[Any]) -> set[int]:
    """Partitions whose log has lost frames."""
    return {call[1] for call, answer in zip(calls, answers, strict=True) if call[0] == "append" and answer == -1}


def _claim(item: Sequence[bytes], partition: int, now: int, frame: int) -> Claim | UnreadableClaim:
    job_id, body, *_, number = item
    try:
        return _readable(decode_job(body), item, partition, now, frame)
    except NewerMessage as error:
        return UnreadableClaim(job_id.decode(), int(number), str(error), newer=True)
    except (DecodeError, ValueError, OverflowError) as error:
        return UnreadableClaim(job_id.decode(), int(number), str(error))


def _readable(job: Job, item: Sequence[bytes], partition: int, now: int, frame: int) -> Claim:
    """Raises ValueError, OverflowError."""
    _, _, attempt, deadline, reply, runs, created, number = item
    return Claim(
        job=job,
        partition=partition,
        attempt=int(attempt),
        number=int(number),
        created_ms=int(created),
        claimed_ms=now,
        deadline_ms=int(float(deadline)) if deadline else None,
        reply=tuple(reply.decode().split(",")) if reply else (),
        past=parse_runs(runs.decode()) if runs else (),
        first_frame=frame + 1,
    )


def without_rows(end: Terminal) -> Terminal:
    """What a list shows of an end, and the published form for readers that have had the rows."""
    return Terminal(
        end.job, end.state, end.seq, end.finishes, end.usage, end.failure, end.worker, end.first_ms, end.sections
    )
