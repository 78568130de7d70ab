"""Loopback: which addresses and names can only mean this machine. A leaf: every check of the kind asks here."""

from __future__ import annotations

import ipaddress
import re

LOCALHOST = "localhost"
NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on or to call is of this machine: localhost, 127.0.0.0/8, ::1 (also in brackets,
    and as an IPv6 address that holds an IPv4 one). Any other name may be resolved to anything."""
    bare = host.strip("[]").lower()
    if bare == LOCALHOST:
        return True
    try:
        address = ipaddress.ip_address(bare.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def is_loopback_name(name: str) -> bool:
    """As `is_loopback`, for what a browser asked for: browsers resolve *.localhost to this machine by themselves."""
    bare = name.lower().removesuffix(".")
    if bare == LOCALHOST or bare.endswith(".localhost"):
        return NAME.fullmatch(bare) is not None
    return is_loopback(name)
