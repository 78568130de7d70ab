"""Every row of the matrix that is played, by family."""

from __future__ import annotations

from bench.chaos.rows import (
    clock,
    crowds,
    doors,
    failover,
    leaving,
    operations,
    overload,
    partition,
    real,
    requests,
    results,
    rollback,
    slow,
    store,
    strange,
    workers,
)
from bench.chaos.stage import FaultRow

_FAMILIES = (
    workers,
    doors,
    leaving,
    slow,
    requests,
    store,
    operations,
    overload,
    failover,
    rollback,
    partition,
    clock,
    crowds,
    results,
    strange,
    real,
)

ROWS: tuple[FaultRow, ...] = tuple(sorted((row for family in _FAMILIES for row in family.ROWS), key=lambda row: row.id))
