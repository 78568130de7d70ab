"""The settings of the processes that do what nobody waits for."""

from __future__ import annotations

from typing import Annotated

import msgspec


class OfflineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [offline]."""

    processes: Annotated[int, msgspec.Meta(ge=0, le=64)] = 1
    """Celery workers `penstock up` starts; with 0 batches wait until one is started elsewhere."""
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=256)] = 8
    """Batches one process works on at the same time."""
    broker_url: str = ""
    """Celery's broker; empty: the queue's own Redis (needed for a Redis cluster, which Celery cannot use)."""
    nice: Annotated[int, msgspec.Meta(ge=0, le=19)] = 5
    """How far the process stands back where others of its machine want the CPU, as of nice(1)."""
    turn_s: Annotated[float, msgspec.Meta(gt=0, le=900)] = 60.0
    """How long one task works on a batch before the next one goes on."""
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """How long tasks may end in good order after SIGTERM; what is left, others go on with."""
