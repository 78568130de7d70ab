"""Every row of the matrix that is played, by family."""

from __future__ import annotations

from bench.chaos.rows import doors, failover, leaving, operations, overload, requests, slow, store, workers
from bench.chaos.stage import Row

_FAMILIES = (workers, doors, leaving, slow, requests, store, operations, overload, failover)

ROWS: tuple[Row, ...] = tuple(sorted((row for family in _FAMILIES for row in family.ROWS), key=lambda row: row.id))
