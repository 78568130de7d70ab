"""Broker messages that came again because whoever took them failed without an answer: counted, so that one that no
process can work with comes only so often."""

from __future__ import annotations

import hashlib

from streaming.ids import joined
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from streaming.redis.failures import translated

KEEP_S = 86_400


class Redeliveries:
    """Stateless; many may share a wire. Every method raises Unavailable."""

    def __init__(self, wire: RedisClient) -> None:
        self._wire = wire

    async def begin(self, queue: str, message_id: str) -> int:
        """A redelivered message is taken up: how often that was so without an outcome, this time included."""
        key = self._key(queue, message_id)
        with translated():
            pipeline = self._wire.redis.pipeline(transaction=False)
            pipeline.incr(key)
            pipeline.expire(key, KEEP_S)
            count, _ = await pipeline.execute()
        return int(count)

    async def settle(self, queue: str, message_id: str) -> None:
        """It was accepted or rejected, or has to wait: it harms nobody."""
        with translated():
            await self._wire.redis.delete(self._key(queue, message_id))

    def _key(self, queue: str, message_id: str) -> str:
        digest = hashlib.sha256(joined(queue, message_id).encode(errors="surrogatepass"))
        return partition_key(digest.digest()[0] % self._wire.settings.partitions, "redelivery", digest.hexdigest())
