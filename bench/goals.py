"""The goals of `bench/goals.toml`, by name: what a figure is held against, since when, and what it was before."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from functools import cache
from pathlib import Path

import msgspec

FILE = Path(__file__).with_name("goals.toml")


class Change(msgspec.Struct, frozen=True):
    """What a goal was until a day, and why it is another one since."""

    until: date
    was: str
    why: str


class Goal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bound on one side."""

    since: date
    why: str
    at_most: float | None = None
    at_least: float | None = None
    changes: tuple[Change, ...] = ()

    @property
    def before(self) -> str:
        """What it was before, for whoever reads a table; nothing if it never changed."""
        return "; ".join(f"until {change.until}: {change.was}" for change in self.changes)

    @property
    def bound(self) -> float:
        """The value, whichever side it is on."""
        bound = self.at_least if self.at_most is None else self.at_most
        assert bound is not None  # `goals` has looked
        return bound


@cache
def goals(path: Path = FILE) -> Mapping[str, Goal]:
    """By `program.name`. Raises ValueError for one without a bound or with two."""
    programs = msgspec.toml.decode(path.read_bytes(), type=dict[str, dict[str, Goal]])
    found = {f"{program}.{name}": goal for program, each in programs.items() for name, goal in each.items()}
    for name, goal in found.items():
        if (goal.at_most is None) == (goal.at_least is None):
            raise ValueError(f"{name}: a goal has at_most or at_least, and not both")
    return found
