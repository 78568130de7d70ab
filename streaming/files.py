"""What is known of files: whose they are, their names for people, how long they are kept. Not where their bytes lie."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, cast

from streaming.errors import UnknownFile
from streaming.keys import kept_partition, new_file_id, partition_key, tenant_partition
from streaming.listing import overdue, page
from streaming.messages import StoredFile, decode_file, encode
from streaming.wire import Wire, translated


class Files:
    """Stateless; many may share a wire. Every method that waits raises Unavailable."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def new_id(self, tenant: str) -> str:
        return new_file_id(tenant_partition(tenant, self._wire.settings.partitions))

    async def put(self, file: StoredFile) -> None:
        """Make a file known whose bytes are in their place."""
        args = (file.id, file.tenant, encode(file), file.expires_ms - file.created_ms)
        await self._wire.call("put_file", kept_partition(file.id) or 0, *args)

    async def get(self, file_id: str, tenant: str) -> StoredFile:
        """Raises UnknownFile, also for somebody else's."""
        partition = kept_partition(file_id)
        if partition not in self._wire.partitions or not file_id.startswith("file-"):
            raise UnknownFile(file_id)
        with translated():
            data: Any = await self._wire.redis.get(partition_key(cast(int, partition), "file", file_id))
        if data is None or (file := decode_file(data)).tenant != tenant:
            raise UnknownFile(file_id)
        return file

    async def recent(
        self, tenant: str, after: StoredFile | None, limit: int, *, newest_first: bool = True
    ) -> list[StoredFile]:
        """A tenant's files in the order they were made, behind `after`."""
        partition = tenant_partition(tenant, self._wire.settings.partitions)
        key = partition_key(partition, "files", tenant)
        behind = None
        if after is not None:
            with translated():
                score = await self._wire.redis.zscore(key, after.id)
            behind = (int(score if score is not None else after.created_ms), after.id)
        ids = [name for name, _ in await page(self._wire, key, behind, limit, newest_first=newest_first)]
        if not ids:
            return []
        with translated():
            found = await cast(
                Awaitable[list[bytes | None]],
                self._wire.redis.mget([partition_key(partition, "file", name) for name in ids]),
            )
        return [decode_file(data) for data in found if data is not None]

    async def forget(self, file: StoredFile) -> None:
        """Drop the record; the bytes are to be removed before."""
        await self._wire.call("forget", kept_partition(file.id) or 0, "file", file.id, file.tenant)

    async def known(self, file_ids: list[str]) -> set[str]:
        """Those of these ids that have a record."""
        with translated():
            pipeline = self._wire.redis.pipeline(transaction=False)
            for file_id in file_ids:
                pipeline.exists(partition_key(kept_partition(file_id) or 0, "file", file_id))
            found: list[Any] = await pipeline.execute()
        return {file_id for file_id, there in zip(file_ids, found, strict=True) if there}

    async def expired(self, limit: int) -> list[StoredFile]:
        """Files whose time is over."""
        now, found = await self._wire.now_ms(), []
        for partition in self._wire.partitions:
            names = await overdue(self._wire, partition_key(partition, "expiring"), now, limit)
            keys = [partition_key(partition, "file", name) for name in names if name.startswith("file-")]
            with translated():
                data: list[Any] = await cast(Awaitable[Any], self._wire.redis.mget(keys)) if keys else []
            found += [decode_file(each) for each in data if each is not None]
        return found
