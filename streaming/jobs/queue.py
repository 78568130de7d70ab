"""Producer side of the queue: API and offline processes put jobs, cancel them and subscribe to their tokens.

A put is one atomic script and idempotent by the job's id, so a retry after a lost reply never makes a second job.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec

from penstock.engine import ModelCard
from streaming.errors import (
    Abandoned,
    ConversationChanged,
    KeyReused,
    LaneFull,
    LimitReached,
    NoCapacity,
    StoreFull,
    StreamingError,
    Unavailable,
    UnknownJob,
)
from streaming.ids import idempotency_digest, new_job_id, partition_of, tenant_partition
from streaming.jobs.codec import encode, encode_metadata
from streaming.jobs.job import CancelledBy, Job, JobState, preview_of
from streaming.jobs.quotas import Quotas, exceeded
from streaming.jobs.settings import (
    DEFAULT_WEIGHT,
    NO_LIMITS,
    NO_WEIGHTS,
    UNLIMITED,
    Limits,
    LimitSettings,
    QuotaSettings,
)
from streaming.jobs.waiting import FIRST, Cost, QueuePosition, cost_of
from streaming.keys import partition_key
from streaming.redis.client import RedisClient, ScriptBatcher
from streaming.store.monitor import FULL, Headroom

log = logging.getLogger(__name__)

PUT_RETRY_DELAY_S = 0.05
COPIED = ("id", "tenant", "model", "priority", "max_queue_ms", "delay_ms", "deadline_ms", "endpoint")
"""What `put` is told of a job as the job has it."""
_copied = attrgetter(*COPIED)
NO_QUOTAS: Mapping[str, int] = {}
NO_MEDIA: Mapping[str, Sequence[bytes]] = {}
NOT_READ = (0, 0, 0, 0, 0)
"""The position of a job that an earlier attempt at the same put has accepted."""


class Accepted(msgspec.Struct, frozen=True):
    """An accepted job. `joined`: its idempotency key belongs to a job that existed already."""

    id: str
    position: QueuePosition = FIRST
    """Its position in the order of the queue."""
    created_ms: int = 0
    joined: bool = False
    state: JobState = JobState.QUEUED
    """State at the put, if the job existed already."""
    attempts: int = 0
    epoch: int = 0
    """Its partition's epoch, for event ids; 0: not read, because the client waits for the answer."""
    rates: tuple[int, ...] = ()
    """What its key and tenant have left of their rates: of requests the limit, how many may come at once, and ms until
    all may; then of tokens. 0, 0, 0 without such a limit; (): no limit counts the job."""


_encode = msgspec.msgpack.Encoder().encode


class Queue:
    """Queue client; coalesces concurrent calls. With a `headroom`, it refuses jobs whose output would not fit into the
    store's memory beside the reservations of other jobs. `weights`: of tenants, see TenantSettings."""

    def __init__(
        self,
        client: RedisClient,
        headroom: Headroom | None = None,
        weights: Mapping[str, float] = NO_WEIGHTS,
        limits: Limits = NO_LIMITS,
    ) -> None:
        self._client, self._headroom, self._quotas = client, headroom or Headroom(client), Quotas(client)
        self._weights, self._limits = weights, limits
        self._puts, self._added_addresses = ScriptBatcher(client, "put"), ScriptBatcher(client, "follow")

    def new_id(self, tenant: str, idempotency_key: str = "", conversation: str = "", *, limited: bool = False) -> str:
        """Make a job id. A conversation determines the partition of its turns; else the tenant does if there is an
        idempotency key, so that equal ones meet, or if the tenant or one of its keys has limits (`limited`), which are
        counted there."""
        count = self._client.settings.partitions
        if conversation and (partition := partition_of(conversation, "conv_")) is not None:
            return new_job_id(partition % count)
        if limited or idempotency_key or self._limits.of_tenant(tenant) is not None:
            return new_job_id(tenant_partition(tenant, count))
        return new_job_id(int(random.random() * count))  # noqa: S311 - spreads load, hides nothing

    async def put(
        self,
        job: Job,
        *,
        idempotency_key: str = "",
        digest: str = "",
        must_run: bool = False,
        cost: Cost | None = None,
        partition: int | None = None,
        refusal: Exception | None = None,
        quota: QuotaSettings = UNLIMITED,
        version: int | None = None,
        part: bool = False,
        caller: str = "",
        key_limits: LimitSettings | None = None,
        media: Sequence[bytes] = (),
    ) -> Accepted:
        """Accept a job.

        Args:
            digest: Of the request body, for the idempotency check.
            must_run: Refuse the job unless a worker is idle.
            cost: What the job costs; None: estimate it without the model's card.
            partition: Of the job's id; None: compute it.
            refusal: Why no new job is accepted. Only the existing job of the idempotency key is returned then.
            quota: The tenant's storage quota.
            version: Of the conversation whose turn the job is, as its request has read it.
            part: The job is a line of a batch, which job lists omit.
            caller: The name of the API key, which usage and limits have; "": none.
            key_limits: Of that key.
            media: What is kept beside its record, as Job.media lists it.

        Raises LaneFull, StoreFull, NeverFits, QuotaExceeded, LimitReached, NoCapacity (only if must_run), KeyReused,
        ConversationChanged (it has another version or a turn, or is gone), Unavailable
        (then the job may exist; a retry with the same idempotency key finds it), and `refusal`.
        """
        if refusal is not None:
            return await self._existing(job, idempotency_key, digest, refusal)
        partition = self._partition(job.id) if partition is None else partition
        left = await self._quotas.left(job.tenant, partition, quota) if quota.bounds_jobs else NO_QUOTAS
        cost, body = cost or cost_of(job), encode(job)
        size, may_write = len(body) + (sum(map(len, media)) if media else 0), cost.may_write
        try:
            reserved = self._headroom.reserve(partition, size, may_write, part=part, share_of_tenant=quota.store_share)
        except StoreFull as error:
            return await self._existing(job, idempotency_key, digest, error)
        settings, conversation = self._client.settings, _conversation_of(job)
        given = dict(zip(COPIED, _copied(job), strict=True)) | {
            "reply": job.reply_to,
            "not_before": job.not_before_ms,
            "key": idempotency_digest(job.tenant, idempotency_key, conversation) if idempotency_key else None,
            "digest": digest,
            "lane_limit": settings.lane_limit,
            "must_run": must_run,
            "retention_s": settings.retention_s,
            "part": part,
            "events": job.events or None,
            "may_write": may_write,
            "max_reserved": reserved.max_reserved,
            "order": f"{cost.prompt}:{cost.output}:{self._weights.get(job.tenant, DEFAULT_WEIGHT)}:{cost.patience_ms}",
            "patience_ms": cost.patience_ms,
            "dated": job.response is not None or job.message is not None,
            "conversation": conversation or None if version is not None else None,
            "version": version,
            "webhook": job.webhook or None,
            "preview": "" if part else preview_of(job.prompt),
            "quotas": left or None,
            "share": reserved.share_of_tenant,
            "caller": caller or None,
            "media": ("keep" if job.response is not None and job.response.store else "1") if job.media else None,
            "adapter": job.adapter or None,
        }
        if limits := self._limits.of(job.tenant, job.model, caller, key_limits):
            given |= {**limits, "prompt": cost.prompt, "output": cost.output, "guessed": cost.guessed}
        args = (_encode(given), body, encode_metadata(job.metadata), *media)
        # Many bytes go alone: while a batch of puts runs, the server does nothing else.
        call = partial(self._client.call, "put") if media else self._puts.call
        answer: Sequence[Any] = ()
        try:
            try:
                answer = await call(partition, *args)
            except Unavailable as error:  # the script recognises a second put by the job's id
                log.debug("a put is sent again: %s", error)
                await asyncio.sleep(PUT_RETRY_DELAY_S)
                answer = await call(partition, *args)
        finally:
            if not answer or answer[0] != b"queued":  # no job was added
                reserved.give_back()
        if answer[0] == b"quota":
            raise exceeded(quota, answer, left)
        return self._accepted(job, answer, reserved.size)

    async def _existing(self, job: Job, key: str, digest: str, refusal: Exception) -> Accepted:
        """Return the job that a key belongs to. Raises `refusal` if there is none, KeyReused, Unavailable."""
        if not key:
            raise refusal
        idempotency, waits = idempotency_digest(job.tenant, key, _conversation_of(job)), "1" if job.reply_to else ""
        args = (job.tenant, idempotency, digest, waits)
        answer = await self._client.call("join", self._partition(job.id), *args)
        if answer[0] == b"free":
            raise refusal
        return self._accepted(job, answer)

    async def put_parts(
        self,
        jobs: Iterable[Job],
        cards: Mapping[str, ModelCard] | None = None,
        quota: QuotaSettings = UNLIMITED,
        caller: str = "",
        key_limits: LimitSettings | None = None,
        media: Mapping[str, Sequence[bytes]] = NO_MEDIA,
    ) -> list[Accepted | LaneFull | StoreFull]:
        """Accept many lines of a batch together, as jobs that job lists omit; returns the result of each. A refused job
        does not affect those behind it. The call is idempotent if a retry uses the same ids. `cards`: by model name.
        `caller`: as in put. `media`: by job id, as in put. Raises Unavailable."""

        async def put(job: Job) -> Accepted | LaneFull | StoreFull:
            try:
                cost = cost_of(job, (cards or {}).get(job.model))
                own = media.get(job.id, ())
                return await self.put(
                    job, cost=cost, part=True, quota=quota, caller=caller, key_limits=key_limits, media=own
                )
            except (LaneFull, StoreFull) as error:
                return error

        answers: list[Accepted | LaneFull | StoreFull] = []
        for answer in await asyncio.gather(*map(put, jobs), return_exceptions=True):  # no put outlasts this call
            if isinstance(answer, BaseException) and not isinstance(answer, LaneFull | StoreFull):
                raise answer
            answers.append(answer)
        return answers

    def _accepted(self, job: Job, answer: Sequence[Any], needed: int = 0) -> Accepted:
        match answer:
            case [b"queued", created, epoch, *rest]:
                higher, requeued, own, others, served = rest[:5] or NOT_READ
                found = QueuePosition(higher, requeued, own, others, served, job.priority)
                return Accepted(job.id, found, created, epoch=epoch, rates=tuple(rest[5:]))
            case [b"joined", known, state, created, attempts, epoch]:
                return Accepted(known.decode(), FIRST, created, True, JobState(state.decode()), attempts, epoch)
            case [b"full", waiting, own]:
                raise LaneFull(waiting, own)
            case [b"limit", account, name, limit, used, retry_ms, *rates]:
                amounts = (float(limit), float(used), retry_ms, tuple(rates))
                raise LimitReached(account.decode(), name.decode(), *amounts)
            case [b"crowded"]:
                raise StoreFull(FULL, needed)
            case [b"busy"]:
                raise NoCapacity("no worker has room right now")
            case [b"reused"]:
                raise KeyReused("this idempotency key was used with another request body")
            case [b"changed"]:
                raise ConversationChanged("another turn has begun, or items have changed")
        raise StreamingError(f"put answered {answer!r}")

    async def ended(self, job_ids: Iterable[str]) -> list[str]:
        """Filter ids: those of jobs that have ended or are no longer kept. Raises Unavailable."""
        parts: dict[int, list[str]] = {}
        for job_id in job_ids:
            parts.setdefault(self._partition(job_id), []).append(job_id)
        answers = await self._client.calls([("ended", partition, ids) for partition, ids in parts.items()])
        return [job_id.decode() for answer in answers for job_id in answer]

    async def known(self, job_ids: Sequence[str]) -> list[str]:
        """Filter ids: those of jobs that are kept, in any state. Raises Unavailable."""
        found = await self._client.calls([("EXISTS", *self._record_of(job_id)) for job_id in job_ids])
        return [job_id for job_id, there in zip(job_ids, found, strict=True) if there]

    async def stop(self, job_ids: Sequence[str], *, waiting_only: bool) -> list[JobState | None]:
        """Cancel many lines of a batch, or only the queued ones; returns the states they were found in, None for an
        unknown job. Raises Unavailable."""
        how = ("1" if waiting_only else "", CancelledBy.BATCH)
        answers = await self._client.calls([("cancel", self._partition(job_id), (job_id, *how)) for job_id in job_ids])
        return [None if answer == b"unknown" else _state_of(answer) for answer in answers]

    async def shorten_retention(self, job_ids: Iterable[str], seconds: int, with_media: Iterable[str] = ()) -> None:
        """Let the records of ended jobs, whose results are stored elsewhere, expire sooner, and the media of those of
        them that have any. Raises Unavailable."""
        records = [self._record_of(job_id) for job_id in job_ids] + [
            self._record_of(job_id, "media") for job_id in with_media
        ]
        await self._client.calls([("EXPIRE", partition, (*key, seconds, "LT")) for partition, key in records])

    async def cancel(self, job_id: str, by: CancelledBy = CancelledBy.OWNER) -> JobState:
        """Cancel a job; returns the state it was found in. A queued job has ended on return, a running one ends within
        an engine step. Raises UnknownJob, Unavailable."""
        return _state_of(await self._client.call("cancel", self._partition(job_id), job_id, "", by))

    async def abandon(self, job_id: str, address: str, by: CancelledBy = CancelledBy.READER) -> bool:
        """Cancel a job because the last client of the process at `address` disconnected, and free its idempotency key;
        but keep the job if other processes get its tokens or a client that does not wait has its id.

        Returns whether the job ends by this. Raises UnknownJob, Unavailable.
        """
        answer = await self._client.call("cancel", self._partition(job_id), job_id, "", by, address)
        return answer != b"kept" and not _state_of(answer).final

    async def add_address(self, job_id: str, address: str, *, joining: bool = False, again: bool = False) -> JobState:
        """Have a job's coming tokens sent to `address`, too; returns the job's state. `again`: although the job's own
        client waits there for an answer in one piece.

        Raises UnknownJob, Unavailable; Abandoned (only if `joining`, because an idempotency key led here).
        """
        flags = ["1" if flag else "" for flag in (joining, again)]
        answer = await self._added_addresses.call(self._partition(job_id), job_id, address, *flags)
        if answer == b"abandoned":
            raise Abandoned(job_id)
        return _state_of(answer)

    async def reset(self, job_id: str, resets: int) -> int:
        """Begin a new epoch of a job's events, unless another reader did since `resets` was read; returns the resets.

        Raises UnknownJob, Unavailable.
        """
        return int(_known(await self._client.call("reset", self._partition(job_id), job_id, resets)))

    def _partition(self, job_id: str) -> int:
        return self._client.partition_of(job_id, "job_", UnknownJob)

    def _record_of(self, job_id: str, kind: str = "job") -> tuple[int, tuple[str]]:
        """The partition and the key of a job's record, or of its media."""
        partition = self._partition(job_id)
        return partition, (partition_key(partition, kind, job_id),)


def _conversation_of(job: Job) -> str:
    """The conversation whose turn a job is, or ""."""
    return job.response.conversation if job.response is not None else ""


def _known(answer: Any) -> Any:
    """The answer of a script. Raises UnknownJob if it says so."""
    if answer == b"unknown":
        raise UnknownJob("no such job")
    return answer


def _state_of(answer: bytes) -> JobState:
    """Decode a state; a malformed one counts as failed, because the job fails when its record is read. Raises
    UnknownJob."""
    try:
        return JobState(_known(answer).decode())
    except ValueError:
        return JobState.FAILED
