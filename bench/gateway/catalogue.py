"""Which systems there are, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Sequence

from bench.gateway.system import System
from bench.gateway.systems.floor import Floor
from bench.gateway.systems.penstock import Penstock
from bench.gateway.systems.plain import Plain


def systems() -> list[System]:
    """All of them."""
    return [
        Floor(),
        Penstock("penstock", "D1"),
        Penstock("penstock-d0", "D0"),
        Penstock("penstock-d2", "D2"),
        Penstock("penstock-d3", "D3"),
        Penstock("penstock-2", "D1", apis=2),
        Plain(),
    ]


def chosen(names: str | None) -> list[System]:
    """Those named, separated by commas, in our order; None: all. Raises KeyError with a name nobody has."""
    known = {system.name: system for system in systems()}
    if names is None:
        return list(known.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        known[name]
    return [system for name, system in known.items() if name in wanted]


def names_of(all_of: Sequence[System]) -> str:
    """For people."""
    return ", ".join(system.name for system in all_of)
