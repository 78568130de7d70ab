"""Workload: lengths of prompts and answers under a name, or from a file of the user's own.

A file is a CSV with the columns `prompt` and `answer`, a CSV in BurstGPT's columns, or a `.jsonl` in APEX's form; of
the last two, failed requests are left out.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from planner.facts.catalogue import PlanError, UnknownName, nearest
from planner.load import RequestLengths
from planner.simulator.trace import Malformed, Trace

MAX_ROWS = 100_000
"""Rows that are read of a file."""
COLUMNS = ("prompt", "answer")


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths, and where they come from."""

    name: str
    source: str
    lengths: RequestLengths
    requests: int = 0
    """That its protocol asks at each batch size or rate; 0: it says none."""


@cache
def workloads() -> dict[str, Workload]:
    """The named ones."""
    text = (Path(__file__).parent / "facts" / "workloads.toml").read_text(encoding="utf-8")
    return {name: _named(name, **row) for name, row in tomllib.loads(text).items()}


def _named(name: str, prompt: int, answer: int, source: str, requests: int = 0) -> Workload:
    return Workload(name, source, RequestLengths(prompt, answer), requests)


def workload(name: str) -> Workload:
    """A named workload, or the lengths in a file. Raises PlanError."""
    found = workloads().get(name.lower())
    if found is not None:
        return found
    path = Path(name)
    if path.is_file():
        return Workload(path.name, f"the file {path}", mix_of(_rows(path), f"{path}"))
    if path.suffix or "/" in name:
        raise PlanError(f"--workload {name}: there is no such file")
    raise UnknownName(f"no workload {name!r} is known: {nearest(name, workloads())}, or give a file of lengths")


def mix_of(rows: Iterable[tuple[int, int]], what: str) -> RequestLengths:
    """The lengths whose means are those of the rows, at most MAX_ROWS of them. Raises PlanError."""
    mix = tuple(islice(rows, MAX_ROWS))
    if not mix:
        raise PlanError(f"{what} has no request with an answer")
    prompt, answer = (max(1, round(sum(each) / len(mix))) for each in zip(*mix, strict=True))
    return RequestLengths(prompt, answer, mix)


def _rows(path: Path) -> Iterator[tuple[int, int]]:
    """Prompt and answer of each request of a file. Raises PlanError."""
    try:
        if path.suffix == ".jsonl" or not _is_plain(path):
            yield from ((max(1, row.prompt), row.answer) for row in Trace(path) if row.answer > 0)
            return
        with path.open(newline="", encoding="utf-8-sig") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                yield _lengths(row, f"{path}, line {number}")
    except (Malformed, OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"--workload {path}{_said(path, error)}") from None


def _said(path: Path, error: Exception) -> str:
    """What a reader says of a file, without its name; and of one with other columns, which would do."""
    text = str(getattr(error, "strerror", None) or error)
    rest = text.removeprefix(f"{path}")
    other = "; or write the columns prompt,answer" if "no column" in text else ""
    return f"{rest if rest != text else f': {text}'}{other}"


def _is_plain(path: Path) -> bool:
    """Whether a CSV has this module's own columns."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        return set(COLUMNS) <= set(next(csv.reader(file), []))


def _lengths(row: dict[str, Any], where: str) -> tuple[int, int]:
    try:
        prompt, answer = (int(row[name]) for name in COLUMNS)
    except (TypeError, ValueError):
        said = ",".join(f"{row[name]}" for name in COLUMNS)
        raise PlanError(f"{where}: {said!r} are no two whole numbers of tokens; write them as 512,256") from None
    if prompt < 1 or answer < 1:
        raise PlanError(f"{where}: {prompt},{answer}; both lengths are whole numbers from 1")
    return prompt, answer
