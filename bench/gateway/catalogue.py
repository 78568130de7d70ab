"""Which systems there are, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Sequence

from bench.gateway.system import GatewaySystem
from bench.gateway.systems.dynamo import Dynamo
from bench.gateway.systems.floor import Floor
from bench.gateway.systems.litellm import Litellm
from bench.gateway.systems.penstock import PenstockGateway
from bench.gateway.systems.plain import Plain
from bench.gateway.systems.router import Router


def systems() -> list[GatewaySystem]:
    """All of them; those that the goals compare are measured next to each other."""
    return [
        Floor(),
        PenstockGateway("penstock", "D1"),
        Router(),
        Dynamo(),
        PenstockGateway("penstock-d0", "D0"),
        PenstockGateway("penstock-d2", "D2"),
        PenstockGateway("penstock-d3", "D3"),
        PenstockGateway("penstock-2", "D1", apis=2),
        Plain(),
        Litellm(),
    ]


def chosen(names: Sequence[str]) -> list[GatewaySystem]:
    """Those named, in our order; none named: all. Raises KeyError with a name nobody has."""
    known = {system.name: system for system in systems()}
    for name in names:
        known[name]
    return [system for name, system in known.items() if not names or name in names]


def names_of(all_of: Sequence[GatewaySystem]) -> str:
    """For people."""
    return ", ".join(system.name for system in all_of)
