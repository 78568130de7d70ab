"""Webhook and event settings ([webhooks.<name>], [events]): endpoints, and the broker for events and jobs."""

from __future__ import annotations

import base64
import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args
from urllib.parse import SplitResult, urlsplit

import msgspec

from penstock.config import Secret
from streaming.ids import check_tenant
from streaming.order import Priority

End: TypeAlias = Literal[
    "job.completed", "job.failed", "job.cancelled", "job.expired",
    "batch.completed", "batch.failed", "batch.cancelled", "batch.expired",
    "response.completed", "response.failed", "response.cancelled", "response.incomplete",
]  # fmt: skip

ENDS: tuple[End, ...] = get_args(End)


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One row of [webhooks.<name>]: an endpoint that receives the final events of one tenant's jobs, batches and
    responses."""

    url: Secret
    secret: Secret
    """whsec_ and 24 to 64 random bytes in base64; the receiver needs the same."""
    tenant: str = "local"
    """The tenant; `local` is every caller of a server without keys."""
    events: tuple[End, ...] = ENDS
    """Events that it receives without being named; empty: only those of requests that name it in `queue.webhook`."""
    urls: tuple[str, ...] = ()
    """URLs that `queue.webhook` may be instead of this row's name: each of these, and every URL below its path. All
    get this row's secret, networks and limits."""
    networks: tuple[str, ...] = ()
    """Private networks in which the endpoint may be, such as 10.1.0.0/16; without any its address must be public."""
    allow_http: bool = False
    """Allow an endpoint without TLS: others on the network path can read the messages."""
    ca_file: Path | None = None
    """PEM file of the certificate authorities to trust; None: those of this machine."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 10.0
    """For one attempt, from name resolution to the answer."""
    give_up_s: Annotated[float, msgspec.Meta(gt=0, le=30 * 86_400)] = 86_400.0
    """How long attempts are retried, with backoff."""

    def __post_init__(self) -> None:
        check_endpoint(self)


def check_endpoint(endpoint: WebhookSettings) -> None:
    """Validate an endpoint. Raises ValueError, whose text never has the secret."""
    check_tenant("tenant", endpoint.tenant)
    for field, text in (("url", endpoint.url), *(("urls", each) for each in endpoint.urls)):
        url = urlsplit(text)
        if url.scheme not in ("https", "http") or not url.hostname or url.username is not None:
            raise ValueError(f"{field} must be https://host/path, without a user")
        if url.scheme == "http" and not endpoint.allow_http:
            raise ValueError(f"{field} must begin with https:// (allow_http = true lifts that)")
        if not _has_port(url):
            raise ValueError(f"{field} must have a port from 1 to 65535, or none")
        if field == "urls" and (_origin_and_path(text) is None or url.query):
            raise ValueError("urls must be plain ASCII without spaces, '#', '?', '..' and escapes of such characters")
    for network in endpoint.networks:
        ipaddress.ip_network(network)
    signing_key(endpoint.secret)


def _has_port(url: SplitResult) -> bool:
    """Whether a URL names a port that can be, or none. The error of the library may repeat a part of a password."""
    try:
        return url.port != 0
    except ValueError:
        return False


_PRINTABLE = re.compile(r"""[!"$-\[\]-~]{1,2048}""")
"""Visible ASCII without the backslash and '#', which parsers of URLs read differently."""
_CHARACTER = r"([\w~!$&'()*+,:=@-]|%(?!2[35EF]|3[BF]|5C|7F)[2-7][0-9A-F])"
"""Of a path: as it is, or an escape of visible ASCII or a space, but of none of # % . / ; ? and the backslash."""
_WITHIN = re.compile(rf"(/(\.?(?!%20){_CHARACTER}({_CHARACTER}|[.;])*)?)*", re.ASCII | re.IGNORECASE)
"""A path that no server resolves to one outside its beginning: a segment begins with one dot at most, and goes on."""


def _origin_and_path(text: str) -> tuple[tuple[str, str, int], str] | None:
    """Split a URL into its origin (scheme, host, port) and its path; None if it is not one that may be compared."""
    try:
        url = urlsplit(text)
        port = {"https": 443, "http": 80}.get(url.scheme, 0) if url.port is None else url.port
    except ValueError:
        return None
    if not _PRINTABLE.fullmatch(text) or not url.hostname or url.username is not None or not port:
        return None
    if not _WITHIN.fullmatch(url.path):
        return None
    return (url.scheme, url.hostname, port), url.path or "/"


def allows_url(endpoint: WebhookSettings, text: str) -> bool:
    """Whether a request may name this URL: `urls` has its origin and, up to a whole segment, the beginning of its
    path."""
    asked = _origin_and_path(text)
    if asked is None:
        return False
    for each in endpoint.urls:
        allowed = _origin_and_path(each)
        if allowed is not None and asked[0] == allowed[0]:
            prefix, path = allowed[1], asked[1]
            if path == prefix or path.startswith(prefix.rstrip("/") + "/"):
                return True
    return False


def signing_key(secret: str) -> bytes:
    """Decode a whsec_ secret. Raises ValueError, whose text never has the secret."""
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError:
        key = b""
    if not secret.startswith("whsec_") or not 24 <= len(key) <= 64:
        raise ValueError("secret must be whsec_ and 24 to 64 bytes in base64")
    return key


class EventSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [events]."""

    publish_url: str = ""
    """URL of the broker that lifecycle events are published to, as kombu takes it (redis://..., amqp://...); empty:
    none."""
    publish_queue: str = "penstock.events"
    """Queue at that broker; created if necessary."""
    source: str = "/penstock"
    """The CloudEvents `source`, which names this deployment."""
    results: bool = False
    """Whether events of completed jobs include the result: then every reader of the queue can read the answers."""
    take_url: str = ""
    """URL of the broker from which jobs are consumed; empty: none."""
    take_queue: str = "penstock.jobs"
    """Invalid messages go to the queue of this name with the suffix `.rejected`."""
    take_tenant: str = "local"
    """The tenant of these jobs, whatever a message says."""
    take_priority: Priority = Priority.STANDARD
    """The highest lane that they may use."""
    take_ahead: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 32
    """Messages prefetched by one process."""

    def __post_init__(self) -> None:
        check_tenant("take_tenant", self.take_tenant)
