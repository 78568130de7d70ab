"""Control messages: what API processes, scripts and the scheduler send to a worker."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Wake(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """A lane of the worker's model has a new job."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Stop this job and end it as cancelled."""

    job: str
    by: str = ""
    """Who cancelled it, as CancelledBy; "": an older version did not say."""


class Follow(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Send this job's deltas to this address as well."""

    job: str
    address: str


class Cordon(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Claim nothing more, finish the held jobs, and wait to be replaced."""

    reason: str


class Hold(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """Leave new jobs to the workers of another shape for `for_ms`; 0: claim again. The scheduler repeats it while it
    applies, so a worker that receives none claims jobs."""

    for_ms: int


Control: TypeAlias = Wake | Cancel | Follow | Cordon | Hold
