"""A local issuer of OpenID Connect: its keys over HTTP, and the tokens that it signs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from http_serving import QuietHandler, serving_http

from api.settings import OidcSettings

AUDIENCE = "penstock"


@cache
def private_key(kind: str, number: int = 0) -> PrivateKeyTypes:
    """A key of a kind (RSA, EC); another one for each number."""
    return rsa.generate_private_key(65537, 2048) if kind == "RSA" else ec.generate_private_key(ec.SECP256R1())


@dataclass
class LocalIssuer:
    """`private`: by id, the keys that it has; `listed`: more rows of its key set."""

    url: str = ""
    private: dict[str, PrivateKeyTypes] = field(default_factory=lambda: {"k1": private_key("RSA")})
    listed: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    """Of its answers."""
    claimed: str = ""
    """What its configuration says that it is."""
    keys_at: str = ""
    broken: bool = False
    """It answers with an object without keys."""
    read: int = 0
    """How often its keys were asked for."""

    @property
    def settings(self) -> OidcSettings:
        return OidcSettings(issuer=self.url, audience=AUDIENCE)

    def token(self, kid: str = "k1", alg: str = "RS256", key: Any = None, **claims: Any) -> str:
        """A token for ten minutes; a claim that is None is left out."""
        now = int(time.time())
        said = {"iss": self.url, "aud": AUDIENCE, "sub": "ann", "iat": now, "exp": now + 600, "tenant": "red"} | claims
        said = {name: value for name, value in said.items() if value is not None}
        return jwt.encode(said, key or self.private[kid], alg, {"kid": kid} if kid else {})

    def key_set(self) -> dict[str, Any]:
        rows = []
        for kid, key in self.private.items():
            kind = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
            rows.append({**json.loads(kind.to_jwk(key.public_key())), "kid": kid})  # type: ignore[arg-type]
        return {"keys": [*rows, *self.listed]}


@contextmanager
def issuing() -> Iterator[LocalIssuer]:
    """Serve an issuer within the block."""
    issuer = LocalIssuer()

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802 - the name http.server looks for
            if self.path == "/keys":
                issuer.read += 1
                found = {"error": "try again"} if issuer.broken else issuer.key_set()
                self.send(issuer.status, found, Location="/elsewhere")
            else:
                found = {"issuer": issuer.claimed or issuer.url, "jwks_uri": issuer.keys_at or f"{issuer.url}/keys"}
                self.send(issuer.status, found)

    with serving_http(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        issuer.url = f"http://127.0.0.1:{server.server_port}"
        yield issuer
