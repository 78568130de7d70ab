"""Store of output lengths: one history per model, which its workers write and read as an opaque, versioned message."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import cast

from streaming.keys import FLEET_SLOT, fleet_key
from streaming.redis.client import ClientUser
from streaming.redis.failures import translated

KEPT_S = 7 * 24 * 3600
"""Seconds for which a history outlives its last write."""


class LengthStore(ClientUser):
    """Every method raises Unavailable."""

    async def read(self, model: str) -> tuple[int, bytes] | None:
        """Version and message of a model's history; None if there is none."""
        with translated():
            found = await cast(
                Awaitable[list[bytes | None]],
                self._client.redis.hmget(fleet_key("lengths", model), ["version", "lengths"]),
            )
        version, lengths = found
        return (int(version), lengths) if version and version.isdigit() and lengths is not None else None

    async def write(self, model: str, version: int, lengths: bytes) -> bool:
        """Store a history. False: a newer version's is there, and it stays."""
        return bool(await self._client.call("lengths", FLEET_SLOT, model, version, lengths, KEPT_S))
