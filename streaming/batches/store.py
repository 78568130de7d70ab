"""Records of batches and files in the store: requests, leases, progress, and the owner's cancel, pause and resume.

One offline process at a time runs a batch, for one turn, under a lease. The batch's epoch is the fencing token: it
grows with every turn, and the store refuses the next write of a process with an older one. A file's record has its
owner, name, size and expiry; its bytes are in the files folder. Nothing here knows lines or files' contents.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import compress
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from streaming.errors import (
    DecodeError,
    KeyReused,
    QuotaExceeded,
    StreamingError,
    Superseded,
    UnknownBatch,
    UnknownFile,
)
from streaming.ids import joined, new_batch_id, new_file_id, partition_of, tenant_partition
from streaming.jobs.codec import Usage, decode, encode
from streaming.jobs.quotas import NAMES
from streaming.jobs.settings import LimitSettings
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import Call, ClientUser, RedisClient, news, page, place_of

UNREADABLE = "(its record cannot be read)"
"""Name shown for a file whose record is malformed."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a file. Its bytes are in the folder of files, under its id; `name` is only for people."""

    id: str
    tenant: str
    name: str
    size: int
    purpose: str
    created_ms: int
    expires_ms: int


_FILE = msgspec.msgpack.Decoder(StoredFile)


class Files(ClientUser):
    """File records. Every async method raises Unavailable."""

    def new_id(self, tenant: str) -> str:
        return new_file_id(tenant_partition(tenant, self._client.settings.partitions))

    async def put(self, file: StoredFile, limit: int | None = None) -> None:
        """Store the record of a file whose bytes are in the files folder. Raises QuotaExceeded if the tenant's files
        would then have more bytes than `limit`."""
        args = (file.id, file.tenant, encode(file), file.expires_ms - file.created_ms, "" if limit is None else limit)
        answer = await self._client.call("put_file", partition_of(file.id, "file-") or 0, *args)
        if limit is not None and isinstance(answer, list):
            raise QuotaExceeded(NAMES["files"], answer[2], limit)

    async def get(self, file_id: str, tenant: str) -> StoredFile:
        """Read a file's record. Raises UnknownFile, also for another tenant's file."""
        partition = self._client.partition_of(file_id, "file-", UnknownFile)
        data = await self._client.call("GET", partition, partition_key(partition, "file", file_id))
        if data is None or (file := _file(file_id, data)) is None or file.tenant != tenant:
            raise UnknownFile(file_id)
        return file

    async def recent(
        self, tenant: str, after: str | None, limit: int, *, newest_first: bool = True
    ) -> list[StoredFile]:
        """List a tenant's files in the order of their creation, behind the file `after`, which may be deleted. Raises
        UnknownFile if the tenant never had it."""
        partition = tenant_partition(tenant, self._client.settings.partitions)
        ids = await _listed(self._client, "files", tenant, after, limit, UnknownFile, newest_first=newest_first)
        if not ids:
            return []
        found = await self._client.call("MGET", partition, *(partition_key(partition, "file", name) for name in ids))
        kept = [(name, data) for name, data in zip(ids, found, strict=True) if data is not None]
        unreadable = StoredFile(id="", tenant=tenant, name=UNREADABLE, size=0, purpose="", created_ms=0, expires_ms=0)
        return [_file(name, data) or msgspec.structs.replace(unreadable, id=name) for name, data in kept]

    async def forget(self, file_id: str, tenant: str) -> None:
        """Delete the record; remove the bytes before. The quota counts them while an unfinished batch reads them.
        Idempotent, also without a record."""
        await self._client.call("forget", partition_of(file_id, "file-") or 0, "file", file_id, tenant)

    async def known(self, file_ids: list[str]) -> set[str]:
        """Filter ids: those that have a record."""
        homes = [partition_of(each, "file-") or 0 for each in file_ids]
        calls = [("EXISTS", p, (partition_key(p, "file", each),)) for p, each in zip(homes, file_ids, strict=True)]
        return set(compress(file_ids, await self._client.calls(calls)))

    async def expired(self, limit: int) -> list[tuple[str, str]]:
        """List expired files as (id, tenant), also those whose record is malformed or lost."""
        found = await _overdue(self._client, limit)
        return [(name, tenant) for _, name, tenant in found if name.startswith("file-")]


def _file(file_id: str, data: bytes) -> StoredFile | None:
    """Decode a record; None if it is malformed."""
    try:
        return decode(_FILE, data)
    except DecodeError as error:
        log.warning("the record of a file cannot be read: %s", error, extra={"file": file_id})
        return None


async def _listed(
    client: RedisClient,
    kind: str,
    tenant: str,
    after: str | None,
    limit: int,
    unknown: type[StreamingError],
    *,
    newest_first: bool = True,
) -> list[str]:
    """The ids in a tenant's list of files or batches, behind `after`, which may have been deleted since. Raises
    `unknown` if the list never had it, or that is not known any more (place_of); Unavailable."""
    partition = tenant_partition(tenant, client.settings.partitions)
    key, behind = partition_key(partition, kind, tenant), None
    if after is not None:
        score = await client.call("ZSCORE", partition, key, after)
        place = await place_of(client, partition, after, tenant) if score is None else int(float(score))
        if place is None:
            raise unknown(after)
        behind = (place, after)
    return [name for name, _ in await page(client, partition, key, behind, limit, newest_first=newest_first)]


async def _overdue(client: RedisClient, limit: int) -> list[tuple[int, str, str]]:
    """Up to `limit` files and batches of each partition whose time is over, the oldest first: partition, id and tenant.
    Raises Unavailable."""
    between, now = ("LIMIT", 0, limit), await client.now_ms()
    calls = [("ZRANGEBYSCORE", p, (partition_key(p, "expiring"), "-inf", now, *between)) for p in client.partitions]
    found = zip(client.partitions, await client.calls(calls), strict=True)
    rows = [(partition, member.decode(errors="replace")) for partition, members in found for member in members]
    return [(partition, *row.partition(":")[::2]) for partition, row in rows]


class BatchState(StrEnum):
    """State of a batch, by OpenAI's names."""

    SCHEDULED = "scheduled"
    """It begins other batches, by its schedule, until it is cancelled."""
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in (BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The owner's request: every line of a file is a request to one endpoint."""

    id: str
    tenant: str
    ceiling: Priority
    """The highest lane its lines may use."""
    endpoint: str
    input_file: str
    window: str
    """As the client wrote it: 15m, 1h, 24h or none."""
    window_ms: int | None = None
    """Time limit from creation to the last line; None: no limit."""
    output_keep_ms: int
    metadata: dict[str, str] = {}
    token_limit: int | None = None
    """Tokens that its tenant may have waiting, including this batch's."""
    store_share: float | None = None
    """Share of the store that its tenant may take; None: any."""
    caller: str = ""
    """Name of the key that made it."""
    key_limits: LimitSettings | None = None
    """Of that key, as they were then."""
    limited: bool = False
    """Its lines go to the partition of its tenant, which counts in limits."""
    events: str = ""
    """Recipients of the event of its end, as letters: "b" the broker, "w" webhooks; "": none."""
    trace: dict[str, str] = {}
    """W3C trace context of the request that created it."""
    cron: str = ""
    """When it begins batches that are like it otherwise; "": it is no schedule."""
    timezone: str = ""
    file_limit: int | None = None
    """Of a schedule: as in Batches.create."""
    lines: int = 0
    """Of its input, if the request that made it has them; 0: not known before it is read."""


class LineFault(msgspec.Struct, frozen=True):
    """An error in one line, or in the whole file (line 0)."""

    line: int
    code: str
    message: str
    param: str | None = None


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a batch is. Times are Redis milliseconds, 0 for "not yet"."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    not_run: int = 0
    """Of the failed ones, those that were never computed, because the batch was cancelled or expired."""
    distinct: int = 0
    """Lines that differ, which are computed: the others get copies of their answers."""
    in_queue: int = 0
    """Lines that wait in a lane or run."""
    retried: int = 0
    usage: Usage = Usage()
    model: str = ""
    """"" if the lines name several."""
    lane: str = ""
    lane_reason: str = ""
    per_second: float = 0.0
    """Lines that ended a second, lately."""
    faults: tuple[LineFault, ...] = ()
    output_file: str = ""
    error_file: str = ""
    began_ms: int = 0
    finalizing_ms: int = 0
    ended_ms: int = 0
    tokens: int = 0
    """Estimate of the tokens to compute, taken when the lines were read."""
    next_ms: int = 0
    """When a schedule begins its next batch."""
    last_batch: str = ""
    """The one that it has begun last."""


_BATCH = msgspec.msgpack.Decoder(Batch)
_PROGRESS = msgspec.msgpack.Decoder(BatchProgress)


BatchCommand: TypeAlias = Literal["cancel", "pause", "resume"]
Reason: TypeAlias = Literal["due", "unanswered", "lapsed"]

log = logging.getLogger(__name__)

MALFORMED = LineFault(0, "malformed_batch", "What the store holds of this batch cannot be read. Create it again.")

FIELDS = ("asked", "status", "paused", "created", "expires", "cancelling", "progress", "tenant")
"""Of a batch's record, in the order in which the scripts return them."""
MALFORMED_ERRORS = (DecodeError, ValueError, OverflowError, AttributeError, TypeError)
"""What parsing a malformed record raises."""

LEASES_HELD = 2
LEASES_UNTIL_NEXT_NOTICE = 4
"""In lengths of [redis] lease_ms: how long a batch's lease lasts, and when a due batch without a turn gets a new
notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """The record of a batch. Times are Redis milliseconds, 0 for "not yet" or "never"."""

    batch: Batch
    state: BatchState
    paused: bool = False
    created_ms: int = 0
    expires_ms: int = 0
    cancelling_ms: int = 0
    progress: BatchProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLease(BatchRecord):
    """A batch that this process runs, until its lease lapses; `save` renews it."""

    epoch: int
    now_ms: int


class DueNotice(NamedTuple):
    """A batch is due: an offline process must be told to run it."""

    batch_id: str
    number: int
    reason: Reason
    """due; unanswered: no process acted on the last notice; lapsed: the lease of the process that ran it lapsed."""


class Batches:
    """Batch records. Stateless; many may share a client. Every async method raises Unavailable."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._lease_ms = LEASES_HELD * client.settings.lease_ms

    # --- its owner's side --------------------------------------------------------------------------------------------

    def new_id(self, tenant: str, idempotency_key: str = "") -> str:
        """Make a batch id; the same key gives the same id."""
        seed = joined(tenant, idempotency_key) if idempotency_key else ""
        return new_batch_id(tenant_partition(tenant, self._client.settings.partitions), seed)

    async def create(
        self, batch: Batch, digest: str, file_limit: int | None = None, input_bytes: int = 0
    ) -> BatchRecord:
        """Accept a batch; returns its record, new or not.

        Args:
            digest: Of the request, to detect another request under the same id.
            file_limit: The tenant's quota of file bytes, to which the batch will add its output.
            input_bytes: Size of the input, which counts until the batch has ended, even if its file is deleted.

        Raises KeyReused, QuotaExceeded.
        """
        most = "" if file_limit is None else file_limit
        window, state = batch.window_ms or "", BatchState.VALIDATING
        if batch.cron:
            window, state = "", BatchState.SCHEDULED
        source = (batch.input_file, input_bytes)
        args = (batch.id, batch.tenant, encode(batch), digest, window, batch.events, most, *source, state)
        answer = await self._client.call("put_batch", self._partition(batch.id), *args)
        if answer == b"reused":
            raise KeyReused("this idempotency key was used with another request body")
        if answer[0] == b"quota":
            raise QuotaExceeded(NAMES["files"], answer[2], file_limit or 0)
        record = _record(batch.id, answer)
        assert record is not None
        return record

    async def get(self, batch_id: str, tenant: str) -> BatchRecord:
        """Read a batch. Raises UnknownBatch, also for another tenant's."""
        (record,) = await self._records([batch_id])
        if record is None or record.batch.tenant != tenant:
            raise UnknownBatch(batch_id)
        return record

    async def recent(
        self, tenant: str, after: str | None, limit: int, *, newest_first: bool = True
    ) -> list[BatchRecord]:
        """List a tenant's batches in the order of their creation, behind the batch `after`, which may be forgotten.
        Raises UnknownBatch if the tenant never had it."""
        ids = await _listed(self._client, "batches", tenant, after, limit, UnknownBatch, newest_first=newest_first)
        records = await self._records([name for name in ids if self._is_ours(name)])
        return [record for record in records if record is not None]

    async def request(self, batch_id: str, command: BatchCommand) -> BatchState:
        """Cancel, pause or resume a batch; returns the state it was found in. Raises UnknownBatch."""
        answer = await self._client.call("steer", self._partition(batch_id), batch_id, command)
        if answer == b"unknown":
            raise UnknownBatch(batch_id)
        return BatchState(answer.decode())

    # --- the offline process's side ----------------------------------------------------------------------------------

    async def due(self, limit: int) -> list[DueNotice]:
        """List due batches, each with a new notice."""
        again_ms = LEASES_UNTIL_NEXT_NOTICE * self._client.settings.lease_ms
        answers = await self._client.calls([("due", p, (limit, again_ms)) for p in self._client.partitions])
        return [DueNotice(name.decode(), turn, why.decode()) for answer in answers for name, turn, why in answer]

    def news(self, every_s: float) -> AsyncGenerator[None]:
        """Yield when `due` should be asked: at once, when a batch is due, and at least every `every_s`. Never ends."""
        return news(self._client, "offline", "due", every_s)

    async def totals(self, tenants: Iterable[str]) -> tuple[int, int]:
        """Count the unfinished batches, and the tokens that those of these tenants still have to compute."""
        partitions = self._client.partitions
        homes = [(tenant_partition(tenant, len(partitions)), tenant) for tenant in tenants]
        calls: list[Call] = [("ZCARD", partition, (partition_key(partition, "due"),)) for partition in partitions]
        calls += [("HVALS", home, (partition_key(home, "enqueued", tenant),)) for home, tenant in homes]
        answers = await self._client.calls(calls)
        counts, waiting = answers[: len(partitions)], answers[len(partitions) :]
        return sum(counts), sum(int(count) for each in waiting for count in each)

    async def hold(self, batch_id: str, turn: int) -> BatchLease:
        """Begin a turn: take the batch's lease. `turn`: the number of the notice. Raises Superseded if the notice is
        not the latest, or if there is nothing to do."""
        answer = await self._client.call("hold", self._partition(batch_id), batch_id, turn, self._lease_ms)
        if isinstance(answer, bytes):  # gone, stale or held
            raise Superseded(f"{batch_id} is {answer.decode()}")
        epoch, now, *values = answer
        try:
            return BatchLease(**_parsed(values), epoch=epoch, now_ms=now)
        except MALFORMED_ERRORS as error:
            # End it, so that it is not due again and again.
            progress, keep_s = encode(BatchProgress(faults=(MALFORMED,))), self._client.settings.retention_s
            args = (batch_id, epoch, self._lease_ms, BatchState.FAILED, progress, "", "", keep_s)
            await self._client.call("save", self._partition(batch_id), *args)
            raise Superseded(f"the record of {batch_id} cannot be read, the batch has failed: {error}") from error

    async def reserve(self, hold: BatchLease, tokens: int) -> tuple[bool, int]:
        """Reserve the batch's tokens in the tenant's quota; returns whether there is room, and the tokens of the
        tenant's other batches. Raises Fenced."""
        limit = hold.batch.token_limit
        args = (hold.batch.id, hold.epoch, hold.batch.tenant, tokens, "" if limit is None else limit)
        room, waiting = await self._client.call("reserve", self._partition(hold.batch.id), *args)
        return bool(room), int(waiting)

    async def save(
        self,
        hold: BatchLease,
        state: BatchState,
        progress: BatchProgress,
        *,
        tokens: int | None = None,
        rest_ms: int | None = None,
        keep_s: int = 0,
        files: Sequence[StoredFile] = (),
    ) -> BatchLease:
        """Save the batch's progress and renew the lease. A final state ends the batch. Returns the batch as it stands
        then: its owner may have changed the state, or paused it.

        Args:
            tokens: Tokens still to be computed, for the tenant's quota.
            rest_ms: Ends the turn: the batch is due again after so many milliseconds, at once if it is not paused.
            keep_s: How long the record of an ended batch is kept.
            files: Files that an ended batch leaves, whose records are stored in the same step.

        Raises Fenced.
        """
        args: list[str | bytes | int] = [
            hold.batch.id, hold.epoch, self._lease_ms, state, encode(progress), "" if tokens is None else tokens,
            "" if rest_ms is None else rest_ms, keep_s,
        ]  # fmt: skip
        for file in files:
            args += [file.id, encode(file), file.expires_ms - file.created_ms]
        now, status, paused = await self._client.call("save", self._partition(hold.batch.id), *args)
        found = BatchState(status.decode())
        return replace(hold, now_ms=now, state=found, paused=bool(paused), progress=progress)

    async def forget(self, batch_id: str, tenant: str) -> None:
        """Delete the record of a batch that has ended. Idempotent."""
        await self._client.call("forget", self._partition(batch_id), "batch", batch_id, tenant)

    async def forget_expired(self, limit: int) -> list[str]:
        """Delete the records of ended batches that have expired; returns their ids."""
        found = [each for each in await _overdue(self._client, limit) if self._is_ours(each[1])]
        await self._client.calls([("forget", partition, ("batch", *each)) for partition, *each in found])
        return [name for _, name, _ in found]

    async def states(self, batch_ids: Sequence[str]) -> dict[str, BatchState | None]:
        """Read the states of batches, None for one without a record; other ids are left out."""
        ids = [each for each in batch_ids if self._is_ours(each)]
        records = await self._records(ids)
        return {each: record.state if record else None for each, record in zip(ids, records, strict=True)}

    # --- helpers -----------------------------------------------------------------------------------------------------

    async def _records(self, ids: Sequence[str]) -> list[BatchRecord | None]:
        keys = [(partition := self._partition(each), partition_key(partition, "batch", each)) for each in ids]
        calls: list[Call] = [("HMGET", partition, (key, *FIELDS)) for partition, key in keys]
        return list(map(_record, ids, await self._client.calls(calls)))

    def _is_ours(self, batch_id: str) -> bool:
        return partition_of(batch_id, "batch_") in self._client.partitions

    def _partition(self, batch_id: str) -> int:
        return self._client.partition_of(batch_id, "batch_", UnknownBatch)


def _record(batch_id: str, values: Sequence[bytes | None]) -> BatchRecord | None:
    """Decode a record; a malformed one is shown as failed."""
    if values[0] is None:
        return None
    try:
        return BatchRecord(**_parsed(values))
    except MALFORMED_ERRORS as error:
        log.warning("the record of a batch cannot be read: %s", error, extra={"batch": batch_id})
        tenant = (values[-1] or b"").decode(errors="replace")
        none: dict[str, Any] = {"endpoint": "", "input_file": "", "window": "none", "output_keep_ms": 0}
        nothing = Batch(id=batch_id, tenant=tenant, ceiling=Priority.BATCH, **none)
        return BatchRecord(batch=nothing, state=BatchState.FAILED, progress=BatchProgress(faults=(MALFORMED,)))


def _parsed(values: Sequence[Any]) -> dict[str, Any]:
    """The fields of a BatchRecord. Raises MALFORMED_ERRORS."""
    asked, status, paused, created, expires, cancelling, progress, _ = values
    return {
        "batch": decode(_BATCH, asked),
        "state": BatchState(status.decode()),
        "paused": bool(paused),
        "created_ms": int(float(created)),
        "expires_ms": int(float(expires or 0)),
        "cancelling_ms": int(float(cancelling or 0)),
        "progress": decode(_PROGRESS, progress) if progress else BatchProgress(),
    }
