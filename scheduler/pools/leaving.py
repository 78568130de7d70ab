"""Who leaves a pool, and when it may be taken away. Pure: members and the wanted number in, one step out.

A member is chosen, takes nothing more, finishes what it has, and only then goes. What a cluster's controllers would
take first by themselves (what is not ready) is also chosen first here, so that both agree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """One pod, or whatever a worker lives in."""

    name: str
    ready: bool
    since: float
    """Unix seconds of its making."""
    running: int = 0
    """Jobs its worker holds."""
    drained: bool = False
    """No worker in it holds jobs, or will."""


@dataclass(frozen=True, slots=True)
class LeavingStep:
    """What is to be done now."""

    leaving: tuple[str, ...]
    """Chosen, and still there."""
    replicas: int
    cheapest: tuple[str, ...] = ()
    """Drained: to be those the next lowering takes."""
    remove: tuple[str, ...] = ()
    """Drained, and no lowering would take just them: to be taken away by name."""


def next_step(
    members: Sequence[Member], want: int, leaving: Collection[str], cordoned: Collection[str] = ()
) -> LeavingStep:
    """One step towards `want` members that stay. `leaving`: chosen before; `cordoned`: to be replaced.

    A lowering takes the cheapest, but before them whatever is not ready: so it is used only while all that stay are.
    """
    chosen = [each for each in members if each.name in leaving or each.name in cordoned]
    staying = [each for each in members if each not in chosen]
    surplus = max(0, len(staying) - want)
    chosen += sorted(staying, key=lambda each: (each.ready, each.running, -each.since, each.name))[:surplus]
    staying = [each for each in staying if each not in chosen]
    drained = tuple(each.name for each in chosen if each.drained)
    replicas = want + len(chosen) - len(drained)
    names = tuple(each.name for each in chosen)
    if len(staying) == want and all(each.ready for each in staying):
        return LeavingStep(names, replicas, cheapest=drained)
    return LeavingStep(names, replicas, remove=drained)
