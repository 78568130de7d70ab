"""Redis settings ([redis]): where the server is, what of it may be lost, and the limits of queues and leases."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from penstock.config import Positive

ONE_SERVER = ("redis", "rediss", "unix")
PORTS: dict[Literal["sentinel", "cluster"], int] = {"sentinel": 26379, "cluster": 6379}
KINDS = {f"{scheme}+{kind}": kind for kind in PORTS for scheme in ("redis", "rediss")}
HOST_AND_PORT = re.compile(r"[A-Za-z0-9.-]+:[0-9]{1,5}(/[0-9]+)?")
OPTIONS = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL. For one server only `kind` is set: redis-py parses its URL by itself."""

    kind: Literal["server", "sentinel", "cluster"]
    hosts: tuple[tuple[str, int], ...] = ()
    tls: bool = False
    username: str | None = None
    password: str | None = None
    service: str = ""
    """The name of the primary at the Sentinels."""
    db: int = 0
    sentinel_username: str | None = None
    sentinel_password: str | None = None


def parse_address(url: str) -> Address:
    """Parse a URL. Raises ValueError, whose text never repeats the URL: it may hold a password."""
    scheme, _, rest = url.partition("://")
    if scheme in ONE_SERVER and rest:
        if scheme != "unix":
            _check_port(url)
        return Address("server")
    if scheme not in KINDS or not rest:
        forms = ", ".join(f"{name}://" for name in (*ONE_SERVER, *KINDS))
        meant = f"; did you mean redis://{url}?" if HOST_AND_PORT.fullmatch(url) else ""  # it holds no password
        raise ValueError(f"url must begin with one of {forms}{meant}")
    kind, parts = KINDS[scheme], urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    username, _, password = user.partition(":")
    service, _, db = parts.path.strip("/").partition("/")
    options = dict(parse_qsl(parts.query))
    if not options.keys() <= (set(OPTIONS) if kind == "sentinel" else set()):
        raise ValueError(f"url may carry only these options, and only with Sentinels: {', '.join(OPTIONS)}")
    if kind == "cluster":
        if service not in ("", "0"):
            raise ValueError("url of a cluster must end with its servers: a cluster has no database numbers")
        service = db = ""
    elif not service or not (db or "0").isdecimal():
        raise ValueError("url of Sentinels must end with /<service> or /<service>/<database number>")
    return Address(
        kind=kind,
        hosts=tuple(_host(host, PORTS[kind]) for host in hosts.split(",")),
        tls=scheme.startswith("rediss"),
        username=unquote(username) or None,
        password=unquote(password) or None,
        service=unquote(service),
        db=int(db or 0),
        **options,
    )


def _check_port(url: str) -> None:
    """Raise ValueError for an invalid port with a text of our own: Python's repeats the port, which may be a part of a
    password."""
    try:
        port = urlsplit(url).port
    except ValueError:
        port = -1
    if port is not None and port <= 0:
        raise ValueError(
            "url must name its server as host:port; write / ? # and @ of a password as %2F %3F %23 and %40"
        )


def _host(text: str, port: int) -> tuple[str, int]:
    """`host`, `host:port` or `[v6]:port`."""
    name, colon, number = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        name, number = text, str(port)
    if not name or not number.isdecimal() or not 0 < int(number) < 1 << 16:
        raise ValueError("url must list its servers as host:port,host:port")
    return name.strip("[]"), int(number)


Durability: TypeAlias = Literal["D0", "D1", "D2", "D3"]


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [redis]."""

    url: str = "redis://127.0.0.1:6379/0"
    """redis://, rediss:// or unix:// for one server, redis+sentinel://host:port,host:port/<service> for the primary
    that Sentinels name, redis+cluster://host:port,host:port for a cluster."""
    durability: Durability = "D1"
    """The loss that accepted jobs survive. D0: none; D1: of the Redis process; D2: a power cut; D3: of the Redis host,
    because every answer waits until a replica has the write."""
    partitions: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    """Hash slots over which the work is spread. All processes of a deployment must use the same number."""
    lease_ms: Annotated[int, msgspec.Meta(ge=200)] = 5_000
    """A worker without a heartbeat for longer loses its jobs to others."""
    max_attempts: Positive = 3
    """After so many lost workers a job is given up instead of retried."""
    lane_limit: Positive = 10_000
    """The most jobs waiting in one lane of one partition; more are refused with 429."""
    retention_s: Positive = 86_400
    """How long results are kept after their job's end, and idempotency keys with them."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    """For one command; a command that exceeds it marks Redis as unavailable. At D3 half of it is for the replica."""

    def __post_init__(self) -> None:
        try:
            parse_address(self.url)
        except ValueError as error:  # "url: " names the field to the caller
            raise ValueError(f"url: {str(error).removeprefix('url ')}") from None
