"""API keys: finds the caller of a key by its hash, and refuses to listen beyond this machine without keys."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from api.auth.hosts import is_loopback
from api.openai import errors
from api.settings import ApiSettings, KeySettings, OidcSettings
from penstock.config import ConfigError
from streaming.fleet.api_keys import CreatedKey
from streaming.jobs.settings import UNLIMITED, LimitSettings, QuotaSettings
from streaming.order import Priority

if TYPE_CHECKING:
    from api.auth.oidc import Issuer

MAX_TENANTS = 1_000
"""Tenants beyond which those of tokens are not listed."""


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller: its tenant, the highest lane it may use, and the name of its key (for logs)."""

    tenant: str
    ceiling: Priority
    name: str = ""
    """For a created key, its id; for a token, its subject."""
    admin: bool = False
    """May call /admin."""
    batch_tokens: int | None = None
    """See KeySettings, as for the following three."""
    quotas: QuotaSettings = UNLIMITED
    models: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    limits: LimitSettings | None = None
    created: CreatedKey | None = None
    """Its key, if an admin has created it here, or what its token grants."""


LOCAL_CALLER = Caller("local", Priority.INTERACTIVE)
"""The caller at a server without keys, which only this machine can reach."""
OPERATOR = Caller("local", Priority.INTERACTIVE, admin=True)
"""The holder of the admin token of such a server."""


class Keyring:
    """All keys of a deployment, and the admin token that replaces an admin key where there are none.

    Keys are rows of the settings and those that admins have created. All of them count; of two with the same hash, the
    row. A server is open to anyone on its machine as long as it has no row and no key was ever created: revoked and
    expired keys keep the door closed. The admin token counts as long as there are no rows.

    Raises ConfigError if two rows hold the same key.
    """

    def __init__(
        self, keys: Mapping[str, KeySettings], admin_token_sha256: str = "", issuer: Issuer | None = None
    ) -> None:
        # A dictionary by keyed digest costs the same for any number of keys and leaks nothing by timing: without this
        # process's random pepper no attacker can choose a key near a stored digest.
        self._pepper = secrets.token_bytes(32)
        self._rows: dict[bytes, Caller] = {}
        self._seals: dict[str, tuple[Caller, bytes]] = {}
        """Who may use the console because of the settings, by name, each with the hash of its key."""
        for name, key in keys.items():
            digest = self._digest(bytes.fromhex(key.sha256))
            if digest in self._rows:
                other = self._rows[digest].name
                raise ConfigError(f"keys.{name}", f"the same key as keys.{other}", "make a new one")
            may = (key.batch_tokens, key.quotas, key.models, key.endpoints, key.limits)
            self._rows[digest] = Caller(key.tenant, key.priority, name, key.admin, *may)
            if key.admin:
                self._seals[name] = (self._rows[digest], bytes.fromhex(key.sha256))
        self._admin_token = self._digest(bytes.fromhex(admin_token_sha256)) if admin_token_sha256 else b""
        self.has_admin_token = not self._rows and bool(self._admin_token)
        """Whether there are no rows, but an admin token for /admin."""
        if self.has_admin_token:
            self._seals[OPERATOR.name] = (OPERATOR, bytes.fromhex(admin_token_sha256))
        self.issuer = issuer
        """Whose tokens are taken, too."""
        self._closed = issuer is not None
        """There is a key, or was, or somebody issues tokens: a store that was emptied opens nothing here."""
        self._take({})
        self.known = bool(self._rows)
        """Whether `learn` was called, or need not be: without rows nobody is served before."""

    def learn(self, created: Mapping[str, CreatedKey | None]) -> None:
        """Take over the created keys, by id; None for one that cannot be read."""
        self._take(created)
        self.known = True

    def _take(self, created: Mapping[str, CreatedKey | None]) -> None:
        self._created = {key.id: key for key in created.values() if key is not None}
        every: list[Caller | CreatedKey] = [*self._rows.values(), *self._created.values()]
        self.limited = frozenset(key.tenant for key in every if key.limits is not None)
        """Tenants with a key that has limits, or had when it was revoked."""
        self._callers, self._admins = dict(self._rows), dict(self._seals)
        for key in self._created.values():
            if key.revoked_ms is not None:
                continue
            caller = self._holder(key, key.id)
            self._callers.setdefault(self._digest(bytes.fromhex(key.sha256)), caller)
            if key.admin:
                self._admins.setdefault(key.id, (caller, bytes.fromhex(key.sha256)))
        self.callers = tuple(self._callers.values())
        """The holder of each key, also of those that have expired."""
        self._closed = self._closed or bool(self._rows or created)
        self.open = not self._closed
        """Whether the server has no keys and serves anyone on this machine."""
        self.tenants = frozenset(caller.tenant for caller in self.callers or (LOCAL_CALLER,))
        """The tenants of all keys, and of tokens seen since these last changed; without keys, also the local one."""
        self.administrator = next((caller for caller, _ in self._admins.values()), None)
        """The first who may administer; None if nobody may."""

    def _holder(self, key: CreatedKey, name: str) -> Caller:
        own = [row for row in self._rows.values() if row.tenant == key.tenant]
        tokens = next((row.batch_tokens for row in own if row.batch_tokens is not None), None)
        quotas = reduce(QuotaSettings.over, [row.quotas for row in own], UNLIMITED)
        may = (tokens, quotas, key.models, key.endpoints, key.limits, key)
        return Caller(key.tenant, key.priority, name, key.admin, *may)

    def quotas_of(self, tenant: str) -> QuotaSettings:
        """Return the quotas set in a tenant's keys; for each quota the first key that sets it counts."""
        return reduce(QuotaSettings.over, [each.quotas for each in self.callers if each.tenant == tenant], UNLIMITED)

    def caller(self, authorization: str | None) -> Caller:
        """Return the caller of the key or token in an Authorization header. Raises ApiError (401, 503)."""
        if self.open:
            return LOCAL_CALLER
        digest = self._sent(authorization)
        if not digest:
            raise errors.invalid_api_key(
                "No API key was given. Send it as 'Authorization: Bearer <key>', or as 'x-api-key: <key>'."
            )
        found = self._callers.get(digest) or self._issued(authorization or "")
        if found is None:
            raise errors.invalid_api_key("This API key is not known here.")
        if has_expired(found):
            raise errors.invalid_api_key("This API key has expired.")
        return found

    def _issued(self, authorization: str) -> Caller | None:
        """Return the caller of a token; None if there is none. Raises ApiError (401, 503)."""
        key = self.issuer.key_of(authorization) if self.issuer is not None else None
        if key is None:
            return None
        if key.tenant not in self.tenants and len(self.tenants) < MAX_TENANTS:
            self.tenants |= {key.tenant}
        return self._holder(key, f"oidc:{key.created_by}")

    def admin(self, authorization: str | None) -> Caller:
        """Return the caller of an admin key or, without keys in the settings, of the admin token. Raises ApiError (401,
        403)."""
        if self.is_admin_token(authorization):
            return OPERATOR
        if not self.open:
            caller = self.caller(authorization)
            if not caller.admin:
                raise errors.permission_denied()
            return caller
        if not self._admin_token:
            raise errors.admin_not_configured()
        raise errors.admin_token_required()

    def is_admin_token(self, authorization: str | None) -> bool:
        """Whether an Authorization header holds the admin token, if that counts."""
        return self.has_admin_token and hmac.compare_digest(self._sent(authorization), self._admin_token)

    def holds(self, key: CreatedKey) -> bool:
        """Whether a created key still has the secret and the rights that it had then, or a token still counts."""
        counts = not key.id and self.issuer is not None and self.issuer.has(key.label)
        now = key if counts else self._created.get(key.id)
        return now is not None and now.is_valid(int(time.time() * 1000)) and now.rights == key.rights

    def seal(self, name: str, secret: str) -> str:
        """Return the proof that the holder of an admin key (by its name) has opened a session of the console with this
        secret. It is void once the key is changed. Raises ApiError (403): a token has no such proof."""
        if name not in self._admins:
            raise errors.session_by_token()
        return hmac.digest(self._admins[name][1], secret.encode(), "sha256").hex()

    def unsealed(self, name: str, secret: str, seal: str) -> Caller | None:
        """Return the admin who opened this session of the console; None if the key has changed or is gone, or if the
        seal is forged."""
        if name not in self._admins or not hmac.compare_digest(self.seal(name, secret).encode(), seal.encode()):
            return None
        found = self._admins[name][0]
        return None if has_expired(found) else found

    def _sent(self, authorization: str | None) -> bytes:
        """Return the digest of the key in an Authorization header; b"" without one."""
        token = token_of(authorization)
        return self._digest(hashlib.sha256(token.encode()).digest()) if token else b""

    def _digest(self, sha256: bytes) -> bytes:
        return hmac.digest(self._pepper, sha256, "sha256")


def token_of(authorization: str | None) -> str:
    """Return the key or token in an Authorization header; "" without one."""
    scheme, _, token = (authorization or "").strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def has_expired(caller: Caller) -> bool:
    """Whether the key of a caller has an end that is over."""
    return caller.created is not None and not caller.created.is_valid(int(time.time() * 1000))


def issuer_of(settings: OidcSettings) -> Issuer | None:
    """Return the issuer of these settings; None if there is none. Raises ConfigError."""
    if not settings.issuer:
        return None
    try:
        from api.auth.oidc import Issuer  # noqa: PLC0415 - PyJWT may not be there; and an HTTP client takes memory
    except ImportError as error:
        raise ConfigError("oidc.issuer", str(error), "install penstock[oidc]") from None
    return Issuer(settings)


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
