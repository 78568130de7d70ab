"""The door to the queue: put a job, cancel it, follow it. What an API process may do to the work.

A put is one atomic script and may be repeated with the same job id, so a lost reply never makes a second job.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from streaming.bundle import Bundle
from streaming.errors import KeyReused, LaneFull, NoCapacity, StreamingError, Unavailable, UnknownJob
from streaming.keys import new_job_id, partition_key, partition_of
from streaming.messages import Job, State, encode
from streaming.wire import Call, Wire, translated


class Accepted(msgspec.Struct, frozen=True):
    """A job that will reach a final state. `joined`: its idempotency key led to a job that was there already."""

    id: str
    waiting: int = 0
    """Jobs in its lane before it."""
    created_ms: int = 0
    joined: bool = False


class Queue:
    """Many may share a wire; what is asked through one of them goes to Redis together."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._puts, self._follows = Bundle(wire, "put"), Bundle(wire, "follow")

    def new_id(self, tenant: str, idempotency_key: str = "") -> str:
        """A fresh job id. The partition follows from tenant and key, so that equal keys meet in one place."""
        count = self._wire.settings.partitions
        if idempotency_key:
            digest = hashlib.sha256(f"{tenant}\0{idempotency_key}".encode()).digest()
            return new_job_id(int.from_bytes(digest[:4]) % count)
        return new_job_id(int(random.random() * count))  # noqa: S311 - spreads load, hides nothing

    async def put(self, job: Job, *, idempotency_key: str = "", digest: str = "", must_run: bool = False) -> Accepted:
        """Accept a job for good. `digest` identifies the request body for the idempotency check.

        Raises LaneFull, NoCapacity (only if must_run), KeyReused, Unavailable (then nothing can be said about the job:
        it may be there, but the same idempotency key will find it).
        """
        _, partition, args = self._put_call(job, idempotency_key, digest, must_run=must_run)
        try:
            answer = await self._puts.call(partition, *args)
        except Unavailable:
            # Once more after a lost connection (the script knows a repetition by the job's id).
            await asyncio.sleep(0.05)
            answer = await self._puts.call(partition, *args)
        return self._accepted(job, answer)

    async def put_parts(self, jobs: Sequence[Job]) -> list[Accepted | LaneFull]:
        """Accept many in one round trip, as parts of something that is listed by itself. Their ids must be the same
        each time, so that all of it may be repeated. Raises Unavailable."""
        answers = await self._wire.calls([self._put_call(job, part=True) for job in jobs])
        accepted: list[Accepted | LaneFull] = []
        for job, answer in zip(jobs, answers, strict=True):
            try:
                accepted.append(self._accepted(job, answer))
            except LaneFull as full:
                accepted.append(full)
        return accepted

    def _accepted(self, job: Job, answer: Sequence[Any]) -> Accepted:
        match answer:
            case [b"queued", created, waiting]:
                return Accepted(job.id, waiting, created)
            case [b"joined", known]:
                return Accepted(known.decode(), joined=True)
            case [b"full", waiting]:
                raise LaneFull(waiting)
            case [b"busy"]:
                raise NoCapacity("no worker has room right now")
            case [b"reused"]:
                raise KeyReused("this idempotency key was used with another request body")
        raise StreamingError(f"put answered {answer!r}")

    def _put_call(
        self, job: Job, key: str = "", digest: str = "", *, must_run: bool = False, part: bool = False
    ) -> Call:
        settings = self._wire.settings
        args = (
            job.id, encode(job), job.tenant, job.model, job.priority, job.reply_to, _or_empty(job.max_queue_ms),
            _or_empty(job.deadline_ms), key, digest, settings.lane_limit, "1" if must_run else "", settings.retention_s,
            "1" if part else "", job.events,
        )  # fmt: skip
        return ("put", self._partition(job.id), args)

    async def ended(self, job_ids: Iterable[str]) -> list[str]:
        """Those of these jobs that have ended, or are not kept. Raises Unavailable."""
        parts: dict[int, list[str]] = {}
        for job_id in job_ids:
            parts.setdefault(self._partition(job_id), []).append(job_id)
        answers = await self._wire.calls([("ended", partition, ids) for partition, ids in parts.items()])
        return [job_id.decode() for answer in answers for job_id in answer]

    async def known(self, job_ids: Sequence[str]) -> list[str]:
        """Those of these jobs that are kept, whatever their state. Raises Unavailable."""
        pipeline = self._wire.redis.pipeline(transaction=False)
        for job_id in job_ids:
            pipeline.exists(partition_key(self._partition(job_id), "job", job_id))
        with translated():
            found = await pipeline.execute()
        return [job_id for job_id, there in zip(job_ids, found, strict=True) if there]

    async def stop(self, job_ids: Sequence[str], *, waiting_only: bool) -> list[State | None]:
        """Cancel many, or only those nobody has begun; the states they were found in, None for one that is not kept.

        Raises Unavailable.
        """
        flag = "1" if waiting_only else ""
        answers = await self._wire.calls([("cancel", self._partition(job_id), (job_id, flag)) for job_id in job_ids])
        return [None if answer == b"unknown" else State(answer.decode()) for answer in answers]

    async def fade(self, job_ids: Iterable[str], seconds: int) -> None:
        """Keep the records of ended jobs only so long: what they hold is kept elsewhere. Raises Unavailable."""
        pipeline = self._wire.redis.pipeline(transaction=False)
        for job_id in job_ids:
            pipeline.expire(partition_key(self._partition(job_id), "job", job_id), seconds, lt=True)
        with translated():
            await pipeline.execute()

    async def cancel(self, job_id: str) -> State:
        """Cancel a job; returns the state it was found in. Waiting jobs have ended on return, running ones will in a
        step. Raises UnknownJob, Unavailable."""
        return self._state(await self._wire.call("cancel", self._partition(job_id), job_id))

    async def follow(self, job_id: str, address: str) -> State:
        """Have a job's coming tokens sent to `address` too; returns its state. Raises UnknownJob, Unavailable."""
        return self._state(await self._follows.call(self._partition(job_id), job_id, address))

    def _partition(self, job_id: str) -> int:
        partition = partition_of(job_id)
        if partition is None or partition not in self._wire.partitions:
            raise UnknownJob(job_id)
        return partition

    @staticmethod
    def _state(answer: bytes) -> State:
        if answer == b"unknown":
            raise UnknownJob("no such job")
        return State(answer.decode())


def _or_empty(value: int | None) -> int | str:
    return "" if value is None else value
