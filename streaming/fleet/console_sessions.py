"""Sessions of the console: who logged in to it, and the links that open a session once.

A browser or a terminal holds the secret; the store holds only its digest, so nobody can log in with what they read
there. What the store says is not trusted either: the record carries a seal that only the holder of the key can have
made (api/auth/keys.py).
"""

from __future__ import annotations

import hashlib
from typing import cast

import msgspec

from streaming.fleet.entries import entry
from streaming.keys import FLEET_SLOT, fleet_key
from streaming.redis.client import ClientUser
from streaming.redis.failures import translated

LINK_S = 3600
"""Seconds for which a link can be opened: long enough to read what `up` printed, or to forward a port."""
SESSION_S = 12 * 3600
"""Seconds for which a session lasts, whether it is used or not."""


class ConsoleLogin(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a session or link is."""

    by: str
    """Name of the admin key; "" for the admin token."""
    seal: str
    """Proves that the holder of that key has logged in (`Keyring.seal`)."""


class ConsoleSessions(ClientUser):
    """Sessions and links in the store. Every method raises Unavailable."""

    async def begin(self, secret: str, login: ConsoleLogin) -> None:
        """Keep a session for SESSION_S."""
        await self._keep("session", secret, login, SESSION_S)

    async def find(self, secret: str) -> ConsoleLogin | None:
        """Return whose session this is; None if there is none, or if it is over."""
        with translated():
            data = await self._client.redis.get(_key("session", secret))
        return _login(cast("bytes | None", data))

    async def end(self, secret: str) -> None:
        """End a session."""
        await self._take("session", secret)

    async def offer(self, secret: str, login: ConsoleLogin) -> None:
        """Keep a link for LINK_S."""
        await self._keep("link", secret, login, LINK_S)

    async def redeem(self, secret: str) -> ConsoleLogin | None:
        """Use up a link; None if there is none, or if it was used or is over."""
        return _login(await self._take("link", secret))

    async def _take(self, kind: str, secret: str) -> bytes | None:
        data: bytes | None = await self._client.call("console", FLEET_SLOT, _digest(kind, secret), "", 0)
        return data

    async def _keep(self, kind: str, secret: str, login: ConsoleLogin, seconds: int) -> None:
        record = msgspec.json.encode(login)
        await self._client.call("console", FLEET_SLOT, _digest(kind, secret), record, seconds * 1000)


def _key(kind: str, secret: str) -> str:
    return fleet_key("console", _digest(kind, secret))


def _digest(kind: str, secret: str) -> str:
    return hashlib.sha256(f"{kind}:{secret}".encode()).hexdigest()


def _login(data: bytes | None) -> ConsoleLogin | None:
    return None if data is None else entry("a session of the console", data, ConsoleLogin)
