"""Script batcher: coalesces concurrent calls of one script into one command per partition.

A command of its own costs the client some 140 us and the server a loop iteration; a call in a batch costs a tenth of
it. A single call is sent at once; calls that arrive while a batch is under way form the next one.
"""

from __future__ import annotations

from typing import Any

from redis.exceptions import RedisClusterException, RedisError

from penstock.loops import Rounds
from streaming.redis.client import Call, RedisClient
from streaming.redis.failures import translated

EAGER_CALLS = 8
"""So many waiting calls are sent in the middle of a loop iteration."""
MAX_CALLS = 64
"""In one batch: a script blocks the server for all other clients."""


class ScriptBatcher:
    """Batcher of one script. The script must be idempotent: a failed batch may be sent again. Its calls run in any
    order."""

    def __init__(self, client: RedisClient, script: str) -> None:
        self._client, self._script = client, script
        self._rounds: dict[int, Rounds[Call, Any]] = {}
        """By partition, so that a slow or unavailable one delays no other."""

    async def call(self, partition: int, *args: str | bytes | int) -> Any:
        """Call the script with these arguments; returns the answer to this call alone. Raises Unavailable."""
        rounds = self._rounds.get(partition)
        if rounds is None:
            client = self._client
            rounds = self._rounds[partition] = Rounds(
                client.outcomes, max_items=MAX_CALLS, eager_items=EAGER_CALLS, start_now=client.send_nowait
            )
        try:
            return await rounds.ask((self._script, partition, args))
        except (RedisError, RedisClusterException, OSError):
            with translated():
                raise
