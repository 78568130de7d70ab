"""Redelivery counter: counts how often the broker redelivered a message, so that a poison message can be rejected."""

from __future__ import annotations

import hashlib

from streaming.ids import joined
from streaming.keys import partition_key
from streaming.redis.client import ClientUser
from streaming.redis.failures import translated

RETENTION_S = 86_400


class Redeliveries(ClientUser):
    """Counters in the store. Every method raises Unavailable."""

    async def begin(self, queue: str, message_id: str) -> int:
        """Count a redelivered message; returns how often it was redelivered without an outcome, this time included."""
        key = self._key(queue, message_id)
        with translated():
            pipeline = self._client.redis.pipeline(transaction=False)
            pipeline.incr(key)
            pipeline.expire(key, RETENTION_S)
            count, _ = await pipeline.execute()
        return int(count)

    async def settle(self, queue: str, message_id: str) -> None:
        """Delete the counter of a message that was accepted, rejected or postponed."""
        with translated():
            await self._client.redis.delete(self._key(queue, message_id))

    def _key(self, queue: str, message_id: str) -> str:
        digest = hashlib.sha256(joined(queue, message_id).encode(errors="surrogatepass"))
        return partition_key(digest.digest()[0] % self._client.settings.partitions, "redelivery", digest.hexdigest())
