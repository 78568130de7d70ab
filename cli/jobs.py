"""`penstock jobs`: list, show, time, follow and cancel."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from cli import job_watch
from cli.api_command import api_command, limit_option
from cli.client import Client
from cli.errors import STILL_RUNNING, Problem
from cli.help_text import Group
from cli.ids import whole_id
from cli.job import answer_of, attempts_in_words, ended_badly, follow, job_timed, print_attempts, print_input
from cli.options import Command, Where, json_option, moment, where_options
from cli.output import CommandResult, emit, fields_result, line_result, list_result, note, print_table, terminal_width
from streaming.order import Priority
from telemetry.latency import EGRESS_FIRST, PARTS
from telemetry.report.words import duration

COLUMNS = ("id", "status", "lane", "model", "created_at", "took", "tokens", "prompt")
STATES = ["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
WIDTH, NARROW = 40, 20
"""Length of the longest bar in characters; NARROW where the terminal has no room for it."""
EIGHTHS = " ▏▎▍▌▋▊▉"
"""The end of a bar, by eighths of a character."""
WIDE = 110
"""Columns of a terminal that has."""
A_SECOND_MS = 1000.0
SENT_WHOLE = "the answer was sent in one piece"
"""The API's reason why a first token was not delivered on its own."""
HEADER = ("PART", "MS", "", "WHAT IT IS")


@click.group(cls=Group)
def jobs() -> None:
    """List, show, time, follow and cancel jobs."""


@api_command("ls", jobs)
@click.option("--status", type=click.Choice(STATES), help="Only jobs in this state.")
@click.option("--model", help="Only jobs of this model.")
@click.option("--lane", type=click.Choice([lane.value for lane in Priority]), help="Only jobs of this lane.")
@click.option("--tenant", help="Jobs of this tenant, or of all: '*'. Needs an admin key, and hides their prompts.")
@click.option("--since", help="Only jobs accepted since then: 15m, 2h, 7d (ago), or a time (UTC).")
@click.option("--until", help="Only jobs accepted until then.")
@limit_option()
def ls(
    client: Client, limit: int, tenant: str | None, since: str | None, until: str | None, **equal: str | None
) -> CommandResult:
    """List jobs, newest first, with the first words of their prompts."""
    now = time.time()
    times = {name: moment(text, now) for name, text in (("since", since), ("until", until)) if text}
    path = "/admin/jobs" if tenant else "/v1/jobs"
    found = client.pages(path, limit, "cursor", "next_cursor", tenant=tenant, **equal, **times)

    def shown() -> None:
        all_found = list(found)
        list_result((), columns_of(all_found), "no jobs", map(_row, all_found)).show()

    return CommandResult(map(job_timed, found), shown)


def columns_of(found: Iterable[Mapping[str, Any]]) -> Sequence[str]:
    """The columns of a table of jobs; that of endpoints only where there are several, tenants and prompts if known."""
    place, jobs_found = COLUMNS.index("model") + 1, list(found)
    further = ["endpoint"] if len({job.get("endpoint") for job in jobs_found}) > 1 else []
    further += ["tenant"] if any("tenant" in job for job in jobs_found) else []
    last = COLUMNS[place:] if any(job.get("preview") for job in jobs_found) else COLUMNS[place:-1]
    return (*COLUMNS[:place], *further, *last)


@api_command("show", jobs)
@click.argument("job_id")
@click.option("--input", "whole", is_flag=True, help="Show all of its request; without it, long texts are cut.")
def show(client: Client, job_id: str, whole: bool) -> CommandResult:
    """Show one job: its state, times, place in the lane, its request, what became of each attempt, and its answer."""
    found = client.get(f"/v1/jobs/{job_id}", include="input")
    job = job_timed(found)

    def shown() -> None:
        fields_result(job, _fields(job)).show()
        print_input(job, whole=whole)
        print_attempts(found)
        if answer := job.get("result"):
            emit(f"\nRESULT\n{answer_of(answer)}\n")

    return CommandResult(job, shown)


@api_command("result", jobs)
@click.argument("job_id")
def result(client: Client, job_id: str) -> CommandResult:
    """Print the answer of a job that has completed."""
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
    return line_result(job["result"], answer_of(job["result"]))


@jobs.command("events", cls=Command)
@click.argument("job_id")
@click.option("--after", default="", help="Id of the last event seen, to go on behind it.")
@where_options(url=True)
@json_option
def events(job_id: str, after: str, where: Where, as_json: bool) -> int:
    """Follow a job to its end: its tokens on stdout, or with --json every event, one per line."""
    client = Client.find(where)
    return follow(client, whole_id(client, "job_id", job_id), as_json=as_json, after=after)


@jobs.command("watch", cls=Command)
@click.argument("job_id")
@where_options(url=True)
@json_option
def watch(job_id: str, where: Where, as_json: bool) -> int:
    """Follow what happens to a job: its place in the queue, each attempt and its worker, tokens, and how it ends."""
    with Client.find(where) as client:
        whole = whole_id(client, "job_id", job_id)
    return job_watch.watch(where, whole, as_json=as_json)


@api_command("timing", jobs)
@click.argument("job_id")
def timing(client: Client, job_id: str) -> CommandResult:
    """Show where a job's time went: on its way in, in the queue, in the engine, on its way out."""
    found = client.get(f"/v1/jobs/{job_id}/timing")

    def chart() -> None:
        print_table(HEADER, list(_timing_rows(found)))
        note(_clock_bounds(found))

    return CommandResult(found, chart)


@api_command("cancel", jobs)
@click.argument("job_id")
def cancel(client: Client, job_id: str) -> CommandResult:
    """Cancel a job, queued or running. The exit code is 1 if it had already ended otherwise."""
    job = job_timed(client.post(f"/v1/jobs/{job_id}/cancel", {}))
    state, already_ended = job["status"], job.get("already_ended")
    if already_ended and state != "cancelled":
        raise Problem(
            f"the job had already ended as {state}: nothing was cancelled",
            next_step=f"penstock jobs show {job_id}",
            code="already_ended",
        )
    return line_result(job, f"{job['id']} {'was cancelled before' if already_ended else state}")


def _row(job: dict[str, Any]) -> dict[str, Any]:
    began, ended = job["started_at"], job["completed_at"]
    usage = job.get("usage") or {}
    by = job.get("cancelled_by")
    return job_timed(job) | {
        "status": f"{job['status']} ({by.replace('_', ' ')})" if by else job["status"],
        "lane": job["priority"],
        "prompt": job.get("preview"),
        "took": f"{ended - began:.1f}s" if began and ended else "",
        "tokens": usage.get("completion_tokens", ""),
    }


def _fields(job: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in job.items():
        match value:
            case _ if value in (None, "", {}) or name in ("attempt_log", "input", "result"):
                continue
            case {"message": message, "code": code}:
                yield name, f"{code}: {message}"
            case dict():
                yield name, ", ".join(f"{key} {item}" for key, item in value.items() if not isinstance(item, dict))
            case int() if name == "attempts":
                yield name, attempts_in_words(job)
            case _:
                yield name, str(value)


def _timing_rows(timing: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The rows: the parts in order, each bar at its offset; then the overlapping part, the sum, and the latencies."""
    parts, whole = timing["parts_ms"], timing["end_to_end_ms"] or timing["sum_ms"]
    width = NARROW if sys.stdout.isatty() and terminal_width(sys.stdout) < WIDE else WIDTH
    begun = shown = 0.0
    meanings = {part.name: part.meaning for part in PARTS}
    for part in sorted(meanings, key=list(parts).index):
        spent = parts[part]
        yield part, _ms(spent), _bar(begun, spent or 0.0, whole, width), _said(timing, part, meanings[part])
        begun += spent or 0.0
        shown = begun if part == "prefill" else shown
    name = EGRESS_FIRST.name
    yield name, _ms(parts[name]), _bar(shown, parts[name] or 0.0, whole, width), _said(timing, name, "beside decode")
    yield "sum", _ms(timing["sum_ms"]), "", _groups(timing)
    if timing["end_to_end_ms"] is not None:
        yield "end to end", _ms(timing["end_to_end_ms"]), "", f"received to {timing['until']}".replace("_", " ")
    whole_answer = timing["reasons"].get(name) == SENT_WHOLE  # then that is when the answer had ended
    whose = "as the reader got them" if timing["stamps"]["last_sent"] else "in the engine"
    for key, label, meaning in (
        (
            "time_to_first_token_ms",
            "TTFT",
            "received to the whole answer" if whole_answer else "received to first token",
        ),
        ("gateway_time_to_first_token_ms", "gateway TTFT", "received to the first token in the API process"),
        ("time_per_output_token_ms", "TPOT", f"mean time between tokens, {whose}"),
    ):
        if timing[key] is not None and not (whole_answer and key.startswith("gateway")):
            yield label, _ms(timing[key]), "", meaning


def _clock_bounds(timing: dict[str, Any]) -> str:
    """The error bound of the processes' clocks."""
    error = timing["clock_error_ms"]
    return f"clocks known to {error['api']:.3f} ms (API) and {error['worker']:.3f} ms (worker)"


def _groups(timing: dict[str, Any]) -> str:
    return ", ".join(f"{name} {spent:.1f}" for name, spent in timing["groups_ms"].items())


def _said(timing: dict[str, Any], name: str, meaning: str) -> str:
    return str(timing["reasons"].get(name) or meaning)


def _ms(spent: float | None) -> str:
    if spent is None:
        return "-"
    return f"{spent:.3f}" if spent < A_SECOND_MS else duration(spent)


def _bar(begun: float, spent: float, whole: float, width: int) -> str:
    """A bar of `width` at most, in eighths of a character; a part that took any time has at least one."""
    if whole <= 0 or spent <= 0:
        return ""
    start = min(width - 1, int(width * max(0.0, begun) / whole))
    eighths = max(1, min(8 * (width - start), round(8 * width * spent / whole)))
    return " " * start + "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
