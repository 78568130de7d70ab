"""One form for every measurement: goals, a table for people, JSON for programs, and ratios judged by their goals.

The JSON file is the record: tables in the docs and plots are made from it, never typed.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

FILE = Path(__file__).with_name("goals.toml")


class Goal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bound on one side."""

    since: date
    why: str
    at_most: float | None = None
    at_least: float | None = None

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


def bound(name: str) -> float:
    """The value of a goal. Raises KeyError."""
    return goals()[name].bound


RESULTS = Path("bench/results")
COLUMN = re.compile(r"(\w+): (.*?)(?: \.(\d))?")
WIDTH = 160
"""Narrower, a table cannot be read; a log has no width of its own."""

Verdict = Literal["", "reached", "undecided", "missed"]
"""What becomes of a goal; "" where there is none."""


class Column(msgspec.Struct, frozen=True):
    """One column of the table: which figure of a row, its heading with the unit, and digits after the point."""

    key: str
    title: str
    digits: int = 1


def columns(text: str) -> tuple[Column, ...]:
    """Columns as `key: title` or `key: title .digits`, separated by semicolons."""
    found = (COLUMN.fullmatch(" ".join(each.split())) for each in text.split(";"))
    return tuple(Column(each[1], each[2], int(each[3] or 1)) for each in found if each)


class Ratio(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A figure that is judged: of two systems in one run, or of one against a limit."""

    what: str
    value: float | None
    """None: it could not be measured."""
    at_most: float | None = None
    at_least: float | None = None
    digits: int = 2
    rounds: tuple[float, ...] = ()
    """The same in each round alone, where there were several: what a machine with other tenants makes of it."""
    interval: tuple[float, float] | None = None
    """Confidence interval of the value. Where there is one, it decides."""
    verdict: Verdict = ""
    """Whether the goal is met; computed when the ratio is made, and stored in the JSON file. `reached`: the value, or
    the whole interval, keeps within it. `missed`: the value, or the whole interval, lies beyond it, or there is no
    value. `undecided`: the interval contains the goal."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "verdict", self._judged())

    @classmethod
    def held(
        cls,
        name: str | None,
        what: str,
        value: float | None,
        *,
        digits: int = 2,
        rounds: Sequence[float] = (),
        interval: tuple[float, float] | None = None,
    ) -> Ratio:
        """A figure against a goal of `bench/goals.toml`; only shown, if there is no name.

        Raises ValueError for a figure beyond the rounds that stand beside it: it is not their median.
        """
        if rounds and value is not None and not min(rounds) <= value <= max(rounds):
            raise ValueError(f"{what}: {value} is not between the least and the most of its rounds, {rounds}")
        goal = goals()[name] if name else None
        return cls(
            what=what,
            value=value,
            at_most=goal.at_most if goal else None,
            at_least=goal.at_least if goal else None,
            digits=digits,
            rounds=tuple(rounds),
            interval=interval,
        )

    @classmethod
    def none(cls, what: str, count: float | None) -> Ratio:
        """A count of what must not be."""
        return cls(what=what, value=count, at_most=0, digits=0)

    @property
    def figure(self) -> str:
        """As it is shown: with its confidence interval, or else with the least and the most of the rounds."""
        shown, kind = cell(self.value, self.digits), "interval" if self.interval else "rounds"
        if self.interval is None and len(self.rounds) < 2:
            return shown
        low, high = self.interval or (min(self.rounds), max(self.rounds))
        return f"{shown} ({kind} {cell(low, self.digits)} to {cell(high, self.digits)})"

    def _judged(self) -> Verdict:
        if self.at_most is None and self.at_least is None:
            return ""
        if self.value is None:
            return "missed"
        low, high = self.interval or (self.value, self.value)
        least = -math.inf if self.at_least is None else self.at_least
        most = math.inf if self.at_most is None else self.at_most
        if least <= low and high <= most:
            return "reached"
        return "missed" if low > most or high < least else "undecided"

    @property
    def goal(self) -> str:
        """The goal in words."""
        side, bound = ("at most", self.at_most) if self.at_most is not None else ("at least", self.at_least)
        return "" if bound is None else f"{side} {bound:g}"


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def cores() -> int:
    """Those that this process and what it starts may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def commit(checkout: Path = FILE.parents[1]) -> str:
    """The commit of this tree, with `-dirty` behind it where files differ from that commit; "" outside git. As it was
    when this process first asked: a tree that changes while a program runs is not the one that runs."""
    git = shutil.which("git")
    words = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    ran = subprocess.run([git, *words], cwd=checkout, capture_output=True, text=True, check=False) if git else None
    return ran.stdout.strip() if ran and not ran.returncode else ""


REVISION = "org.opencontainers.image.revision"
"""Label of an image: the commit of the tree that docker/build-images built it of."""


def of_another_tree(revisions: Mapping[str, str]) -> str:
    """Why images, each with the commit of its label, say nothing of this tree; "" if they are of its commit. Figures
    that a run has just written make a tree differ from it too."""
    here = commit()
    same = {here, here.removesuffix("-dirty")} - {""}
    other = [f"{name} is of {its or 'no commit'}" for name, its in revisions.items() if its not in same]
    return f"make images first: {', '.join(other)}, this tree {here or 'has none'}" if other else ""


class MachineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """When and on what: nothing of a machine but its size."""

    date: str = msgspec.field(default_factory=_today)
    cores: int = msgspec.field(default_factory=cores)
    python: str = msgspec.field(default_factory=platform.python_version)


class Report(MachineInfo, frozen=True, kw_only=True, omit_defaults=True):
    """What one run of a program found."""

    commit: str = ""
    """Of the tree that was measured; "": its file does not say."""
    name: str
    """Of the program, and of the file."""
    title: str
    command: str
    """Repeats the run."""
    settings: dict[str, Any] = {}
    columns: tuple[Column, ...] = ()
    """Of the table; the file has none."""
    rows: list[dict[str, Any]]
    """Plain figures and words; of those that no column shows the file has none."""
    ratios: tuple[Ratio, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader has to know to read the table rightly."""

    @property
    def missed(self) -> bool:
        """Whether a goal is missed: the program then exits with 1. An undecided goal is neither missed nor reached, and
        the table and the file say so."""
        return any(ratio.verdict == "missed" for ratio in self.ratios)

    @property
    def small(self) -> Report:
        """What the file keeps: of each row the figures that the table shows, and of rounds the least and the most."""
        shown = {column.key for column in self.columns}
        rows = [{key: value for key, value in row.items() if key in shown and value is not None} for row in self.rows]
        ratios = tuple(
            msgspec.structs.replace(each, rounds=(min(each.rounds), max(each.rounds))) if each.rounds else each
            for each in self.ratios
        )
        return msgspec.structs.replace(self, columns=(), rows=rows, ratios=ratios)


def write(path: Path, document: Any) -> Path:
    """Any measurement as an indented JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(as_json(document))
    return path


def as_json(document: Any) -> bytes:
    """A line for each member, and in a list a line for each item: small, and a diff shows what changed. Figures have
    six digits; none is known to more."""
    rounding = msgspec.json.Decoder(float_hook=lambda digits: float(f"{float(digits):.6g}"))
    members = rounding.decode(msgspec.json.encode(document))
    lines = [f"{_compact(name)}: {_value(value)}" for name, value in members.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _value(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n " + ",\n ".join(map(_compact, value)) + "\n]"
    return _compact(value)


def _compact(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def load(path: Path) -> Report:
    """Read what a program kept. Raises OSError, msgspec.ValidationError."""
    return msgspec.json.decode(path.read_bytes(), type=Report)


def console() -> Console:
    """As wide as the terminal; elsewhere wide enough for the tables."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def table(report: Report) -> RenderableType:
    """For the terminal: the figures, then the ratios, then the notes."""
    view = Table(title=f"{escape(report.title)}\n{report.date}, {report.cores} cores, Python {report.python}")
    for column in report.columns:
        cells = [row.get(column.key) for row in report.rows]
        is_number = any(isinstance(each, int | float) and not isinstance(each, bool) for each in cells)
        view.add_column(escape(column.title), justify="right" if is_number else "left")
    for row in report.rows:
        view.add_row(*(escape(cell(row.get(column.key), column.digits)) for column in report.columns))
    parts: list[RenderableType] = [view]
    if report.ratios:
        parts.append(_ratios(report.ratios))
    return Group(*parts, *(escape(each) for each in report.notes))


def _ratios(ratios: tuple[Ratio, ...]) -> Table:
    view = Table()
    view.add_column("ratio")
    view.add_column("measured", justify="right")
    view.add_column("goal")
    view.add_column("", no_wrap=True)
    words = {"reached": "[green]reached[/]", "missed": "[red]MISSED[/]"}
    for ratio in ratios:
        view.add_row(escape(ratio.what), ratio.figure, ratio.goal, words.get(ratio.verdict, ratio.verdict))
    return view


def cell(value: Any, digits: int) -> str:
    """A figure as it is shown."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.{digits}f}"
    return str(value)
