"""`penstock dlq`: list, show, replay and drop dead letters (jobs and queue entries that could not be processed)."""

from __future__ import annotations

from typing import Any

import click

from cli.client import Client
from cli.errors import DONE
from cli.options import Command, Where, json_option, where_options
from cli.output import emit, note, print_json, print_rows, print_table, rfc3339

COLUMNS = ("id", "reason", "at", "job_id", "lane")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def dlq() -> None:
    """List, show, replay and drop dead letters."""


@dlq.command("ls", cls=Command)
@click.option(
    "--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="Maximum number, newest first."
)
@where_options(url=True)
@json_option
def ls(limit: int, where: Where, as_json: bool) -> int:
    """List dead letters, newest first."""
    with Client.find(where) as client:
        letters = [_timed(letter) for letter in client.get("/admin/dlq", limit=limit)["data"]]
    if letters or as_json:
        print_rows(letters, COLUMNS, as_json=as_json)
    else:
        note("no dead letters")
    return DONE


@dlq.command("show", cls=Command)
@click.argument("letter_id")
@where_options(url=True)
@json_option
def show(letter_id: str, where: Where, as_json: bool) -> int:
    """Show one: why it became a dead letter, and its job."""
    with Client.find(where) as client:
        letter = _timed(client.get(f"/admin/dlq/{letter_id}"))
    if as_json:
        print_json(letter)
        return DONE
    job = letter.pop("job", None) or {}
    known = {**letter, **{f"job {name}": job.get(name) for name in ("status", "model", "priority", "attempts")}}
    print_table(("FIELD", "VALUE"), [(name, str(value)) for name, value in known.items() if value not in (None, "")])
    return DONE


@dlq.command("replay", cls=Command)
@click.argument("letter_id")
@where_options(url=True)
@json_option
def replay(letter_id: str, where: Where, as_json: bool) -> int:
    """Put its job in the queue again, as a new job; the new id goes to stdout."""
    with Client.find(where) as client:
        job = client.post(f"/admin/dlq/{letter_id}/replay", {})
    if as_json:
        print_json(job)
    else:
        emit(f"{job['id']}\n")
    return DONE


@dlq.command("drop", cls=Command)
@click.argument("letter_id")
@where_options(url=True)
@json_option
def drop(letter_id: str, where: Where, as_json: bool) -> int:
    """Delete one."""
    with Client.find(where) as client:
        dropped = client.delete(f"/admin/dlq/{letter_id}")
    if as_json:
        print_json(dropped)
    else:
        emit(f"{dropped['id']} dropped\n")
    return DONE


def _timed(letter: dict[str, Any]) -> dict[str, Any]:
    return letter | {"at": rfc3339(letter["at"])}
