"""Every row of the matrix that is played: declared in rows.toml, with a function of that name in one of the modules."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from bench.chaos.asks import Budget
from bench.chaos.rows import clients, engines, failover, operations, overload, store, strange, workers
from bench.chaos.stage import FaultRow

_FAMILIES = (workers, clients, store, operations, overload, failover, strange, engines)


def _row(name: str, budget: dict[str, Any] | None = None, **declared: Any) -> FaultRow:
    """Raises ValueError where not one function has the name of the row."""
    (play,) = (getattr(family, name.lower()) for family in _FAMILIES if hasattr(family, name.lower()))
    return FaultRow(name, play=play, budget=msgspec.convert(budget or {}, Budget), **declared)


_DECLARED = tomllib.loads(Path(__file__).with_name("rows.toml").read_text(encoding="utf-8"))
ROWS = tuple(_row(name, **declared) for name, declared in sorted(_DECLARED.items()))
