"""Store of output lengths: one history per model, which its workers write and read as an opaque, versioned message."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import cast

from streaming.keys import FLEET_SLOT, fleet_key
from streaming.redis.client import ClientUser
from streaming.redis.failures import translated

log = logging.getLogger(__name__)

MAX_VERSION_DIGITS = 9
"""Of a version; streaming/lua/lengths.lua uses the same number."""
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
        if version is None or lengths is None:
            return None
        if not version.isdigit() or len(version) > MAX_VERSION_DIGITS:
            log.warning("the stored output lengths of model %s have no valid version and are replaced", model)
            return None
        return int(version), lengths

    async def write(self, model: str, version: int, lengths: bytes) -> bool:
        """Store a history. False: a newer version's is there, and it stays."""
        return bool(await self._client.call("lengths", FLEET_SLOT, model, version, lengths, KEPT_S))
