"""API keys: finds the caller of a key by its hash, and refuses to listen beyond this machine without keys."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from api.auth.hosts import is_loopback
from api.openai import errors
from api.settings import ApiSettings, KeySettings
from penstock.config import ConfigError
from streaming.jobs.settings import UNLIMITED, QuotaSettings
from streaming.order import Priority


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller: its tenant, the highest lane it may use, and the name of its key (for logs)."""

    tenant: str
    ceiling: Priority
    name: str = ""
    admin: bool = False
    """May call /admin."""
    batch_tokens: int | None = None
    """See KeySettings."""
    quotas: QuotaSettings = UNLIMITED
    """See KeySettings."""


LOCAL_CALLER = Caller("local", Priority.INTERACTIVE)
"""The caller at a server without keys, which only this machine can reach."""
OPERATOR = Caller("local", Priority.INTERACTIVE, admin=True)
"""The holder of the admin token of such a server."""


class Keyring:
    """All keys of a deployment, and the admin token that replaces an admin key where there are none.

    Raises ConfigError if two rows hold the same key.
    """

    def __init__(self, keys: Mapping[str, KeySettings], admin_token_sha256: str = "") -> None:
        # A dictionary by keyed digest costs the same for any number of keys and leaks nothing by timing: without this
        # process's random pepper no attacker can choose a key near a stored digest.
        self._pepper = secrets.token_bytes(32)
        self._callers: dict[bytes, Caller] = {}
        self._admins: dict[str, tuple[Caller, bytes]] = {}
        """Who may use the console, by name, each with the hash of its key."""
        for name, key in keys.items():
            digest = self._digest(bytes.fromhex(key.sha256))
            if digest in self._callers:
                other = self._callers[digest].name
                raise ConfigError(f"keys.{name}", f"the same key as keys.{other}", "make a new one")
            self._callers[digest] = Caller(key.tenant, key.priority, name, key.admin, key.batch_tokens, key.quotas)
            if key.admin:
                self._admins[name] = (self._callers[digest], bytes.fromhex(key.sha256))
        self.callers = tuple(self._callers.values())
        """The holder of each key."""
        self.open = not self.callers
        """Whether the server has no keys and serves anyone on this machine."""
        self.tenants = frozenset(caller.tenant for caller in self.callers or (LOCAL_CALLER,))
        """The tenants of all keys; without keys, the local one."""
        self._admin_token = self._digest(bytes.fromhex(admin_token_sha256)) if admin_token_sha256 else b""
        self.has_admin_token = self.open and bool(self._admin_token)
        """Whether there are no keys, but an admin token for /admin."""
        if self.has_admin_token:
            self._admins[OPERATOR.name] = (OPERATOR, bytes.fromhex(admin_token_sha256))
        self.administrator = next((caller for caller, _ in self._admins.values()), None)
        """The first who may administer; None if nobody may."""

    def quotas_of(self, tenant: str) -> QuotaSettings:
        """Return the quotas set in a tenant's keys; for each quota the first key that sets it counts."""
        found = UNLIMITED
        for caller in self.callers:
            if caller.tenant == tenant:
                found = found.over(caller.quotas)
        return found

    def caller(self, authorization: str | None) -> Caller:
        """Return the caller of the key in an Authorization header. Raises ApiError (401)."""
        if self.open:
            return LOCAL_CALLER
        digest = self._sent(authorization)
        if not digest:
            raise errors.invalid_api_key("No API key was given. Send it as 'Authorization: Bearer <key>'.")
        if digest not in self._callers:
            raise errors.invalid_api_key("This API key is not known here.")
        return self._callers[digest]

    def admin(self, authorization: str | None) -> Caller:
        """Return the caller of an admin key or, without keys, of the admin token. Raises ApiError (401, 403)."""
        if not self.open:
            caller = self.caller(authorization)
            if not caller.admin:
                raise errors.permission_denied()
            return caller
        if not self._admin_token:
            raise errors.admin_not_configured()
        if not hmac.compare_digest(self._sent(authorization), self._admin_token):
            raise errors.admin_token_required()
        return OPERATOR

    def seal(self, name: str, secret: str) -> str:
        """Return the proof that the holder of an admin key (by its name) has opened a session of the console with this
        secret. It is void once the key is changed. Raises KeyError."""
        return hmac.digest(self._admins[name][1], secret.encode(), "sha256").hex()

    def unsealed(self, name: str, secret: str, seal: str) -> Caller | None:
        """Return the admin who opened this session of the console; None if the key has changed or is gone, or if the
        seal is forged."""
        if name not in self._admins or not hmac.compare_digest(self.seal(name, secret).encode(), seal.encode()):
            return None
        return self._admins[name][0]

    def _sent(self, authorization: str | None) -> bytes:
        """Return the digest of the key in an Authorization header; b"" without one."""
        scheme, _, token = (authorization or "").strip().partition(" ")
        token = token.strip()
        return self._digest(hashlib.sha256(token.encode()).digest()) if token and scheme.lower() == "bearer" else b""

    def _digest(self, sha256: bytes) -> bytes:
        return hmac.digest(self._pepper, sha256, "sha256")


def check_exposure(host: str, keyring: Keyring) -> None:
    """Refuse to listen beyond this machine without a key. Raises ConfigError."""
    if keyring.open and not is_loopback(host):
        raise ConfigError(
            "api.host",
            f"{host or 'every address'} can be reached from other machines, and no API key is configured",
            "add a key as [keys.<name>] with its sha256 and a tenant (docs/operations.md, Keys, shows how), "
            "or set api.host to 127.0.0.1",
        )


def check_keyless(settings: ApiSettings, keyring: Keyring) -> None:
    """Refuse settings that would open a server without keys to web pages. Raises ConfigError."""
    if keyring.open and "*" in settings.cors_origins:
        problem = "'*' would let every web page use this server, and no API key is configured"
        raise ConfigError("api.cors_origins", problem, "name the origins, or add a key as [keys.<name>]")
