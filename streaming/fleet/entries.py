"""Decoder of the fleet's entries: JSON that a process of this version, or of another, has written."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping
from typing import TypeVar, cast

import msgspec

from streaming.keys import fleet_key
from streaming.redis.client import RedisClient
from streaming.redis.failures import translated

log = logging.getLogger(__name__)

T = TypeVar("T")


def entry(name: str, data: bytes | str, kind: type[T]) -> T | None:
    """Decode one entry; logs and returns None if it is malformed, so that callers continue with the others."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("%s cannot be read as %s and is left out: %s", name, kind.__name__, error)
        return None


def entries(found: Mapping[str, bytes], kind: type[T]) -> dict[str, T]:
    """Decode a hash's fields, without the malformed ones."""
    read = {name: entry(name, data, kind) for name, data in found.items()}
    return {name: value for name, value in read.items() if value is not None}


async def read_hash(client: RedisClient, name: str, kind: type[T]) -> dict[str, T]:
    """Read a hash of the fleet's slot, without malformed fields. Raises Unavailable."""
    with translated():
        raw = await cast(Awaitable[dict[bytes, bytes]], client.redis.hgetall(fleet_key(name)))
    return entries({key.decode(errors="replace"): value for key, value in raw.items()}, kind)
