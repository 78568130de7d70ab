"""Check: what `penstock doctor` has found of one thing, and its lines on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cli.output import fitted
from penstock.text import counted

INDENT = len("warn  ")


Status: TypeAlias = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `hint` says how to fix it; `setting` is the key that it judged, if any."""

    name: str
    status: Status
    detail: str
    hint: str = ""
    setting: str = ""

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status, "detail": self.detail, "hint": self.hint}


def lines_of(found: Sequence[Check], *, verbose: bool) -> Iterator[str]:
    """The lines of the checks that need attention; of all with `verbose`."""
    for check in found:
        if verbose or check.status in ("warn", "fail"):
            yield from fitted(sys.stdout, f"{check.status:<5} {check.name}: {check.detail}", INDENT)
        if check.status in ("warn", "fail") and check.hint:
            yield from fitted(sys.stdout, " " * INDENT + check.hint, INDENT)


def summary(found: Sequence[Check]) -> str:
    """The summary line."""
    fails = sum(check.status == "fail" for check in found)
    warnings = sum(check.status == "warn" for check in found)
    if not fails and not warnings:
        return "Ready."
    parts = [f"{counted(fails, 'thing')} to fix"] if fails else []
    parts += [counted(warnings, "warning")] if warnings else []
    return ", ".join(parts) + "."
