"""Batch input converter: turns JSON lines, a CSV table or a folder of texts into the request lines of a batch.

It streams, so the size of the input does not matter, and it contacts no server.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cli.errors import USAGE, Problem
from penstock.text import fault_of, read_text

SLOT = re.compile(r"\{(\w+)\}")
TEXT_COLUMNS = ("prompt", "text")
"""Columns used as the prompt if there is no template."""
TEXTS = (".txt", ".md")
MAX_NAME = 64
"""Characters of a column's name that are compared."""
MAX_FIELD = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to build a request from a row."""

    model: str
    template: str = ""
    id_column: str = ""
    options: Mapping[str, Any] | None = None
    """Further fields of every request, for example max_tokens."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Summary of the lines written."""

    lines: int
    digest: str
    """SHA-256 of all lines: equal for the same input with the same options."""
    endpoint: str


def prepare(source: Path, recipe: Recipe, target: BinaryIO) -> Prepared:
    """Write `source` as lines of a batch. Raises Problem, which names the row and its error."""
    digest, lines, endpoints = hashlib.sha256(), 0, set()
    for line in batch_lines(source, recipe):
        data = json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        target.write(data)
        digest.update(data)
        endpoints.add(str(line["url"]))
        lines += 1
    if not lines:
        raise _wrong(source, "there is nothing to compute in it")
    if len(endpoints) > 1:
        raise _wrong(source, f"its lines name several endpoints ({', '.join(sorted(endpoints))}); a batch has one")
    return Prepared(lines, digest.hexdigest(), endpoints.pop())


def batch_lines(source: Path, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield the lines of a batch, in the order of the input."""
    try:
        for place, row in _rows(source):
            yield row if "body" in row else _line(source, place, row, recipe)
    except UnicodeDecodeError:
        raise _wrong(source, f"it is {fault_of(source.read_bytes())}") from None
    except OSError as error:
        raise Problem(f"{source} cannot be read", cause=error.strerror or str(error), exit_code=USAGE) from None


def _rows(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its position for error messages."""
    if source.is_dir():
        return _texts(source)
    return _table(source) if source.suffix.lower() == ".csv" else _json_lines(source)


def _json_lines(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with source.open(encoding="utf-8-sig") as file:  # each kind of line end
        for number, data in enumerate(file, 1):
            if not data.strip():
                continue
            try:
                row = json.loads(data)
            except ValueError as error:
                raise _wrong(source, f"line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise _wrong(source, f"line {number} is not an object")
            yield str(number), row


def _table(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(MAX_FIELD)
    with source.open(encoding="utf-8-sig", newline="") as file:
        try:
            for number, row in enumerate(csv.DictReader(file), 1):
                yield str(number), {name: value for name, value in row.items() if name is not None}
        except csv.Error as error:
            raise _wrong(source, f"it is not a CSV table: {error}") from None


def _texts(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(source.rglob("*")):
        if path.suffix.lower() in TEXTS and path.is_file():
            name = path.relative_to(source).as_posix()
            yield name, {"custom_id": name, "name": path.stem, "text": _text(path)}


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except ValueError as error:
        raise _wrong(path, str(error)) from None


def _line(source: Path, place: str, row: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    options = dict(recipe.options or {})
    if "messages" in row:
        own = {name: value for name, value in row.items() if name != "custom_id"}
        body = {"model": recipe.model, **options, **own}
    else:
        text = _filled(source, place, row, recipe.template or _default_template(source, place, row))
        body = {"model": recipe.model, "messages": [{"role": "user", "content": text}], **options}
    name = str(row.get(recipe.id_column or "custom_id") or f"row-{place}")
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def _default_template(source: Path, place: str, row: Mapping[str, Any]) -> str:
    for name in TEXT_COLUMNS:
        if name in row:
            return f"{{{name}}}"
    columns = ", ".join(map(str, row)) or "none"
    meant = next((each for each in map(_text_column, row) if each), "")
    raise Problem(
        f"{source}, row {place}: which column is the text?",
        cause=f"its columns are {columns}" + (f"; did you mean {meant}?" if meant else ""),
        next_step=f"--template 'Summarize: {{{next(iter(row), 'column')}}}'" if not meant else "",
        exit_code=USAGE,
        code="usage",
    )


def _text_column(name: Any) -> str:
    """Return the text column that a name is like."""
    return next(iter(difflib.get_close_matches(str(name)[:MAX_NAME], TEXT_COLUMNS, 1)), "")


def _filled(source: Path, place: str, row: Mapping[str, Any], template: str) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in row:
            raise _wrong(source, f"row {place} has no column {match[1]!r}, which the template names")
        return str(row[match[1]] if row[match[1]] is not None else "")

    return SLOT.sub(value, template)


def _wrong(source: Path, what: str) -> Problem:
    return Problem(f"{source}: {what}", exit_code=USAGE, code="usage")
