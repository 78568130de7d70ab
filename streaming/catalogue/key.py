"""Key: one kind of key in Redis, as a row of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """One kind of key. `pattern` is what follows the partition's prefix, `{}` standing for each argument."""

    name: str
    pattern: str
    kind: str
    owner: str
    lifetime: str
    meaning: str
