"""`penstock batch`: run a file of prompts, and list, show, cancel, pause and resume batches."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from cli.api_command import api_command, limit_option
from cli.batch_input import Recipe
from cli.batch_run import BatchRun, duration, watched
from cli.client import Client
from cli.errors import DONE
from cli.help_text import Group
from cli.ids import whole_id
from cli.options import Command, Where, json_option, where_options
from cli.output import CommandResult, VisibleBytes, emit, fields_result, line_result, list_result, note, timed
from penstock.text import counted

CUT_OFF = ("cancelled", "expired")
COLUMNS = ("id", "status", "lines", "failed", "per_second", "window", "created_at")
FAULTS = ("line", "custom_id", "code", "message")
STEMS = ("created", "in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
TIMES = tuple(f"{stem}_at" for stem in STEMS)


@click.group(cls=Group)
def batch() -> None:
    """Run files of prompts, and manage batches."""


@batch.command("run", cls=Command)
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
@where_options(url=True)
@json_option
def run(
    source: Path,
    target: Path,
    template: str,
    id_column: str,
    model: str | None,
    max_tokens: int | None,
    temperature: float | None,
    window: str,
    again: bool,
    where: Where,
    as_json: bool,
) -> int:
    """Compute every line of INPUT and write the answers to a file.

    INPUT is a file of JSON lines (requests of a batch, or objects with `messages`, `prompt` or the template's columns),
    a CSV table, or a folder of .txt and .md files (columns `name` and `text`). If the command is stopped, the same
    command continues where it stopped. Exit code 5: some lines failed, or not all were computed.
    """
    options = {"max_tokens": max_tokens, "temperature": temperature}
    given = {name: value for name, value in options.items() if value is not None}
    with Client.find(where) as client:
        recipe = Recipe(model or client.default_model(), template, id_column, given)
        work = BatchRun(client, source, target, recipe, window, again)
        ended, code = watched(work)
    if ended is None:
        return code
    CommandResult(timed(ended, TIMES), lambda: _print_summary(ended, work)).print(as_json=as_json)
    return code


@api_command("ls", batch)
@limit_option()
def ls(client: Client, limit: int) -> CommandResult:
    """List batches, newest first."""
    found = client.pages("/v1/batches", limit, "after", "last_id")
    return list_result((timed(each, TIMES) for each in found), COLUMNS, "no batches", map(_row, found))


@api_command("show", batch)
@click.argument("batch_id")
def show(client: Client, batch_id: str) -> CommandResult:
    """Show a batch: its progress, its pace, its lane and the reason for it, and its files."""
    found = timed(client.get(f"/v1/batches/{batch_id}"), TIMES)
    return fields_result(found, _fields(found))


@batch.command("output", cls=Command)
@click.argument("batch_id")
@where_options(url=True)
def output(batch_id: str, where: Where) -> int:
    """Print the finished answers of a batch, also while it runs."""
    with Client.find(where) as client:
        client.download(f"/v1/batches/{whole_id(client, 'batch_id', batch_id)}/output", _writer())
    return DONE


def _writer() -> Callable[[bytes], object]:
    """A function that writes bytes to stdout unchanged, or with control characters escaped on a terminal."""
    write = sys.stdout.buffer.write
    if not sys.stdout.isatty():
        return write
    shown = VisibleBytes()
    return lambda data: write(shown.feed(data))


@api_command("errors", batch)
@click.argument("batch_id")
def errors(client: Client, batch_id: str) -> CommandResult:
    """List errors of the input, and failed lines, with their line numbers."""
    faults = (client.get(f"/v1/batches/{batch_id}")["errors"] or {}).get("data", [])
    failures = map(_failure, client.lines(f"/v1/batches/{batch_id}/errors"))
    return list_result([*faults, *failures], FAULTS, "no errors")


@api_command("cancel", batch)
@click.argument("batch_id")
def cancel(client: Client, batch_id: str) -> CommandResult:
    """Cancel a batch; finished lines are kept."""
    return _send_command(client, batch_id, "cancel")


@api_command("pause", batch)
@click.argument("batch_id")
def pause(client: Client, batch_id: str) -> CommandResult:
    """Pause a batch: begin no more lines. Its deadline does not move."""
    return _send_command(client, batch_id, "pause")


@api_command("resume", batch)
@click.argument("batch_id")
def resume(client: Client, batch_id: str) -> CommandResult:
    """Resume a paused batch."""
    return _send_command(client, batch_id, "resume")


def _send_command(client: Client, batch_id: str, command: str) -> CommandResult:
    found = timed(client.post(f"/v1/batches/{batch_id}/{command}", {}), TIMES)
    return line_result(found, f"{found['id']} {_state(found)}")


def _print_summary(ended: dict[str, Any], work: BatchRun) -> None:
    """Print the result and the files it was written to."""
    counts = ended["request_counts"]
    emit(f"{ended['id']} {ended['status']}: {counts['completed']} of {counted(counts['total'], 'line')}\n")
    if ended["output_file_id"]:
        note(f"answers in {work.target}")
    if ended["error_file_id"]:
        note(f"{counted(counts['failed'], 'line')} without an answer in {work.errors}")
    for fault in (ended["errors"] or {}).get("data", [])[:10]:
        note(f"line {fault['line'] or '-'}: {fault['message']}")


def _state(found: dict[str, Any]) -> str:
    return "paused" if found["paused"] else str(found["status"])


def _row(found: dict[str, Any]) -> dict[str, Any]:
    """A row of the table. Lines of a batch that was cut off, which the API counts as failed, were mostly not begun."""
    counts, was_cut_off = found["request_counts"], found["status"] in CUT_OFF
    return timed(found, TIMES) | {
        "status": _state(found),
        "lines": f"{counts['completed'] + (0 if was_cut_off else counts['failed'])}/{counts['total']}",
        "failed": "" if was_cut_off else counts["failed"] or "",
        "per_second": f"{found['lines_per_second']:.1f}" if found["lines_per_second"] and not found["paused"] else "",
        "window": found["completion_window"],
    }


def _fields(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    counts, rate = found["request_counts"], found["lines_per_second"]
    for name, value in found.items():
        match value:
            case _ if not value:
                continue
            case _ if name == "status":
                yield name, _state(found)
            case {"total": _, "completed": _, "failed": _} if found["status"] in CUT_OFF:
                yield name, f"{counts['completed']} of {counts['total']} completed, the others failed or were not begun"
            case {"total": _, "completed": _, "failed": _}:
                yield name, f"{counts['completed']} completed, {counts['failed']} failed, {counts['total']} in all"
            case {"data": [first, *_] as faults}:
                yield name, f"{len(faults)}, the first: {first['message']}"
            case {"total_tokens": total, "output_tokens": out}:
                yield name, f"{counted(total, 'token')}, {out} of them generated"
            case dict():
                yield name, ", ".join(f"{key} {item}" for key, item in value.items())
            case _:
                yield name, str(value)
    if rate and not found["paused"]:
        yield "eta", duration((counts["total"] - counts["completed"] - counts["failed"]) / rate)


def _failure(line: bytes) -> dict[str, Any]:
    """Convert a line of the error file to a row."""
    found = json.loads(line)
    error = found["error"] or found["response"]["body"]["error"]
    return {"line": found["line"], "custom_id": found["custom_id"], "code": error["code"], "message": error["message"]}
