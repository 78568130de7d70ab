"""`penstock jobs`: list, show, time, follow and cancel."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import click

from cli import job
from cli.app import Group
from cli.chat import stdin_text
from cli.client import Client, limit_option
from cli.job import (
    AnswerPrinter,
    answer_of,
    attempts_in_words,
    ended_badly,
    follow,
    job_timed,
    print_attempts,
    print_input,
)
from cli.options import Command, Where, command, moment
from cli.output import (
    DONE,
    STILL_RUNNING,
    CommandResult,
    Problem,
    emit,
    fields_result,
    line_result,
    list_result,
    note,
    print_json,
    print_table,
    terminal_width,
)
from cli.progress import ProgressLine
from penstock.client import JobFailed, WaitTimeout
from penstock.text import duration
from streaming.order import Priority
from telemetry.latency import EGRESS_FIRST, PARTS

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
    """List, show, time, follow and cancel jobs.

    \b
    Examples:
      penstock jobs ls
      penstock jobs show job_0074d316
      penstock jobs cancel job_0074d316
    """


@command("ls", jobs)
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
    """List jobs, newest first, with the first words of their prompts.

    \b
    Examples:
      penstock jobs ls
      penstock jobs ls --status failed --limit 100
      penstock jobs ls --lane batch --since 2h
      penstock jobs ls --json
    """
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


@command("show", jobs)
@click.argument("job_id")
@click.option("--input", "whole", is_flag=True, help="Show all of its request; without it, long texts are cut.")
def show(client: Client, job_id: str, whole: bool) -> CommandResult:
    """Show one job: its state, times, place in the lane, its request, what became of each attempt, and its answer.

    \b
    Examples:
      penstock jobs show job_0074d316
      penstock jobs show job_0074d316 --input
      penstock jobs show job_0074d316 --json
    """
    found = client.get(f"/v1/jobs/{job_id}", include="input")
    job = job_timed(found)
    fields = {name: value for name, value in job.items() if name not in ("attempt_log", "input", "result")}

    def shown() -> None:
        fields_result(job, fields | {"attempts": attempts_in_words(job)}).show()
        print_input(job, whole=whole)
        print_attempts(found)
        if answer := job.get("result"):
            emit(f"\nRESULT\n{answer_of(answer)}\n")

    return CommandResult(job, shown)


@command("result", jobs)
@click.argument("job_id")
def result(client: Client, job_id: str) -> CommandResult:
    """Print the answer of a job that has completed.

    \b
    Examples:
      penstock jobs result job_0074d316
    """
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


@command("events", jobs)
@click.argument("job_id")
@click.option("--after", default="", help="Id of the last event seen, to go on behind it.")
def events(client: Client, job_id: str, after: str, as_json: bool) -> int:
    """Follow a job to its end: its tokens on stdout, or with --json every event, one per line.

    \b
    Examples:
      penstock jobs events job_0074d316
      penstock jobs events job_0074d316 --after 1:131:fd1fa10b0c19-1 --json
    """
    return follow(client, job_id, as_json=as_json, after=after)


@command("watch", jobs)
@click.argument("job_id")
def watch(client: Client, job_id: str, where: Where, as_json: bool) -> int:
    """Follow what happens to a job: its place in the queue, each attempt and its worker, tokens, and how it ends.

    \b
    Examples:
      penstock jobs watch job_0074d316
      penstock jobs watch job_0074d316 --json
    """
    return job.watch(client, where, job_id, as_json=as_json)


@command("timing", jobs)
@click.argument("job_id")
def timing(client: Client, job_id: str) -> CommandResult:
    """Show where a job's time went: on its way in, in the queue, in the engine, on its way out.

    \b
    Examples:
      penstock jobs timing job_0074d316
    """
    found = client.get(f"/v1/jobs/{job_id}/timing")

    def chart() -> None:
        print_table(HEADER, list(_timing_rows(found)))
        note(_clock_bounds(found))

    return CommandResult(found, chart)


@command("cancel", jobs)
@click.argument("job_id")
def cancel(client: Client, job_id: str) -> CommandResult:
    """Cancel a job, queued or running. The exit code is 1 if it had already ended otherwise.

    \b
    Examples:
      penstock jobs cancel job_0074d316
    """
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


SECONDS = re.compile(r"-?[0-9]+(\.[0-9]+)?")
"""A number, which `--wait` then takes or refuses."""


class SubmitCommand(Command):
    """Accepts `--wait` without a value (no time limit), or with one: `--wait 5` or `--wait=5`. A word after it that is
    no number is TEXT."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = _spelled_out(args)
        try:
            return super().parse_args(ctx, words)
        except click.UsageError as error:
            raise _bad_wait(error, args, ctx) or error from None


@command("submit", cls=SubmitCommand)
@click.argument("text")
@click.option("--priority", type=click.Choice(["interactive", "standard", "batch"]), help="Lane [standard].")
@click.option("--wait", type=click.FloatRange(0), metavar="[SECONDS]", help="Wait for the end, and print the answer.")
@click.option("--follow", "following", is_flag=True, help="Print the tokens as they come; Ctrl-C only stops watching.")
@click.option("--idempotency-key", help="Repeating the command with the same key creates no second job.")
@click.option("--deadline-ms", type=click.IntRange(1), help="Time limit from now to the last token.")
@click.option("--webhook", help="Webhook of the server's settings to tell how the job ends, or a URL that they allow.")
@click.option("--max-tokens", type=click.IntRange(1), help="Maximum tokens of an answer.")
@click.option("--model", help="Model to ask [the instance's default].")
def submit(
    client: Client,
    text: str,
    wait: float | None,
    following: bool,
    idempotency_key: str | None,
    as_json: bool,
    **asked: Any,
) -> int:
    """Queue TEXT (- reads it from stdin) as a chat job; its id goes to stdout.

    With --wait the answer goes to stdout instead. Exit code 5: the job ended without an answer. Exit code 6: the
    seconds of --wait are over, the job continues, and its id is on stdout.

    \b
    Examples:
      penstock submit "Write a haiku about water."
      penstock submit "Write a haiku about water." --wait 30
      penstock submit "Name a river." --priority batch --idempotency-key river-1
      penstock submit "Name a river." --webhook crm
      penstock submit - < prompt.txt
    """
    if not as_json:
        client.on_retry(AnswerPrinter().waiting(note))
    body = _body(client, stdin_text() if text == "-" else text, **asked)
    job = client.submit(body, idempotency_key or "")
    if following:
        note(f"job {job['id']}")
        return follow(client, job["id"], as_json=as_json)
    if wait is not None:
        return _wait(client, job, wait, as_json=as_json)
    _found(job).print(as_json=as_json)
    return DONE


def _body(
    client: Client,
    text: str,
    *,
    model: str | None,
    max_tokens: int | None,
    priority: str | None,
    deadline_ms: int | None,
    webhook: str | None,
) -> dict[str, Any]:
    if not text.strip():
        raise Problem("there is nothing to submit", next_step='penstock submit "a text"', code="usage")
    queue = {"priority": priority, "deadline_ms": deadline_ms, "webhook": webhook}
    body = {
        "model": model or client.default_model(),
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "queue": {name: value for name, value in queue.items() if value is not None},
    }
    return {name: value for name, value in body.items() if value not in (None, {})}


def _wait(client: Client, job: dict[str, Any], seconds: float, *, as_json: bool) -> int:
    with ProgressLine(sys.stderr, os.environ, quiet=as_json or not sys.stderr.isatty()) as progress:
        if not as_json:
            client.on_retry(AnswerPrinter().waiting(progress.say))
        progress.phase(f"waiting for {job['id']}")
        progress.explain(lambda: client.worker_problem(job["model"]))
        try:
            job = client.wait(job["id"], seconds)
        except JobFailed as failed:
            job = failed.job
        except WaitTimeout as timeout:
            job = timeout.job or job
            progress.end()
            _found(job).print(as_json=as_json)
            raise Problem(
                f"the job is still {job['status']}",
                cause=f"--wait {seconds:g} is over; the work goes on",
                next_step=f"penstock jobs events {job['id']}",
                code="wait_timeout",
            ) from None
    if as_json:
        print_json(job_timed(job))
    if job["status"] != "completed":
        raise ended_badly(job)
    if not as_json:
        emit(answer_of(job["result"]) + "\n")
    return DONE


def _found(job: dict[str, Any]) -> CommandResult:
    return line_result(job_timed(job), job["id"])


def _bad_wait(error: click.UsageError, args: Sequence[str], context: click.Context) -> click.UsageError | None:
    """The error for one word too many, if a word behind `--wait` is no number."""
    words = [following for word, following in pairwise(args) if word == "--wait" and not following.startswith("-")]
    wrong = [word for word in words if not SECONDS.fullmatch(word)]
    if not wrong or not error.format_message().startswith("Got unexpected extra argument ("):
        return None
    message = f"--wait takes a number of seconds, such as --wait 5, or none: {wrong[0]!r} is no number."
    return click.UsageError(message, context)


def _spelled_out(args: Sequence[str]) -> list[str]:
    end = args.index("--") if "--" in args else len(args)
    words = [f"--wait={math.inf}" if word == "--wait" and place < end else word for place, word in enumerate(args)]
    for place, (word, following) in enumerate(pairwise(args[:end])):
        if word == "--wait" and SECONDS.fullmatch(following):
            words[place : place + 2] = ["--wait", following]
    return words
