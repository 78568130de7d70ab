"""Expected wait: the time until a worker starts a waiting job, as clients are told."""

from __future__ import annotations

from typing import NamedTuple


class Wait(NamedTuple):
    """Expected time from now until a worker starts a job, in milliseconds."""

    eta_ms: int
    low_ms: int | None = None
    """Nine of ten jobs with this estimate wait at least so long; None: too few waits were measured."""
    high_ms: int | None = None
    """Nine of ten wait at most so long."""


def wait_fields(wait: Wait | None) -> dict[str, int | None]:
    """Return the fields of a wait in a job object or an event; all null if it is unknown."""
    known = wait or (None, None, None)
    return dict(zip(("eta_ms", "eta_low_ms", "eta_high_ms"), known, strict=True))
