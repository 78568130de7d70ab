"""File records in the store: owner, name, size and expiry of each file, whose bytes are in the files folder."""

from __future__ import annotations

import logging
from typing import cast

import msgspec

from streaming.errors import DecodeError, QuotaExceeded, UnknownFile
from streaming.ids import kept_partition, new_file_id, tenant_partition
from streaming.jobs.codec import decode, encode
from streaming.jobs.quotas import NAMES
from streaming.keys import partition_key
from streaming.redis.client import ClientUser, cursor_after, overdue, owned, page

log = logging.getLogger(__name__)

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
        answer = await self._client.call("put_file", kept_partition(file.id) or 0, *args)
        if limit is not None and isinstance(answer, list):
            raise QuotaExceeded(NAMES["files"], answer[2], limit)

    async def get(self, file_id: str, tenant: str) -> StoredFile:
        """Read a file's record. Raises UnknownFile, also for another tenant's file."""
        partition = kept_partition(file_id)
        if partition not in self._client.partitions or not file_id.startswith("file-"):
            raise UnknownFile(file_id)
        partition = cast(int, partition)
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
        key = partition_key(partition, "files", tenant)
        behind = await cursor_after(self._client, partition, key, after, tenant) if after is not None else None
        if after is not None and behind is None:
            raise UnknownFile(after)
        ids = [name for name, _ in await page(self._client, partition, key, behind, limit, newest_first=newest_first)]
        if not ids:
            return []
        found = await self._client.call("MGET", partition, *(partition_key(partition, "file", name) for name in ids))
        pairs = [(name, data) for name, data in zip(ids, found, strict=True) if data is not None]
        return [_file(name, data) or _unreadable(name, tenant) for name, data in pairs]

    async def forget(self, file_id: str, tenant: str) -> None:
        """Delete the record; remove the bytes before. The quota counts them while an unfinished batch reads them.
        Idempotent, also without a record."""
        await self._client.call("forget", kept_partition(file_id) or 0, "file", file_id, tenant)

    async def known(self, file_ids: list[str]) -> set[str]:
        """Filter ids: those that have a record."""
        places = [(kept_partition(file_id) or 0, file_id) for file_id in file_ids]
        found = await self._client.calls(
            [("EXISTS", place, (partition_key(place, "file", file_id),)) for place, file_id in places]
        )
        return {file_id for file_id, there in zip(file_ids, found, strict=True) if there}

    async def expired(self, limit: int) -> list[tuple[str, str]]:
        """List expired files as (id, tenant), also those whose record is malformed or lost."""
        now = await self._client.now_ms()
        found: list[tuple[str, str]] = []
        for partition in self._client.partitions:
            names = await overdue(self._client, partition, partition_key(partition, "expiring"), now, limit)
            found += [(name, tenant) for name, tenant in map(owned, names) if name.startswith("file-")]
        return found


def _file(file_id: str, data: bytes) -> StoredFile | None:
    """Decode a record; None if it is malformed."""
    try:
        return decode(_FILE, data)
    except DecodeError as error:
        log.warning("the record of a file cannot be read: %s", error, extra={"file": file_id})
        return None


def _unreadable(file_id: str, tenant: str) -> StoredFile:
    """Placeholder in lists for a malformed record; the file's bytes still exist."""
    return StoredFile(id=file_id, tenant=tenant, name=UNREADABLE, size=0, purpose="", created_ms=0, expires_ms=0)
