"""`penstock jobs`: list, show, time, follow and cancel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from cli.client import Client
from cli.errors import DONE, STILL_RUNNING, Problem
from cli.job import answer_of, ended_badly, follow, timed
from cli.options import Command, Where, json_option, where_options
from cli.output import emit, note, print_json, print_rows, print_table
from cli.timing import HEADER, bounds, rows

COLUMNS = ("id", "status", "priority", "model", "created_at", "seconds", "tokens")
STATES = ["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
PAGE = 100


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def jobs() -> None:
    """List, show, time, follow and cancel jobs."""


@jobs.command("ls", cls=Command)
@click.option("--status", type=click.Choice(STATES), help="Only jobs in this state.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Maximum number, newest first.")
@where_options(url=True)
@json_option
def ls(status: str | None, limit: int, where: Where, as_json: bool) -> int:
    """List jobs, newest first."""
    found = _pages(Client.find(where), status, limit)
    if as_json:
        print_rows((timed(job) for job in found), COLUMNS, as_json=True)
        return DONE
    rows = [_row(job) for job in found]
    if rows:
        print_rows(rows, COLUMNS, as_json=False)
    else:
        note("no jobs")
    return DONE


@jobs.command("show", cls=Command)
@click.argument("job_id")
@where_options(url=True)
@json_option
def show(job_id: str, where: Where, as_json: bool) -> int:
    """Show one job: its state, times, place in the lane, and how it ended."""
    job = timed(Client.find(where).get(f"/v1/jobs/{job_id}"))
    if as_json:
        print_json(job)
    else:
        print_table(("FIELD", "VALUE"), list(_fields(job)))
    return DONE


@jobs.command("result", cls=Command)
@click.argument("job_id")
@where_options(url=True)
@json_option
def result(job_id: str, where: Where, as_json: bool) -> int:
    """Print the answer of a job that has completed."""
    client = Client.find(where)
    job = client.get(f"/v1/jobs/{job_id}")
    if job["status"] in ("queued", "in_progress"):
        raise Problem(
            f"the job is still {job['status']}",
            next_step=f"penstock jobs events {job_id}",
            exit_code=STILL_RUNNING,
            code="not_ready",
        )
    if job["status"] != "completed":
        raise ended_badly(job)
    if as_json:
        print_json(job["result"])
    else:
        emit(answer_of(job["result"]) + "\n")
    return DONE


@jobs.command("events", cls=Command)
@click.argument("job_id")
@click.option("--after", default="", help="Id of the last event seen, to go on behind it.")
@where_options(url=True)
@json_option
def events(job_id: str, after: str, where: Where, as_json: bool) -> int:
    """Follow a job to its end: its tokens on stdout, or with --json every event, one per line."""
    return follow(Client.find(where), job_id, as_json=as_json, after=after)


@jobs.command("timing", cls=Command)
@click.argument("job_id")
@where_options(url=True)
@json_option
def timing(job_id: str, where: Where, as_json: bool) -> int:
    """Show where a job's time went: on its way in, in the queue, in the engine, on its way out."""
    found = Client.find(where).get(f"/v1/jobs/{job_id}/timing")
    if as_json:
        print_json(found)
    else:
        print_table(HEADER, list(rows(found)))
        note(bounds(found))
    return DONE


@jobs.command("cancel", cls=Command)
@click.argument("job_id")
@where_options(url=True)
@json_option
def cancel(job_id: str, where: Where, as_json: bool) -> int:
    """Cancel a job, queued or running."""
    job = timed(Client.find(where).post(f"/v1/jobs/{job_id}/cancel", {}))
    if as_json:
        print_json(job)
    else:
        emit(f"{job['id']} {job['status']}\n")
    return DONE


def _pages(client: Client, status: str | None, limit: int) -> Iterator[dict[str, Any]]:
    """Yield up to `limit` jobs, fetching pages as needed."""
    cursor = None
    while limit > 0:
        page = client.get("/v1/jobs", status=status, cursor=cursor, limit=min(limit, PAGE))
        yield from page["data"][:limit]
        limit -= len(page["data"])
        cursor = page.get("next_cursor")
        if not page["has_more"] or cursor is None:
            return


def _row(job: dict[str, Any]) -> dict[str, Any]:
    began, ended = job["started_at"], job["completed_at"]
    usage = job.get("usage") or {}
    return timed(job) | {
        "seconds": f"{ended - began:.1f}" if began and ended else "",
        "tokens": usage.get("completion_tokens", ""),
    }


def _fields(job: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in job.items():
        match value:
            case _ if value in (None, "", {}):
                continue
            case {"message": message, "code": code}:
                yield name, f"{code}: {message}"
            case {"choices": _}:
                yield name, answer_of(value)
            case dict():
                yield name, ", ".join(f"{key} {item}" for key, item in value.items() if not isinstance(item, dict))
            case _:
                yield name, str(value)
