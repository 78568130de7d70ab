"""Audit log in the store: what admins did and who was refused, of all API processes together.

Refusals have a stream of their own: whoever floods the server with them pushes out nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streaming.fleet.plans import entry
from streaming.keys import FLEET_SLOT, fleet_key
from streaming.redis.client import ClientUser

KEPT = {"acts": 10_000, "refusals": 2_000}
"""How many entries of each kind are kept, the newest, and up to some hundred more."""


class AuditLog(ClientUser):
    """The entries. Every method raises Unavailable."""

    async def add(self, entries: Sequence[tuple[str, bytes]]) -> None:
        """Store entries (JSON), each with its kind and once however often this is called."""
        await self._client.calls([("note_audit", FLEET_SLOT, (kind, KEPT[kind], data)) for kind, data in entries])

    async def recent(self, count: int, after: str = "", since_ms: int = 0) -> list[dict[str, Any]]:
        """Read entries with their ids, newest first: those stored at this time (Redis time) or later, and before the
        one with the id `after`. An id is the number of its kind and its place there."""
        last, _, place = after.partition("-")
        if place == "0-0":  # nothing is before it, and the server refuses to look
            return []
        calls = []
        for number, kind in enumerate(KEPT):
            end = "+" if not after else f"({place}" if number <= int(last) else place
            calls.append(("XREVRANGE", FLEET_SLOT, (fleet_key("audit", kind), end, since_ms, "COUNT", count)))
        found = []
        for number, page in enumerate(await self._client.calls(calls)):
            for name, (_, data) in page:
                at_ms, turn = map(int, name.split(b"-"))
                said = entry("an audit entry", data, dict) or {}
                found.append(((-at_ms, -turn, number), {**said, "id": f"{number}-{at_ms}-{turn}"}))
        return [said for _, said in sorted(found, key=lambda each: each[0])[:count]]
