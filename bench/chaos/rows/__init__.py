"""Every row of the matrix that is played, by family."""

from __future__ import annotations

from bench.chaos.rows import (
    clients,
    failover,
    memory,
    operations,
    overload,
    partition,
    preemption,
    real,
    requests,
    store,
    strange,
    upstream,
    workers,
)
from bench.chaos.stage import FaultRow

_FAMILIES = (
    *(workers, clients, requests, store, memory, operations),
    *(overload, failover, partition, preemption, strange, real, upstream),
)

ROWS: tuple[FaultRow, ...] = tuple(sorted((row for family in _FAMILIES for row in family.ROWS), key=lambda row: row.id))
