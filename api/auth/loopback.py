"""Loopback check: decides whether an address or host name can only mean this machine."""

from __future__ import annotations

import ipaddress
import re

LOCALHOST = "localhost"
NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on or to call is this machine's: localhost, 127.0.0.0/8, ::1 (also in brackets or
    IPv4-mapped). Any other name could resolve to any address."""
    bare = host.strip("[]").lower()
    if bare == LOCALHOST:
        return True
    try:
        address = ipaddress.ip_address(bare.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def is_loopback_name(name: str) -> bool:
    """Like `is_loopback`, for names that a browser requested: browsers resolve *.localhost to this machine."""
    bare = name.lower().removesuffix(".")
    if bare == LOCALHOST or bare.endswith(".localhost"):
        return NAME.fullmatch(bare) is not None
    return is_loopback(name)
