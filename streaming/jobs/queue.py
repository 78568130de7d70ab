"""The door to the queue: put a job, cancel it, follow it. What an API process may do to the work.

A put is one atomic script and may be repeated with the same job id, so a lost reply never makes a second job.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from runtime.loops import ExpectedErrors, retry
from streaming.errors import (
    Abandoned,
    KeyReused,
    LaneFull,
    NoCapacity,
    QuotaExceeded,
    StoreFull,
    StreamingError,
    Unavailable,
    UnknownJob,
)
from streaming.ids import digest_partition, idempotency_digest, new_job_id, partition_of
from streaming.jobs.cards import ModelCard
from streaming.jobs.codec import encode, encode_metadata
from streaming.jobs.job import Job, JobState
from streaming.jobs.quotas import NAMES, Quotas
from streaming.jobs.reservation import owed_bytes
from streaming.keys import partition_key
from streaming.redis.batcher import ScriptBatcher
from streaming.redis.client import Call, RedisClient
from streaming.redis.failures import translated
from streaming.settings import UNLIMITED, QuotaSettings
from streaming.store.memory import Headroom, Reservation

PUT_RETRY_DELAY_S = 0.05


class Accepted(msgspec.Struct, frozen=True):
    """A job that will reach a final state. `joined`: its idempotency key led to a job that was there already."""

    id: str
    waiting: int = 0
    """Jobs in its lane before it."""
    created_ms: int = 0
    joined: bool = False
    state: JobState = JobState.QUEUED
    """Of a job that was there already: as the put found it."""
    attempts: int = 0
    epoch: int = 0
    """Of its partition, for event ids; 0: not asked for, because the request waits."""


class Queue:
    """Many may share a wire; what is asked through one of them goes to Redis together. With a `headroom`, a job is
    refused whose output would not fit into the store beside what is owed to others."""

    def __init__(self, wire: RedisClient, headroom: Headroom | None = None) -> None:
        self._wire, self._headroom, self._quotas = wire, headroom, Quotas(wire)
        self._puts, self._follows = ScriptBatcher(wire, "put"), ScriptBatcher(wire, "follow")

    def new_id(self, tenant: str, idempotency_key: str = "") -> str:
        """A fresh job id. The partition follows from tenant and key, so that equal keys meet in one place."""
        count = self._wire.settings.partitions
        if idempotency_key:
            return new_job_id(digest_partition(idempotency_digest(tenant, idempotency_key), count))
        return new_job_id(int(random.random() * count))  # noqa: S311 - spreads load, hides nothing

    async def put(
        self,
        job: Job,
        *,
        idempotency_key: str = "",
        digest: str = "",
        must_run: bool = False,
        card: ModelCard | None = None,
        refusal: str = "",
        quota: QuotaSettings = UNLIMITED,
    ) -> Accepted:
        """Accept a job for good. `digest` identifies the request body for the idempotency check, `card` says how much
        the job may write, `quota` how much its tenant may keep. With a `refusal`, why there is no room, only a job is
        answered that the idempotency key leads to: whoever comes back for it needs no room.

        Raises LaneFull, StoreFull, NeverFits, QuotaExceeded, NoCapacity (only if must_run), KeyReused, Unavailable
        (then nothing can be said about the job: it may be there, but the same idempotency key will find it).
        """
        try:
            if refusal:
                raise StoreFull(refusal)
            left = await self._quotas.left(job.tenant, self._partition(job.id), quota) if quota.bounds_jobs else ()
            (_, partition, args), reserved = self._put_call(job, idempotency_key, digest, must_run=must_run, card=card)
        except StoreFull:
            found = await self._join(job, idempotency_key, digest) if idempotency_key else None
            if found is None:
                raise
            return found
        answer: Sequence[Any] = ()
        try:
            answer = await self._put(partition, (*args, *left))
        finally:
            if not _brought_work(answer):
                reserved.give_back()
        if left and answer[0] == b"quota":
            raise _exceeded(quota, answer, left)
        return self._accepted(job, answer)

    async def _put(self, partition: int, args: Sequence[str | bytes | int]) -> Sequence[Any]:
        """Once more after a lost connection (the script knows a repetition by the job's id). Raises Unavailable."""
        call = partial(self._puts.call, partition, *args)
        answer: Sequence[Any] = await retry(call, ExpectedErrors(Unavailable), (PUT_RETRY_DELAY_S,))
        return answer

    async def _join(self, job: Job, key: str, digest: str) -> Accepted | None:
        """The job an idempotency key leads to; None if it is free. Raises KeyReused, Unavailable."""
        args = (job.tenant, idempotency_digest(job.tenant, key), digest, "1" if job.reply_to else "")
        answer = await self._wire.call("join", self._partition(job.id), *args)
        return None if answer[0] == b"free" else self._accepted(job, answer)

    async def put_parts(
        self, jobs: Sequence[Job], cards: Mapping[str, ModelCard] | None = None
    ) -> list[Accepted | LaneFull | StoreFull]:
        """Accept many in one round trip, as parts of something that is listed by itself; what happened to each. Those
        that fit are accepted, also behind one that does not. Their ids must be the same each time, so that all of it
        may be repeated. `cards` are the models', by name. Raises Unavailable."""
        calls: list[Call] = []
        reserved: list[Reservation] = []
        refused: dict[str, StoreFull] = {}
        for job in jobs:
            try:
                call, reservation = self._put_call(job, part=True, card=(cards or {}).get(job.model))
            except StoreFull as error:
                refused[job.id] = error
                continue
            calls.append(call)
            reserved.append(reservation)
        accepted: dict[str, Accepted | LaneFull | StoreFull] = {}
        answers: Sequence[Any] = ()
        try:
            answers = await self._wire.calls(calls) if calls else ()
        finally:
            for place, reservation in enumerate(reserved):
                if not answers or not _brought_work(answers[place]):
                    reservation.give_back()
        put = (job for job in jobs if job.id not in refused)
        for job, answer, reservation in zip(put, answers, reserved, strict=True):
            try:
                accepted[job.id] = self._accepted(job, answer, reservation.size)
            except (LaneFull, StoreFull) as error:
                accepted[job.id] = error
        return [refused.get(job.id) or accepted[job.id] for job in jobs]

    def _accepted(self, job: Job, answer: Sequence[Any], needed: int = 0) -> Accepted:
        match answer:
            case [b"queued", created, waiting, epoch]:
                return Accepted(job.id, waiting, created, epoch=epoch)
            case [b"joined", known, state, created, attempts, epoch]:
                return Accepted(known.decode(), 0, created, True, JobState(state.decode()), attempts, epoch)
            case [b"full", waiting]:
                raise LaneFull(waiting)
            case [b"crowded"]:
                raise StoreFull("what accepted jobs may still write would not fit into the memory of Redis", needed)
            case [b"busy"]:
                raise NoCapacity("no worker has room right now")
            case [b"reused"]:
                raise KeyReused("this idempotency key was used with another request body")
        raise StreamingError(f"put answered {answer!r}")

    def _put_call(
        self,
        job: Job,
        key: str = "",
        digest: str = "",
        *,
        must_run: bool = False,
        part: bool = False,
        card: ModelCard | None = None,
    ) -> tuple[Call, Reservation]:
        """The call, and the room it has reserved. Raises StoreFull, NeverFits."""
        settings, partition, body = self._wire.settings, self._partition(job.id), encode(job)
        key = idempotency_digest(job.tenant, key) if key else ""
        owed = owed_bytes(job, card)
        reserved = Reservation()
        if self._headroom is not None:
            reserved = self._headroom.reserve(partition, len(body), owed, part=part)
        args = (
            job.id, body, job.tenant, job.model, job.priority, job.reply_to, _or_empty(job.max_queue_ms),
            _or_empty(job.deadline_ms), key, digest, settings.lane_limit, "1" if must_run else "", settings.retention_s,
            "1" if part else "", job.events, encode_metadata(job.metadata), owed, _or_empty(reserved.most_owed),
        )  # fmt: skip
        return ("put", partition, args), reserved

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

    async def stop(self, job_ids: Sequence[str], *, waiting_only: bool) -> list[JobState | None]:
        """Cancel many, or only those nobody has begun; the states they were found in, None for one that is not kept.

        Raises Unavailable.
        """
        flag = "1" if waiting_only else ""
        answers = await self._wire.calls([("cancel", self._partition(job_id), (job_id, flag)) for job_id in job_ids])
        return [None if answer == b"unknown" else _state(answer) for answer in answers]

    async def shorten_retention(self, job_ids: Iterable[str], seconds: int) -> None:
        """Keep the records of ended jobs only so long: what they hold is kept elsewhere. Raises Unavailable."""
        pipeline = self._wire.redis.pipeline(transaction=False)
        for job_id in job_ids:
            pipeline.expire(partition_key(self._partition(job_id), "job", job_id), seconds, lt=True)
        with translated():
            await pipeline.execute()

    async def cancel(self, job_id: str) -> JobState:
        """Cancel a job; returns the state it was found in. Waiting jobs have ended on return, running ones will in a
        step. Raises UnknownJob, Unavailable."""
        return self._state(await self._wire.call("cancel", self._partition(job_id), job_id))

    async def abandon(self, job_id: str, address: str) -> bool:
        """Say that no client of the process at `address` waits for a job any more. It is cancelled, and its idempotency
        key is free again, unless other processes follow it or a request that did not wait was told its id.

        Returns whether it ends by this. Raises UnknownJob, Unavailable.
        """
        answer = await self._wire.call("cancel", self._partition(job_id), job_id, "", address)
        return answer != b"kept" and not self._state(answer).final

    async def follow(self, job_id: str, address: str, *, joining: bool = False) -> JobState:
        """Have a job's coming tokens sent to `address` too; returns its state.

        Raises UnknownJob, Unavailable; Abandoned (only if `joining`, because an idempotency key led here).
        """
        answer = await self._follows.call(self._partition(job_id), job_id, address, "1" if joining else "")
        if answer == b"abandoned":
            raise Abandoned(job_id)
        return self._state(answer)

    async def reset(self, job_id: str, resets: int) -> int:
        """Begin a new epoch of a job's events, unless another reader did since `resets` was read; the resets now.

        Raises UnknownJob, Unavailable.
        """
        answer = await self._wire.call("reset", self._partition(job_id), job_id, resets)
        if answer == b"unknown":
            raise UnknownJob(job_id)
        return int(answer)

    def _partition(self, job_id: str) -> int:
        partition = partition_of(job_id)
        if partition is None or partition not in self._wire.partitions:
            raise UnknownJob(job_id)
        return partition

    @staticmethod
    def _state(answer: bytes) -> JobState:
        if answer == b"unknown":
            raise UnknownJob("no such job")
        return _state(answer)


def _exceeded(quota: QuotaSettings, answer: Sequence[Any], left: Sequence[int | str]) -> QuotaExceeded:
    """What a put was refused for: by all that is kept, wherever it is."""
    name, limits = NAMES[answer[1].decode()], (quota.jobs, quota.job_bytes, quota.result_bytes)
    place = ("jobs", "job_bytes", "result_bytes").index(name)
    limit = limits[place] or 0
    return QuotaExceeded(name, answer[2] + limit - int(left[place]), limit)


def _brought_work(answer: Sequence[Any]) -> bool:
    """Whether a put has added a job."""
    return bool(answer) and answer[0] == b"queued"


def _state(answer: bytes) -> JobState:
    """A state that cannot be read is that of a job which fails as soon as its record is read."""
    try:
        return JobState(answer.decode())
    except ValueError:
        return JobState.FAILED


def _or_empty(value: int | None) -> int | str:
    return "" if value is None else value
