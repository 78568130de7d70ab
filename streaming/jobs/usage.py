"""Usage: what each tenant's keys have used of each model, by day (UTC).

The scripts that end jobs count it, so that no process's death loses or doubles a token.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Sequence
from datetime import date
from typing import NamedTuple, TypeAlias

from streaming.keys import partition_key
from streaming.redis.client import ClientUser

USAGE_KEPT_DAYS = 100
KEYS_AT_ONCE = 500
FIRST_DAY = date(1970, 1, 1).toordinal()
_COUNTS = struct.Struct(">4q")
_Place: TypeAlias = tuple[int, tuple[str, ...]]
"""A partition, and arguments of a key."""


class Used(NamedTuple):
    """What was used in a day, in one partition; in tokens but for `requests`."""

    day: str
    """As 2026-11-30."""
    tenant: str
    key: str
    """Name of the key, of a created one its id; "" if there are no keys, and of a broker's jobs."""
    model: str
    requests: int
    prompt: int
    completion: int
    cached: int
    """Those of `prompt` that the engine had in its cache."""


class UsageCounts(ClientUser):
    """Reads the counts."""

    async def read(self, days: Sequence[date], tenant: str | None = None) -> AsyncGenerator[Used, None]:
        """Iterate over what was used in these days; `tenant`: None for all. Raises Unavailable."""
        numbers = [str(day.toordinal() - FIRST_DAY) for day in days]
        places: list[_Place] = [(part, (number,)) for number in numbers for part in self._client.partitions]
        if tenant is None:
            places = await self._members("usage_tenants", places)
        else:
            places = [(part, (*args, tenant)) for part, args in places]
        places = await self._members("usage_names", places)
        for first in range(0, len(places), KEYS_AT_ONCE):
            some = places[first : first + KEYS_AT_ONCE]
            calls = [("GET", part, (partition_key(part, "usage", *args),)) for part, args in some]
            for (_, (number, name, who)), data in zip(some, await self._client.calls(calls), strict=True):
                day = date.fromordinal(int(number) + FIRST_DAY).isoformat()
                model, _, key = who.partition(" ")
                yield Used(day, name, key, model, *_COUNTS.unpack((data or b"").ljust(_COUNTS.size, b"\0")))

    async def _members(self, kind: str, places: Sequence[_Place]) -> list[_Place]:
        """The members of these sets, each behind the arguments of its set's key."""
        found: list[_Place] = []
        for first in range(0, len(places), KEYS_AT_ONCE):
            some = places[first : first + KEYS_AT_ONCE]
            sets = await self._client.calls([("SMEMBERS", p, (partition_key(p, kind, *args),)) for p, args in some])
            for (part, args), names in zip(some, sets, strict=True):
                found += [(part, (*args, name.decode())) for name in names]
        return found
