"""Callers with a token (JWT) of an OpenID Connect issuer: what a token grants, and the issuer's public keys.

Only this module needs PyJWT (extra `oidc`). Tokens are checked without the network: the keys are read in the
background, again when a token names another one. While the issuer is away, known keys count for `max_age_s`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from base64 import urlsafe_b64decode
from contextlib import suppress
from functools import lru_cache
from typing import Any

import httpx2
import jwt
import msgspec
from jwt.types import Options

from api.openai import errors
from api.settings import ENDPOINTS, PRIVATE_URL, OidcSettings
from penstock.loops import ExpectedErrors, wait
from streaming.fleet.api_keys import CreatedKey
from streaming.ids import TENANT_NAME
from streaming.order import Priority

TOKEN = re.compile(r"bearer +(?=.{1,8192}$)((e[\w=-]*)\.[^.]*\.[^.]*)", re.IGNORECASE)
"""A header with the beginning of a JSON object and two dots, which no key looks like; a longer one is no token."""
RIGHT = re.compile(r"(?s)penstock:([^:]*):?(.*)")
"""A word of `scope_claim` that says what a token may do."""
MAX_ANSWER_BYTES = 512 * 1024
TIMEOUT_S = 4.0
"""Of a reading of the keys, and of a request that waits for it."""
RETRY_S = 10.0
"""The shortest time between two readings of the keys, however many unknown ones are named."""
LEEWAY_S = 10.0
"""How far the issuer's clock may be ahead. It lengthens no token."""
OPTIONS: Options = {"require": ["exp", "iss", "aud", "sub"], "enforce_minimum_key_length": True}

log = logging.getLogger(__name__)


class _Configuration(msgspec.Struct):
    """What an issuer says of itself."""

    issuer: str
    jwks_uri: str


class _Keys(msgspec.Struct):
    """What it has at `jwks_uri`. An answer without keys, such as one of an error, changes nothing."""

    keys: list[dict[str, Any]]


PUBLIC = ("kty", "kid", "alg", "use", "crv", "x", "y", "n", "e")
MAX_MEMBER = 1500
"""Characters of a part of a key; of RSA's with 8,192 bits 1,366."""


class Issuer:
    """An issuer, with the public keys that this process knows."""

    def __init__(self, settings: OidcSettings) -> None:
        self._settings = settings
        self._keys: dict[str, jwt.PyJWK] = {}
        """By id, each with its algorithm."""
        self._read_s = self._tried_s = float("-inf")
        """When the keys were read, and when that was last tried (monotonic)."""
        self._wanted, self._news = asyncio.Event(), asyncio.Event()
        self._checked = lru_cache(1024)(self._check)
        """Of tokens that are sent again, the check costs nothing; refusals are not kept."""

    def has(self, kid: str) -> bool:
        """Whether tokens signed with this key count."""
        return kid in self._keys and not self._is_stale()

    async def ready(self, authorization: str) -> None:
        """If an Authorization header holds a token whose key is unknown, have the keys read, and wait a little."""
        _, kid = _sent(authorization)
        if kid and kid not in self._keys and time.monotonic() - self._tried_s >= RETRY_S:
            self._wanted.set()
            await wait(self._news, TIMEOUT_S)

    def key_of(self, authorization: str) -> CreatedKey | None:
        """Return what the token in this header grants, as a key; None if there is none. Raises ApiError (401, 503)."""
        token, kid = _sent(authorization)
        if not token:
            return None
        if self._is_stale():
            raise errors.issuer_unavailable()
        return self._checked(token, kid)

    def _check(self, token: str, kid: str) -> CreatedKey:
        """Return what a token grants. Raises ApiError (401). Its end is for the caller to look at."""
        said, key = self._settings, self._keys.get(kid)
        if key is None:
            raise errors.invalid_api_key("This token is signed with a key that its issuer does not name (kid).")
        try:
            claims = jwt.decode(
                token, key, options=OPTIONS, audience=said.audience, issuer=said.issuer, leeway=LEEWAY_S
            )
            rights = self._rights(claims)
        except (jwt.PyJWTError, msgspec.MsgspecError, ValueError) as error:
            raise errors.invalid_api_key(f"This token is not valid here: {error}.") from None
        sha256, by = hashlib.sha256(token.encode()).hexdigest(), claims["sub"][:128]
        expires_ms = 1000 * int(claims["exp"])
        return CreatedKey(id="", sha256=sha256, label=kid, created_ms=0, created_by=by, expires_ms=expires_ms, **rights)

    def _rights(self, claims: dict[str, Any]) -> dict[str, Any]:
        """Return whose a token is, and what it may do. Raises ValueError, MsgspecError."""
        said = self._settings
        tenant, words = claims.get(said.tenant_claim), claims.get(said.scope_claim, "")
        if not isinstance(tenant, str) or not TENANT_NAME.fullmatch(tenant):
            raise ValueError(f"its claim {said.tenant_claim!r} must be the name of a tenant")
        if not claims["sub"].isprintable():
            raise ValueError("its claim 'sub' must be text without control characters")
        named: dict[str, set[str]] = {}
        for word in words.split() if isinstance(words, str) else msgspec.convert(words, list[str]):
            if right := RIGHT.fullmatch(word):
                named.setdefault(right[1], set()).add(right[2])
        admin = named.pop("admin", set()) == {""}
        lanes, models, endpoints = (tuple(sorted(named.pop(kind, ()))) for kind in ("lane", "model", "endpoint"))
        if named or not ENDPOINTS.issuperset(endpoints) or (admin and (models or endpoints)):
            raise ValueError(f"its claim {said.scope_claim!r} has an unknown penstock:… word, or admin beside others")
        lane = min(map(Priority, lanes), key=lambda each: each.rank, default=Priority.INTERACTIVE)
        return {"tenant": tenant, "priority": lane, "admin": admin, "models": models, "endpoints": endpoints}

    def _is_stale(self) -> bool:
        return time.monotonic() - self._read_s >= self._settings.max_age_s

    async def keep_reading(self) -> None:
        """Read the keys every `refresh_s`, and when a token names an unknown one. Never ends."""
        expected = (httpx2.HTTPError, httpx2.InvalidURL, msgspec.MsgspecError, TimeoutError, ValueError)
        away = ExpectedErrors(expected, log.warning, "the keys of the issuer in [oidc] cannot be read: %s", once=True)
        # One for all: making it reads certificates, and blocks. This machine is asked without a proxy.
        async with httpx2.AsyncClient(mounts={"http://": httpx2.AsyncHTTPTransport()}) as client:
            while True:
                self._wanted.clear()
                try:
                    with away:
                        async with asyncio.timeout(TIMEOUT_S):
                            self._keys = await self._fetch(client)
                        self._checked.cache_clear()
                        self._read_s = time.monotonic()
                finally:
                    self._tried_s = time.monotonic()
                    self._news.set()
                    self._news = asyncio.Event()
                await asyncio.sleep(RETRY_S)
                if not away.active:
                    await wait(self._wanted, self._settings.refresh_s)

    async def _fetch(self, client: httpx2.AsyncClient) -> dict[str, jwt.PyJWK]:
        """Read the keys of the algorithms that are taken."""
        said, url, known = self._settings, self._settings.jwks_url, {}
        if not url:
            own = f"{said.issuer.rstrip('/')}/.well-known/openid-configuration"
            found = msgspec.json.decode(await _read(client, own), type=_Configuration)
            url = found.jwks_uri
            if found.issuer != said.issuer or not PRIVATE_URL.match(url):
                raise ValueError(f"its configuration is of {found.issuer!r}, whose keys are at {url!r}")
        for each in msgspec.json.decode(await _read(client, url), type=_Keys).keys:
            row = {name: each[name] for name in PUBLIC if name in each and len(str(each[name])) <= MAX_MEMBER}
            if not row.get("kid") or row.get("use", "sig") != "sig" or "verify" not in each.get("key_ops", ["verify"]):
                continue
            with suppress(jwt.PyJWTError, ValueError, TypeError, KeyError, NotImplementedError):  # for something else
                key = jwt.PyJWK(row)
                if key.algorithm_name in said.algorithms:
                    known[row["kid"]] = key
        return known


async def _read(client: httpx2.AsyncClient, url: str) -> bytes:
    """Read what is at an address, and nowhere else."""
    data = b""
    async with client.stream("GET", url) as answer:
        answer.raise_for_status()
        async for part in answer.aiter_bytes():
            data += part
            if len(data) > MAX_ANSWER_BYTES:
                raise ValueError(f"{url} has more than {MAX_ANSWER_BYTES} bytes")
    return data


def _sent(authorization: str) -> tuple[str, str]:
    """Return the token in an Authorization header, and the id of the key that it names; "" for what is not there. It
    looks at the first part alone: whoever sends many has no more looked at."""
    found = TOKEN.fullmatch(authorization.strip())
    with suppress(msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError):
        return (found[1], str(msgspec.json.decode(urlsafe_b64decode(f"{found[2]}=="))["kid"])) if found else ("", "")
    return found[1] if found else "", ""
