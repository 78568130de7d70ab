"""Settings of the API processes ([api]) and of API keys ([keys.<name>])."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from penstock.config import MISTAKE, ConfigError
from streaming.ids import check_tenant
from streaming.jobs.settings import UNLIMITED, LimitSettings, QuotaSettings
from streaming.order import Priority

HOST_NAME = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:]+")
BASE_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)+")
TAKEN_PATHS = ("/v1", "/admin", "/console")
ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
"""An Origin header as browsers send it: lower case, nothing after the port."""


ENDPOINTS = frozenset((
    *("chat", "completions", "messages", "responses", "conversations", "embeddings", "rerank"),
    *("tokenize", "detokenize", "tokenizer_info"),
    *("jobs", "files", "batches", "models", "moderations", "usage", "audio", "images"),
))  # fmt: skip
"""What a key may be for: the word behind /v1/ in a path, or its first."""

NO_HASH = "this is not a SHA-256 (64 hex digits). Put the hash here, not the key: printf %s KEY | sha256sum"
"""Error text for a malformed hash. It never shows the value, which may be a key."""


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [api]."""

    host: str = "127.0.0.1"
    """Address to listen on; localhost: 127.0.0.1 and ::1. Any but a loopback one needs keys."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    """Port to listen on; 0: any free one."""
    tls_certificate: Path | None = None
    """PEM file of the certificate, with those that signed it, for TLS (1.2 or later); with `tls_key`. Read anew when it
    changes."""
    tls_key: Path | None = None
    """PEM file of its key, which not all users may read."""
    processes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """API processes that share the port."""
    body_limit: Annotated[int, msgspec.Meta(ge=1024)] = 2 * 1024 * 1024
    """Bytes of one request body."""
    default_model: str = ""
    """The model, or an alias of one, that a request without `model` means, also in a batch line or a broker's message.
    Empty: `model` is required."""
    max_choices_per_request: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Choices that one request may ask for: n times its prompts; also of a batch line or a broker's message. A body
    cannot ask for more than 1,024."""
    keep_alive_s: Annotated[float, msgspec.Meta(gt=0, le=20)] = 10.0
    """Idle time after which a stream gets a comment, so that no proxy closes it. Clients take a stream that is silent
    for 45 s for broken (penstock/client.py)."""
    wait_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """How long a call that does not stream is held open; then 504 with the job's id, and the job goes on."""
    send_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """A reader that takes no byte for so long is disconnected, up to a fifth later."""
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """How long open streams may go on after SIGTERM."""
    hosts: tuple[str, ...] = ()
    """Host names this server answers to, besides loopback names, e.g. host.docker.internal; each is compared exactly.
    Empty: every name with keys, loopback names alone without keys."""
    base_path: str = ""
    """Path below which a proxy serves this API, e.g. /llm. Links begin with it, and requests may have it or not."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may use /v1 from a browser, e.g. https://app.example; "*" (with keys only): all."""
    metrics: Literal["open", "admin"] | None = None
    """Who may read /metrics: anyone, or an admin key. None: anyone without keys, an admin key with keys."""
    admin_token_sha256: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?$", extra={MISTAKE: NO_HASH})] = ""
    """SHA-256 of the token that /admin requires while there are no keys; `penstock up` creates one."""
    access_log: bool = True
    """Write a line to the log for each request, without its query, its headers and its body."""
    max_header_bytes: Annotated[int, msgspec.Meta(ge=1024, le=128 * 1024)] = 16 * 1024
    """Bytes of one request's head, request line included, and of the framing around the chunks of a body."""
    max_headers: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    """Header fields of one request."""
    header_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """From the first byte of a request to the end of its head, and from a connection's start to its first byte."""
    idle_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 75.0
    """How long a connection stays open between two requests. A proxy in front must close its connections sooner."""
    body_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """A body that brings fewer than this times `min_body_bytes_per_s` bytes in any such period is refused."""
    min_body_bytes_per_s: Annotated[int, msgspec.Meta(ge=1)] = 1024
    """Minimum rate of a request body, averaged over `body_timeout_s`."""
    max_connections: Annotated[int, msgspec.Meta(ge=1)] = 20_000
    """Open connections of one API process."""
    max_connections_per_client: Annotated[int, msgspec.Meta(ge=1)] = 256
    """Open connections of one API process from one address. Loopback and `trusted_proxies` have no such limit."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies in front. Their connections are exempt from `max_connections_per_client`, and
    the last other address in X-Forwarded-For is that of a client."""
    refusals_per_minute: Annotated[int, msgspec.Meta(ge=0)] = 120
    """Requests of one key, or without a valid key of one address, that one API process refuses (401, 403, 413, 421, and
    at unknown addresses) before it answers 429. Loopback and `trusted_proxies` have no such limit. 0: none has."""

    def __post_init__(self) -> None:
        for name in self.hosts:
            if not HOST_NAME.fullmatch(name):
                raise ValueError(f"hosts: {name!r} is no host name; leave out scheme, port and path, e.g. api.example")
        if self.base_path and (not BASE_PATH.fullmatch(self.base_path) or self.base_path in TAKEN_PATHS):
            taken = ", ".join(TAKEN_PATHS)
            raise ValueError(f"base_path: write it as /llm, without a slash at its end; it cannot be {taken}")
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(f"cors_origins: {origin!r} is no origin; write it as https://app.example[:port]")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate, tls_key: set both, or none")
        self.proxy_networks  # noqa: B018 - raises ValueError

    @property
    def scheme(self) -> str:
        """Of the server's addresses."""
        return "https" if self.tls_certificate else "http"

    def shows_metrics(self, *, keyless: bool) -> bool:
        """Whether /metrics needs no key."""
        return keyless if self.metrics is None else self.metrics == "open"

    @property
    def proxy_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """`trusted_proxies`, parsed. Raises ValueError."""
        return tuple(_network(word) for word in self.trusted_proxies)


def _network(word: str) -> IPv4Network | IPv6Network:
    """Parse a network. Raises ValueError that names the setting and what to write."""
    try:
        return ip_network(word)
    except ValueError:
        meant = "a network such as 10.1.0.0/16"
        with suppress(ValueError):
            meant = str(ip_network(word, strict=False))
        raise ValueError(f"trusted_proxies: {word!r} is no network; write {meant} or one address.") from None


class ModerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [moderation]: the model that judges texts."""

    model: str = ""
    """Its name in [models]; requests to /v1/moderations choose it by that. Empty: there are only content rules."""
    categories: tuple[str, ...] = (
        *("violent_crimes", "non_violent_crimes", "sex_crimes", "child_exploitation", "defamation", "advice"),
        *("privacy", "intellectual_property", "weapons", "hate", "self_harm", "sexual", "elections", "code_abuse"),
    )
    """What it looks for, in the order of its codes, so S1 is the first one; those of Llama Guard 3."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 30.0
    """From the request to its last verdict."""

    def check(self, models: Collection[str]) -> None:
        """Raise ConfigError if the model is none of those that are served."""
        if self.model and self.model not in models:
            raise ConfigError("moderation.model", f"there is no [models.{self.model}]", "add it, or name another one")


class MediaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [media]: images, recordings and documents in requests."""

    max_bytes: Annotated[int, msgspec.Meta(ge=1024, le=64 << 20)] = 10 * 1024 * 1024
    """Bytes of one."""
    max_request_bytes: Annotated[int, msgspec.Meta(ge=1024, le=64 << 20)] = 20 * 1024 * 1024
    """Bytes of all of one request. A body may be larger than `[api] body_limit` by as much base64, if a model takes
    any."""
    max_parts: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 32
    """How many one request may have, its history included."""
    links: Literal["refuse", "fetch", "pass"] = "refuse"
    """What becomes of links to images: refused; fetched before the job is queued, from public addresses alone; passed
    on to the model's server, which then connects to them from its own network."""
    networks: tuple[str, ...] = ()
    """Other networks that links may lead to, e.g. 10.1.0.0/16."""
    link_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 10.0
    """For all links of a request, to their last byte."""

    def __post_init__(self) -> None:
        for word in self.networks:
            ip_network(word)


PRIVATE_URL = re.compile(r"https://[^/]|http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?(/|$)")
"""Addresses whose answers nobody on the way can change."""


Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


class OidcSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [oidc]: callers with a token (JWT) of an OpenID Connect issuer, besides those with keys."""

    issuer: str = ""
    """The issuer's address, exactly as `iss` of its tokens, e.g. https://login.example. Empty: tokens are not taken."""
    audience: str = ""
    """What `aud` of a token must name: this server, as the issuer knows it. Needed with an issuer."""
    jwks_url: str = ""
    """Where the issuer's public keys are. Empty: where its /.well-known/openid-configuration says."""
    algorithms: tuple[Algorithm, ...] = ("RS256", "ES256", "EdDSA")
    """Signatures that are taken. A key of the issuer that names no algorithm (`alg`) is for RS256, ES256 (384, 512) or
    EdDSA, by its kind."""
    tenant_claim: str = "tenant"
    """The claim with the tenant's name."""
    scope_claim: str = "scope"
    """The claim with words. penstock:admin, penstock:lane:batch, penstock:model:NAME and penstock:endpoint:jobs say
    what a token may do; without such words it is like a key for all but administration."""
    refresh_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """How often the issuer's keys are read, besides when a token names an unknown one."""
    max_age_s: Annotated[float, msgspec.Meta(gt=0)] = 86_400.0
    """How long known keys count while the issuer is away; then 503."""

    def __post_init__(self) -> None:
        if not all(PRIVATE_URL.match(url) for url in (self.issuer, self.jwks_url) if url):
            raise ValueError("issuer, jwks_url: write https:// addresses, whose answers nobody can change on the way")
        if self.issuer and not self.audience:
            raise ValueError("audience: name this server as the issuer's tokens do in `aud`")


class KeySettings(msgspec.Struct, frozen=True, kw_only=True):
    """One row of [keys.<name>]: an API key, of which only the hash is stored."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$", extra={MISTAKE: NO_HASH})]
    tenant: str
    """Whose jobs these are: a name of letters, digits and . _ @ / -, at most 128."""
    priority: Priority = Priority.INTERACTIVE
    """The highest lane this key may use."""
    admin: bool = False
    """May call /admin: dead letters, webhooks and pools, of all tenants."""
    batch_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Tokens that this tenant's unfinished batches may add up to; None: [batch] enqueued_tokens."""
    quotas: QuotaSettings = UNLIMITED
    """Storage quotas of this tenant; what is not set here comes from [quotas]."""
    limits: LimitSettings | None = None
    """How fast and how much this key may use."""
    models: tuple[str, ...] = ()
    """The models that it may use; empty: all. A key with models may not create batches, whose lines name any."""
    endpoints: tuple[str, ...] = ()
    """What it may call, by the word behind /v1/ in the path, such as chat, responses or jobs; empty: all."""

    def __post_init__(self) -> None:
        for name in self.endpoints:
            if name not in ENDPOINTS:
                raise ValueError(f"endpoints: {name!r} is none of {', '.join(sorted(ENDPOINTS))}")
        check_tenant("tenant", self.tenant)
