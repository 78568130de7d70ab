"""Scale-down policy of a pool of pods: chooses which members leave, and when a drained one is removed. Pure.

A chosen member claims no more jobs, finishes those it has, and only then is removed. Members that are not ready are
chosen first, because the cluster's controllers would remove them first too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """One pod."""

    name: str
    ready: bool
    since: float
    """Creation time in Unix seconds."""
    running: int = 0
    """Jobs that its worker holds."""
    drained: bool = False
    """Whether its worker holds no jobs and claims none."""


@dataclass(frozen=True, slots=True)
class LeavingStep:
    """The next step of a scale-down."""

    leaving: tuple[str, ...]
    """Chosen members that still exist."""
    replicas: int
    cheapest: tuple[str, ...] = ()
    """Drained members that the next lowering of the scale should remove."""
    remove: tuple[str, ...] = ()
    """Drained members to delete by name, because a lowering of the scale might remove others."""


def next_step(
    members: Sequence[Member], want: int, leaving: Collection[str], cordoned: Collection[str] = ()
) -> LeavingStep:
    """One step towards `want` members that stay. `leaving`: chosen before; `cordoned`: to be replaced.

    The controller removes pods that are not ready before the cheapest ones, so the scale is lowered only while all
    members that stay are ready.
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
