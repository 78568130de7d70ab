"""Created API keys in the store: admins make, change and revoke them, and API processes read what has changed.

The store has the hash of a key, never the key. Only API processes may write here (streaming/store/acl.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from streaming.fleet.plans import decoded, entry, hash_of
from streaming.jobs.settings import LimitSettings
from streaming.keys import FLEET_SLOT, fleet_key
from streaming.order import Priority
from streaming.redis.client import ClientUser, Query


class CreatedKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One key."""

    id: str
    """Empty: what a token grants that somebody else has issued. It is in no store."""
    sha256: str
    tenant: str
    label: str = ""
    """Of a token, the id of the key that signed it."""
    priority: Priority = Priority.INTERACTIVE
    admin: bool = False
    models: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    limits: LimitSettings | None = None
    created_ms: int
    created_by: str
    """The name of the key, or the tenant, of the admin who made it. Of a token, its subject."""
    expires_ms: int | None = None
    revoked_ms: int | None = None

    @property
    def rights(self) -> tuple[object, ...]:
        """Its secret, as a hash, and what it may do."""
        return self.sha256, self.priority, self.admin, self.models, self.endpoints

    def is_valid(self, now_ms: int) -> bool:
        """Whether it opens anything at this time."""
        return self.revoked_ms is None and (self.expires_ms is None or now_ms < self.expires_ms)


VERSION = Query([("GET", FLEET_SLOT, (fleet_key("api_keys_version"),))], lambda answers: int(answers[0] or 0))
"""Grows with every change of the keys."""


class ApiKeys(ClientUser):
    """The created keys. Every method raises Unavailable."""

    async def read(self) -> dict[str, CreatedKey | None]:
        """Read all of them, by id; None for one that is malformed, which is logged and opens nothing."""
        return decoded(await self._client.call("HGETALL", FLEET_SLOT, fleet_key("api_keys")), CreatedKey)

    async def add(self, key: CreatedKey) -> None:
        """Store a new key."""
        await self._client.call("keep_api_key", FLEET_SLOT, key.id, "", msgspec.json.encode(key))

    async def change(self, key_id: str, change: Callable[[CreatedKey], CreatedKey]) -> CreatedKey | None:
        """Change a key, again if somebody else has changed it meanwhile; None if there is none. `change` may raise."""
        while True:
            before = await self._client.call("HGET", FLEET_SLOT, fleet_key("api_keys"), key_id)
            known = entry(f"API key {key_id}", before, CreatedKey) if before else None
            if known is None:
                return None
            changed = change(known)
            args = (key_id, before, msgspec.json.encode(changed))
            if await self._client.call("keep_api_key", FLEET_SLOT, *args):
                return changed

    async def note_used(self, used: Mapping[str, int]) -> None:
        """Note when keys were last used (Unix milliseconds), by id."""
        words = [word for pair in used.items() for word in pair]
        await self._client.call("HSET", FLEET_SLOT, fleet_key("api_keys_used"), *words)

    async def used(self) -> dict[str, int]:
        """When each was last used, to a few seconds."""
        return await self._client.ask(hash_of("api_keys_used", int))
