"""Control messages: what API processes, scripts and the scheduler send to a worker."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Wake(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """There is work in a lane of yours."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Stop this job and end it as cancelled."""

    job: str


class Follow(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Send this job's deltas to this address as well."""

    job: str
    address: str


class Cordon(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Take nothing more, finish what you have, and wait to be replaced."""

    reason: str


class Hold(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """Leave new jobs to the workers of another shape for so long; 0: take them again. It is said anew while it is to
    last, so a worker that nobody speaks to takes jobs."""

    for_ms: int


Control: TypeAlias = Wake | Cancel | Follow | Cordon | Hold
