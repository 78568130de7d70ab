"""Settings of the offline processes, which run batches, deliver webhooks and exchange events with a broker."""

from __future__ import annotations

from typing import Annotated

import msgspec


class OfflineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [offline]."""

    processes: Annotated[int, msgspec.Meta(ge=0, le=64)] = 1
    """Offline processes that `penstock up` starts; with 0 batches wait until one is started elsewhere."""
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=256)] = 8
    """Batches one process works on at the same time."""
    broker_url: str = ""
    """Celery's broker; empty: the queue's own Redis. Required with a Redis cluster, which Celery cannot use."""
    nice: Annotated[int, msgspec.Meta(ge=0, le=19)] = 5
    """CPU niceness of the process, as of nice(1): other processes of the machine go first."""
    turn_s: Annotated[float, msgspec.Meta(gt=0, le=900)] = 60.0
    """Seconds that one task works on a batch; another task then continues it."""
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """Seconds that tasks get to end cleanly after SIGTERM; other processes continue the batches that remain."""
