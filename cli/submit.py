"""`penstock submit`: put a job in the queue, and wait for it if asked to."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import click

from cli.chat import stdin_text
from cli.client import Client
from cli.errors import DONE, STILL_RUNNING, USAGE, Problem
from cli.job import AnswerPrinter, answer_of, ended_badly, follow, job_timed
from cli.options import Command, Where, json_option, where_options
from cli.output import CommandResult, emit, line_result, note, print_json
from cli.progress import ProgressLine
from penstock.client import JobFailed, WaitTimeout

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


@click.command(cls=SubmitCommand)
@click.argument("text")
@click.option("--priority", type=click.Choice(["interactive", "standard", "batch"]), help="Lane [standard].")
@click.option("--wait", type=click.FloatRange(0), metavar="[SECONDS]", help="Wait for the end, and print the answer.")
@click.option("--follow", "following", is_flag=True, help="Print the tokens as they come; Ctrl-C only stops watching.")
@click.option("--idempotency-key", help="Repeating the command with the same key creates no second job.")
@click.option("--deadline-ms", type=click.IntRange(1), help="Time limit from now to the last token.")
@click.option("--webhook", help="Webhook of the server's settings to tell how the job ends, or a URL that they allow.")
@click.option("--max-tokens", type=click.IntRange(1), help="Maximum tokens of an answer.")
@click.option("--model", help="Model to ask [the instance's default].")
@where_options(url=True)
@json_option
def submit(
    text: str,
    wait: float | None,
    following: bool,
    idempotency_key: str | None,
    as_json: bool,
    where: Where,
    **asked: Any,
) -> int:
    """Queue TEXT (- reads it from stdin) as a chat job; its id goes to stdout.

    With --wait the answer goes to stdout instead. Exit code 5: the job ended without an answer. Exit code 6: the
    seconds of --wait are over, the job continues, and its id is on stdout.
    """
    with Client.find(where) as client:
        if not as_json:
            client.on_retry(AnswerPrinter().waiting(note))
        body = _body(client, stdin_text() if text == "-" else text, **asked)
        job = client.submit(body, idempotency_key or "")
        if following:
            note(f"job {job['id']}")
            return follow(client, job["id"], as_json=as_json)
        if wait is None:
            _found(job).print(as_json=as_json)
            return DONE
        return _wait(client, job, wait, as_json=as_json)


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
        raise Problem("there is nothing to submit", next_step='penstock submit "a text"', exit_code=USAGE, code="usage")
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
                exit_code=STILL_RUNNING,
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
