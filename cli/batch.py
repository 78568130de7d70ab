"""`penstock batch`: run a file of prompts, and list, show, cancel, pause and resume batches."""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import math
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import click
import msgspec

from cli.app import Group
from cli.client import Client, limit_option
from cli.options import command
from cli.output import (
    DONE,
    ENDED_BADLY,
    INTERRUPTED,
    UNREACHABLE,
    CommandResult,
    Problem,
    ProgressLine,
    VisibleBytes,
    emit,
    explaining,
    fields_result,
    line_result,
    list_result,
    note,
    short,
    timed,
)
from penstock.files import replacing, write_file
from penstock.text import counted, fault_of, read_text

SLOT = re.compile(r"\{([^{}]+)\}")
WORD = re.compile(r"\w+")
"""A slot that can only be a column; another one may be JSON in the template."""
CHAT = "/v1/chat/completions"
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
    flags: tuple[str, ...] = ()
    """The command's flags behind the fields above. They do not change lines that are whole requests."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Summary of the lines written."""

    lines: int
    digest: str
    """SHA-256 of all lines: equal for the same input with the same options."""
    endpoint: str


def prepare(source: Path, recipe: Recipe, target: BinaryIO) -> Prepared:
    """Write `source` as lines of a batch. Streams, so the input may have any size; contacts no server. Raises Problem,
    which names the row and its error."""
    digest, lines, endpoints = hashlib.sha256(), 0, set()
    try:
        for line in batch_lines(source, recipe):
            data = json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
            target.write(data)
            digest.update(data)
            endpoints.add(str(line["url"]))
            lines += 1
    except RecursionError:
        raise _wrong(source, f"row {lines + 1} is nested too deep") from None
    if not lines:
        raise _wrong(source, "there is nothing to compute in it")
    if len(endpoints) > 1:
        raise _wrong(source, f"its lines name several endpoints ({', '.join(sorted(endpoints))}); a batch has one")
    return Prepared(lines, digest.hexdigest(), endpoints.pop())


def batch_lines(source: Path, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield the lines of a batch, in the order of the input."""
    is_table = source.suffix.lower() == ".csv"
    rows = _texts(source) if source.is_dir() else _table(source) if is_table else _json_lines(source)
    unused = recipe.flags
    with explaining(f"{source} cannot be read", code="usage"):
        try:
            for place, row in rows:
                if not isinstance(row.get("body"), dict):
                    yield _line(source, place, row, recipe)
                    continue
                if "url" not in row:
                    raise _wrong(source, f"line {place}: a request needs a url, such as {CHAT}, beside its body")
                if unused:
                    note(f"no effect on lines that are whole requests: {', '.join(unused)}")
                    unused = ()
                yield row
        except UnicodeDecodeError:
            raise _wrong(source, f"it is {fault_of(source.read_bytes())}") from None


def _json_lines(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with source.open(encoding="utf-8-sig") as file:  # each kind of line end
        for number, data in enumerate(file, 1):
            if not data.strip():
                continue
            try:
                row = json.loads(data, parse_float=_finite, parse_constant=_finite)
            except ValueError as error:
                raise _wrong(source, f"line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise _wrong(source, f"line {number} is not an object")
            yield str(number), row


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number


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
    if recipe.id_column and recipe.id_column not in row:
        raise _no_column(source, place, recipe.id_column, "--id-column")
    given = row.get(recipe.id_column or "custom_id")
    name = f"row-{place}" if given in (None, "") else str(given)
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def _default_template(source: Path, place: str, row: Mapping[str, Any]) -> str:
    if known := next((name for name in TEXT_COLUMNS if name in row), ""):
        return f"{{{known}}}"
    columns = ", ".join(map(str, row)) or "none"
    alike = (difflib.get_close_matches(str(name)[:MAX_NAME], TEXT_COLUMNS, 1) for name in row)
    meant = next((names[0] for names in alike if names), "")
    what = f"{source}, row {place}: which column is the text?"
    cause = f"its columns are {columns}" + (f"; did you mean {meant}?" if meant else "")
    next_step = f"--template 'Summarize: {{{next(iter(row), 'column')}}}'" if not meant else ""
    raise Problem(what, cause=cause, next_step=next_step, code="usage")


def _filled(source: Path, place: str, row: Mapping[str, Any], template: str) -> str:
    used = set[str]()

    def value(match: re.Match[str]) -> str:
        if match[1] not in row:
            if WORD.fullmatch(match[1]):
                raise _no_column(source, place, match[1], "the template")
            return match[0]
        used.add(match[1])
        return str(row[match[1]] if row[match[1]] is not None else "")

    text = SLOT.sub(value, template)
    if not used:
        columns = ", ".join(map(str, row)) or "none"
        raise _wrong(source, f"the template names no column of row {place}, which are {columns}")
    return text


def _no_column(source: Path, place: str, name: str, by: str) -> Problem:
    return _wrong(source, f"row {place} has no column {name!r}, which {by} names")


def _wrong(source: Path, what: str) -> Problem:
    return Problem(f"{source}: {what}", code="usage")


FINAL = ("completed", "failed", "expired", "cancelled")
POLL_INTERVAL_S = 0.5


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """State file beside the output: what an earlier run has done, written before each step that must not be
    repeated."""

    digest: str
    """Digest of the input and its options."""
    key: str
    """The batch's idempotency key, so that a repeated creation yields the same batch."""
    file: str = ""
    batch: str = ""
    written: bool = False
    """Whether the output files are of an earlier run. Other files are not deleted."""


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One run, with the command's arguments."""

    client: Client
    source: Path
    target: Path
    recipe: Recipe
    window: str
    again: bool

    @property
    def errors(self) -> Path:
        """The file for failed lines."""
        return self.target.with_name(f"{self.target.stem}.errors{self.target.suffix or '.jsonl'}")

    @property
    def _note(self) -> Path:
        return self.target.with_name(self.target.name + ".batch")

    def start(self) -> dict[str, Any]:
        """Run to the end and return the batch's final state. Ctrl-C stops watching, not the batch."""
        self._check_paths()
        with ProgressLine(sys.stderr, os.environ) as progress:
            batch, begun = self._batch(progress)
            try:
                while batch["status"] not in FINAL:
                    show_progress(progress, batch)
                    time.sleep(POLL_INTERVAL_S)
                    batch = self.client.get(f"/v1/batches/{batch['id']}", patient=True)
            except KeyboardInterrupt:
                counts = batch["request_counts"]
                done = f"{counts['completed'] + counts['failed']} of {counted(counts['total'], 'line')} done"
                progress.say(f"{batch['id']} goes on: {done}, {counts['failed']} of them failed")
                raise
            except Problem as problem:
                if problem.exit_code == UNREACHABLE:
                    problem.next_step = f"{batch['id']} goes on: the same command takes it up again"
                raise
            progress.phase("fetching the answers")
            files = {self.target: batch["output_file_id"], self.errors: batch["error_file_id"]}
            for path, file_id in files.items():
                if file_id:
                    self._fetch(file_id, path)
                elif begun.written:  # by an earlier batch
                    path.unlink(missing_ok=True)
            self._keep(msgspec.structs.replace(begun, written=begun.written or any(files.values())))
        return batch

    def _check_paths(self) -> None:
        """Raises Problem if the run would replace its input, or a device."""
        with explaining(f"{self.target.parent} cannot be used", next_step="choose another -o"):
            for path in (self.target, self.errors, self._note):
                if path.exists() and (path.samefile(self.source) or not path.is_file()):
                    cause = "it is the input" if path.is_file() else "it is no regular file"
                    raise Problem(f"{path} would be replaced", cause=cause, next_step="another -o", code="usage")

    def _batch(self, progress: ProgressLine) -> tuple[dict[str, Any], Begun]:
        """Return the batch of an earlier run, or create it; with what the state file now says."""
        progress.phase(f"reading {self.source}")
        with tempfile.TemporaryFile() as lines:
            prepared = prepare(self.source, self.recipe, lines)
            begun = self._begun(prepared)
            if begun.batch:
                try:
                    return self.client.get(f"/v1/batches/{begun.batch}"), begun
                except Problem as problem:
                    if problem.code != "batch_not_found":
                        raise
                    begun = self._begin(prepared, written=begun.written)
            if not begun.file:
                total, name = lines.tell(), f"{self.source.stem or 'batch'}.jsonl"
                lines.seek(0)
                told = partial(progress.amount, "uploading", total=total)
                uploaded = self.client.upload("/v1/files", name, lines, on_read=told, purpose="batch")
                begun = self._keep(msgspec.structs.replace(begun, file=uploaded["id"]))
        body = {"input_file_id": begun.file, "endpoint": prepared.endpoint, "completion_window": self.window}
        batch = self.client.post("/v1/batches", body, **{"Idempotency-Key": begun.key})
        return batch, self._keep(msgspec.structs.replace(begun, batch=batch["id"]))

    def _begun(self, prepared: Prepared) -> Begun:
        try:
            with explaining(f"{self.target.parent} cannot be used", next_step="choose another -o"):
                kept = self._note.read_bytes() if self._note.exists() else None
            begun = msgspec.json.decode(kept, type=Begun) if kept is not None else None
        except msgspec.MsgspecError as error:
            raise Problem(f"{self._note} cannot be read", cause=str(error), next_step=f"rm {self._note}") from None
        if self.again or begun is None:
            return self._begin(prepared, written=begun is not None and begun.written)
        if begun.digest != f"{prepared.digest}:{self.window}":
            what, cause = f"{self.target} belongs to another run", "its input or its options were different"
            raise Problem(what, cause=cause, next_step="another -o, or --again to start over", code="another_run")
        if begun.batch:
            note(f"going on with {begun.batch}")
        return begun

    def _begin(self, prepared: Prepared, *, written: bool) -> Begun:
        digest = f"{prepared.digest}:{self.window}"
        return self._keep(Begun(digest=digest, key=secrets.token_hex(16), written=written))

    def _keep(self, begun: Begun) -> Begun:
        with explaining(f"{self.target.parent} cannot be used", next_step="choose another -o"):
            write_file(self._note, msgspec.json.encode(begun))
        return begun

    def _fetch(self, file_id: str, target: Path) -> None:
        """Download a file completely or not at all."""
        with explaining(f"cannot write {target}"), replacing(target) as write:
            self.client.download(f"/v1/files/{file_id}/content", write)


def show_progress(progress: ProgressLine, batch: dict[str, Any]) -> None:
    """Show the progress: lines done, rate, ETA, failures."""
    counts = batch["request_counts"]
    done, total = counts["completed"] + counts["failed"], counts["total"]
    state = "paused" if batch["paused"] else batch["status"]
    words = [state] if state != "in_progress" else []
    if rate := batch["lines_per_second"]:
        words += [f"{rate:.1f}/s", f"ETA {short((total - done) / rate)}"]
    if counts["failed"]:
        words.append(f"{counts['failed']} failed")
    progress.amount(str(batch["id"]), done, total, "  ".join(words))


CUT_OFF = ("cancelled", "expired")
COLUMNS = ("id", "status", "lines", "failed", "per_second", "window", "created_at")
FAULTS = ("line", "custom_id", "code", "message")


@click.group(cls=Group)
def batch() -> None:
    """Run files of prompts, and manage batches.

    \b
    Examples:
      penstock batch run input.jsonl -o out.jsonl
      penstock batch ls
    """


@command("run", batch)
@click.argument("source", metavar="INPUT", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", "target", type=click.Path(dir_okay=False, path_type=Path), required=True,
              help="Answers, as JSON lines; failed lines go to <name>.errors.jsonl beside it.")  # fmt: skip
@click.option("--template", default="", help="The prompt, with {column} for each column's value.")
@click.option("--id-column", default="", help="Column that names a row [custom_id, else its number].")
@click.option("--model", help="Model to ask [the instance's default].")
@click.option("--max-tokens", type=click.IntRange(1), help="Maximum tokens of an answer.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="At 0 equal prompts are computed once.")
@click.option("--window", type=click.Choice(["15m", "1h", "24h", "none"]), default="24h", show_default=True,
              help="Deadline for all lines.")  # fmt: skip
@click.option("--again", is_flag=True, help="Start over, whatever an earlier run has done.")
def run(
    client: Client,
    source: Path,
    target: Path,
    template: str,
    id_column: str,
    model: str | None,
    max_tokens: int | None,
    temperature: float | None,
    window: str,
    again: bool,
    as_json: bool,
) -> int:
    """Compute every line of INPUT and write the answers to a file.

    INPUT is a file of JSON lines (requests of a batch, or objects with `messages`, `prompt` or the template's columns),
    a CSV table, or a folder of .txt and .md files (columns `name` and `text`). If the command is stopped, the same
    command continues where it stopped. Exit code 5: some lines failed, or not all were computed.

    \b
    Examples:
      penstock batch run input.jsonl -o out.jsonl
      penstock batch run rows.csv -o out.jsonl --template '{text}' --id-column id
      penstock batch run notes/ -o out.jsonl --window 1h --max-tokens 64
    """
    options = {"max_tokens": max_tokens, "temperature": temperature}
    given = {name: value for name, value in options.items() if value is not None}
    flags = {"--model": model, "--template": template, "--id-column": id_column, "--max-tokens": max_tokens,
             "--temperature": temperature}  # fmt: skip
    named = tuple([name for name, value in flags.items() if value not in (None, "")])
    recipe = Recipe(model or client.default_model(), template, id_column, given, named)
    work = BatchRun(client, source, target, recipe, window, again)
    try:
        ended = work.start()
    except KeyboardInterrupt:
        note("\nstopped; the same command takes it up again")
        return INTERRUPTED
    counts = ended["request_counts"]

    def shown() -> None:
        emit(f"{ended['id']} {ended['status']}: {counts['completed']} of {counted(counts['total'], 'line')}\n")
        if ended["output_file_id"]:
            note(f"answers in {target}")
        if ended["error_file_id"]:
            note(f"{counted(counts['failed'], 'line')} without an answer in {work.errors}")
        for fault in (ended["errors"] or {}).get("data", [])[:10]:
            note(f"line {fault['line'] or '-'}: {fault['message']}")
        if ended["status"] != "completed":
            note("the same command with --again starts over")

    CommandResult(timed(ended), shown).print(as_json=as_json)
    return DONE if ended["status"] == "completed" and not counts["failed"] else ENDED_BADLY


@command("ls", batch)
@limit_option()
def ls(client: Client, limit: int) -> CommandResult:
    """List batches, newest first.

    \b
    Examples:
      penstock batch ls
      penstock batch ls --limit 100 --json
    """
    found = client.pages("/v1/batches", limit, "after", "last_id")
    return list_result(map(timed, found), COLUMNS, "no batches", map(_row, found))


@command("show", batch)
def show(client: Client, batch_id: str) -> CommandResult:
    """Show a batch: its progress, its pace, its lane and the reason for it, and its files.

    \b
    Examples:
      penstock batch show batch_00c69952
    """
    found = timed(client.get(f"/v1/batches/{batch_id}"))
    return fields_result(found, _fields(found))


@command("output", batch)
def output(client: Client, batch_id: str) -> None:
    """Print the finished answers of a batch, also while it runs.

    \b
    Examples:
      penstock batch output batch_00c69952 > out.jsonl
    """
    shown = VisibleBytes().feed if sys.stdout.isatty() else bytes
    client.download(f"/v1/batches/{batch_id}/output", lambda data: sys.stdout.buffer.write(shown(data)))


@command("errors", batch)
def errors(client: Client, batch_id: str) -> CommandResult:
    """List errors of the input, and failed lines, with their line numbers.

    \b
    Examples:
      penstock batch errors batch_00c69952
    """
    faults = (client.get(f"/v1/batches/{batch_id}")["errors"] or {}).get("data", [])
    failures = map(_failure, client.lines(f"/v1/batches/{batch_id}/errors"))
    return list_result([*faults, *failures], FAULTS, "no errors")


@command("cancel", batch)
def cancel(client: Client, batch_id: str) -> CommandResult:
    """Cancel a batch; finished lines are kept.

    \b
    Examples:
      penstock batch cancel batch_00c69952
    """
    return _send_command(client, batch_id, "cancel")


@command("pause", batch)
def pause(client: Client, batch_id: str) -> CommandResult:
    """Pause a batch: begin no more lines. Its deadline does not move.

    \b
    Examples:
      penstock batch pause batch_00c69952
    """
    return _send_command(client, batch_id, "pause")


@command("resume", batch)
def resume(client: Client, batch_id: str) -> CommandResult:
    """Resume a paused batch.

    \b
    Examples:
      penstock batch resume batch_00c69952
    """
    return _send_command(client, batch_id, "resume")


def _send_command(client: Client, batch_id: str, command: str) -> CommandResult:
    found = timed(client.post(f"/v1/batches/{batch_id}/{command}", {}))
    return line_result(found, f"{found['id']} {_state(found)}")


def _state(found: dict[str, Any]) -> str:
    return "paused" if found["paused"] else str(found["status"])


def _row(found: dict[str, Any]) -> dict[str, Any]:
    """A row of the table. Lines of a batch that was cut off, which the API counts as failed, were mostly not begun."""
    counts, was_cut_off = found["request_counts"], found["status"] in CUT_OFF
    return timed(found) | {
        "status": _state(found),
        "lines": f"{counts['completed'] + (0 if was_cut_off else counts['failed'])}/{counts['total']}",
        "failed": "" if was_cut_off else counts["failed"] or "",
        "per_second": f"{found['lines_per_second']:.1f}" if found["lines_per_second"] and not found["paused"] else "",
        "window": found["completion_window"],
    }


def _fields(found: dict[str, Any]) -> dict[str, Any]:
    """What people see of a batch: the fields that say something."""
    counts, usage, faults = found["request_counts"], found.get("usage"), (found.get("errors") or {}).get("data")
    said = f"{counts['completed']} completed, {counts['failed']} failed, {counts['total']} in all"
    if found["status"] in CUT_OFF:
        said = f"{counts['completed']} of {counts['total']} completed, the others failed or were not begun"
    fields = {name: value for name, value in found.items() if value} | {"status": _state(found), "request_counts": said}
    if usage:
        fields["usage"] = f"{counted(usage['total_tokens'], 'token')}, {usage['output_tokens']} of them generated"
    if faults:
        fields["errors"] = f"{len(faults)}, the first: {faults[0]['message']}"
    if found["lines_per_second"] and not found["paused"]:
        left = counts["total"] - counts["completed"] - counts["failed"]
        fields["eta"] = short(left / found["lines_per_second"])
    return fields


def _failure(line: bytes) -> dict[str, Any]:
    """Convert a line of the error file to a row."""
    found = json.loads(line)
    error = found["error"] or found["response"]["body"]["error"]
    return {"line": found["line"], "custom_id": found["custom_id"], "code": error["code"], "message": error["message"]}
