"""Entries of the fleet's keys: JSON that any process may have written, of this version or another."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeVar

import msgspec

log = logging.getLogger(__name__)

T = TypeVar("T")


def entry(name: str, data: bytes | str, kind: type[T]) -> T | None:
    """One entry, or None, with a log line, if it cannot be read. Callers go on with the other entries."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("%s cannot be read as %s and is left out: %s", name, kind.__name__, error)
        return None


def entries(found: Mapping[str, bytes], kind: type[T]) -> dict[str, T]:
    """Those of a hash's fields that can be read."""
    read = {name: entry(name, data, kind) for name, data in found.items()}
    return {name: value for name, value in read.items() if value is not None}
