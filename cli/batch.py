"""`penstock batch`: run a file of prompts, and list, show, cancel, pause and resume batches."""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import math
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import click
import msgspec

from cli.app import Group
from cli.client import Client, limit_option
from cli.options import command
from cli.output import (
    CommandResult,
    Exit,
    Problem,
    ProgressLine,
    emit,
    explaining,
    fields_result,
    line_result,
    list_result,
    note,
    short,
    timed,
    visible,
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
MAX_FIELD = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to build a request from a row."""

    model: str
    template: str = ""
    id_column: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request, for example max_tokens."""


def prepare(source: Path, recipe: Recipe, target: BinaryIO) -> tuple[str, str]:
    """Write `source` as lines of a batch. Returns their endpoint and their SHA-256, which is equal for the same input
    with the same options. Streams, so the input may have any size; contacts no server. Raises Problem, which names the
    row and its error."""
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
    return endpoints.pop(), digest.hexdigest()


def batch_lines(source: Path, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield the lines of a batch, in the order of the input. Lines that are whole requests stay as they are."""
    is_table = source.suffix.lower() == ".csv"
    rows = _texts(source) if source.is_dir() else _table(source) if is_table else _json_lines(source)
    with explaining(f"{source} cannot be read", code="usage"):
        try:
            for place, row in rows:
                is_whole = isinstance(row.get("body"), dict)
                if is_whole and "url" not in row:
                    raise _wrong(source, f"line {place}: a request needs a url, such as {CHAT}, beside its body")
                yield row if is_whole else _line(source, place, row, recipe)
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
            try:
                yield name, {"custom_id": name, "name": path.stem, "text": read_text(path)}
            except ValueError as error:
                raise _wrong(path, str(error)) from None


def _line(source: Path, place: str, row: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    if "messages" in row:
        own = {name: value for name, value in row.items() if name != "custom_id"}
        body = {"model": recipe.model, **recipe.options, **own}
    else:
        text = _filled(source, place, row, recipe.template)
        body = {"model": recipe.model, "messages": [{"role": "user", "content": text}], **recipe.options}
    if recipe.id_column and recipe.id_column not in row:
        raise _wrong(source, f"row {place} has no column {recipe.id_column!r}, which --id-column names")
    given = row.get(recipe.id_column or "custom_id")
    name = f"row-{place}" if given in (None, "") else str(given)
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def _filled(source: Path, place: str, row: Mapping[str, Any], template: str) -> str:
    """The template with the row's columns; without one, the column that is the text."""
    columns, used = ", ".join(map(str, row)) or "none", set[str]()
    if not template:
        known = next((name for name in TEXT_COLUMNS if name in row), "")
        if not known:
            what, next_step = f"{source}, row {place}: which column is the text?", "--template 'Summarize: {COLUMN}'"
            raise Problem(what, cause=f"its columns are {columns}", next_step=next_step, code="usage")
        template = f"{{{known}}}"

    def value(match: re.Match[str]) -> str:
        if match[1] in row:
            used.add(match[1])
            return str(row[match[1]] if row[match[1]] is not None else "")
        if WORD.fullmatch(match[1]):
            raise _wrong(source, f"row {place} has no column {match[1]!r}, which the template names")
        return match[0]

    text = SLOT.sub(value, template)
    if not used:
        raise _wrong(source, f"the template names no column of row {place}, which are {columns}")
    return text


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
        with ProgressLine() as progress:
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
                if problem.exit_code == Exit.UNREACHABLE:
                    problem.next_step = f"{batch['id']} goes on: the same command takes it up again"
                raise
            progress.phase("fetching the answers")
            files = {self.target: batch["output_file_id"], self.errors: batch["error_file_id"]}
            for path, file_id in files.items():
                if file_id:
                    with explaining(f"cannot write {path}"), replacing(path) as write:  # completely or not at all
                        self.client.download(f"/v1/files/{file_id}/content", write)
                elif begun.written:  # by an earlier batch
                    path.unlink(missing_ok=True)
            self._keep(msgspec.structs.replace(begun, written=begun.written or any(files.values())))
        return batch

    def _check_paths(self) -> None:
        """Raises Problem if the run would replace its input, or a device."""
        with self._usable():
            for path in (self.target, self.errors, self._note):
                if path.exists() and (path.samefile(self.source) or not path.is_file()):
                    cause = "it is the input" if path.is_file() else "it is no regular file"
                    raise Problem(f"{path} would be replaced", cause=cause, next_step="another -o", code="usage")

    def _batch(self, progress: ProgressLine) -> tuple[dict[str, Any], Begun]:
        """Return the batch of an earlier run, or create it; with what the state file now says."""
        progress.phase(f"reading {self.source}")
        with tempfile.TemporaryFile() as lines:
            endpoint, digest = prepare(self.source, self.recipe, lines)
            begun = self._begun(f"{digest}:{self.window}")
            if begun.batch:
                try:
                    return self.client.get(f"/v1/batches/{begun.batch}"), begun
                except Problem as problem:
                    if problem.code != "batch_not_found":
                        raise
                    begun = self._keep(_new(begun.digest, begun))
            if not begun.file:
                progress.phase(f"uploading {lines.tell() / 1e6:.1f} MB")
                lines.seek(0)
                name = f"{self.source.stem or 'batch'}.jsonl"
                uploaded = self.client.upload("/v1/files", name, lines, purpose="batch")
                begun = self._keep(msgspec.structs.replace(begun, file=uploaded["id"]))
        body = {"input_file_id": begun.file, "endpoint": endpoint, "completion_window": self.window}
        batch = self.client.post("/v1/batches", body, **{"Idempotency-Key": begun.key})
        return batch, self._keep(msgspec.structs.replace(begun, batch=batch["id"]))

    def _begun(self, digest: str) -> Begun:
        before = None
        try:
            with self._usable():
                before = msgspec.json.decode(self._note.read_bytes(), type=Begun) if self._note.exists() else None
        except msgspec.MsgspecError as error:
            raise Problem(f"{self._note} cannot be read", cause=str(error), next_step=f"rm {self._note}") from None
        if before is None or self.again:
            return self._keep(_new(digest, before))
        if before.digest != digest:
            what, cause = f"{self.target} belongs to another run", "its input or its options were different"
            raise Problem(what, cause=cause, next_step="another -o, or --again to start over", code="another_run")
        if before.batch:
            note(f"going on with {before.batch}")
        return before

    def _keep(self, begun: Begun) -> Begun:
        with self._usable():
            write_file(self._note, msgspec.json.encode(begun))
        return begun

    def _usable(self) -> AbstractContextManager[None]:
        return explaining(f"{self.target.parent} cannot be used", next_step="choose another -o")


def _new(digest: str, before: Begun | None) -> Begun:
    return Begun(digest=digest, key=secrets.token_hex(16), written=before is not None and before.written)


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
    window: str,
    again: bool,
    as_json: bool,
    **options: float | None,
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
    given = {name: value for name, value in options.items() if value is not None}
    recipe = Recipe(model or client.default_model(), template, id_column, given)
    work = BatchRun(client, source, target, recipe, window, again)
    try:
        ended = work.start()
    except KeyboardInterrupt:
        note("\nstopped; the same command takes it up again")
        return Exit.INTERRUPTED
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
    return Exit.DONE if ended["status"] == "completed" and not counts["failed"] else Exit.ENDED_BADLY


@command("ls", batch)
@limit_option()
def ls(client: Client, limit: int) -> CommandResult:
    """List batches, newest first.

    \b
    Examples:
      penstock batch ls
      penstock batch ls --limit 100 --json
    """
    found = client.pages("/v1/batches", limit)
    return list_result(found, COLUMNS, "no batches", map(_row, found))


@command("show", batch)
def show(client: Client, batch_id: str) -> CommandResult:
    """Show a batch: its progress, its pace, its lane and the reason for it, and its files.

    \b
    Examples:
      penstock batch show batch_00c69952
    """
    found = client.get(f"/v1/batches/{batch_id}")
    return fields_result(found, _fields(found))


@command("output", batch)
def output(client: Client, batch_id: str) -> None:
    """Print the finished answers of a batch, also while it runs.

    \b
    Examples:
      penstock batch output batch_00c69952 > out.jsonl
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # chunks may split a character
    is_terminal = sys.stdout.isatty()

    def write(data: bytes) -> None:
        sys.stdout.buffer.write(visible(decode(data)).encode() if is_terminal else data)

    client.download(f"/v1/batches/{batch_id}/output", write)


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
    found = client.post(f"/v1/batches/{batch_id}/{command}", {})
    return line_result(found, f"{{id}} {_state(found)}")


def _state(found: dict[str, Any]) -> str:
    return "paused" if found["paused"] else str(found["status"])


def _row(found: dict[str, Any]) -> dict[str, Any]:
    """A row of the table. Lines of a batch that was cut off, which the API counts as failed, were mostly not begun."""
    counts, was_cut_off = found["request_counts"], found["status"] in CUT_OFF
    return found | {
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
