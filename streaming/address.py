"""Parser of `redis.url`: one server, Sentinels that name the primary, or nodes of a cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

ONE_SERVER = ("redis", "rediss", "unix")
KINDS: dict[str, Literal["sentinel", "cluster"]] = {
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
}
PORTS = {"sentinel": 26379, "cluster": 6379}
HOST_AND_PORT = re.compile(r"[A-Za-z0-9.-]+:[0-9]{1,5}(/[0-9]+)?")
OPTIONS = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL. For one server only `kind` and `url` are set: redis-py parses that form by itself."""

    kind: Literal["server", "sentinel", "cluster"]
    url: str
    hosts: tuple[tuple[str, int], ...] = ()
    tls: bool = False
    username: str | None = None
    password: str | None = None
    service: str = ""
    """The name of the primary at the Sentinels."""
    db: int = 0
    sentinel_username: str | None = None
    sentinel_password: str | None = None


def _meant(url: str) -> str:
    """What a URL without its beginning was meant to be. Only a host and port are repeated: they hold no password."""
    return f"; did you mean redis://{url}?" if HOST_AND_PORT.fullmatch(url) else ""


def parse_address(url: str) -> Address:
    """Parse a URL. Raises ValueError, whose text never repeats the URL: it may hold a password."""
    scheme, _, rest = url.partition("://")
    if scheme in ONE_SERVER and rest:
        if scheme != "unix":
            _check_port(url)
        return Address("server", url)
    if scheme not in KINDS or not rest:
        forms = ", ".join(f"{name}://" for name in (*ONE_SERVER, *KINDS))
        raise ValueError(f"url must begin with one of {forms}{_meant(url)}")
    kind, parts = KINDS[scheme], urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    username, _, password = user.partition(":")
    service, db = _path(kind, parts.path)
    options = _options(kind, parts.query)
    return Address(
        kind=kind,
        url=url,
        hosts=tuple(_host(host, PORTS[kind]) for host in hosts.split(",")),
        tls=scheme.startswith("rediss"),
        username=unquote(username) or None,
        password=unquote(password) or None,
        service=service,
        db=db,
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
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


def _path(kind: str, path: str) -> tuple[str, int]:
    """Service and database."""
    service, _, db = path.strip("/").partition("/")
    if kind == "cluster":
        if service not in ("", "0"):
            raise ValueError("url of a cluster must end with its servers: a cluster has no database numbers")
        return "", 0
    if not service or not (db or "0").isdecimal():
        raise ValueError("url of Sentinels must end with /<service> or /<service>/<database number>")
    return unquote(service), int(db or 0)


def _options(kind: str, query: str) -> dict[str, str]:
    options = dict(parse_qsl(query))
    if options and (kind != "sentinel" or not options.keys() <= set(OPTIONS)):
        raise ValueError(f"url may carry only these options, and only with Sentinels: {', '.join(OPTIONS)}")
    return options
