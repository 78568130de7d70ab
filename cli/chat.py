"""`penstock chat`: one question, or a conversation; only the answer goes to stdout."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import click

from cli.client import Client
from cli.errors import DONE, USAGE, Problem
from cli.job import AnswerPrinter, print_answer
from cli.options import Command, Where, where_options
from cli.progress import ProgressLine

Turns: TypeAlias = list[dict[str, str]]

ENDING = (signal.SIGTERM, signal.SIGHUP)


class Leaving(KeyboardInterrupt):
    """Raised by signals that end the chat, so that its job ends too."""


@click.command(cls=Command)
@click.argument("message", required=False)
@click.option("--model", help="Model to ask [the instance's default].")
@click.option("--system", help="System prompt.")
@click.option("--max-tokens", type=click.IntRange(1), help="Maximum tokens of an answer.")
@where_options(url=True)
def chat(message: str | None, model: str | None, system: str | None, max_tokens: int | None, where: Where) -> int:
    """Ask the model. Text on stdin is appended to MESSAGE, or is the question. Without both: a
    conversation, whose /help lists its commands.

    In a loop that reads stdin itself, add < /dev/null.
    """
    with Client.find(where) as client:
        options: dict[str, Any] = {"model": model or client.default_model()}
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        if message is None and sys.stdin is not None and sys.stdin.isatty():
            from cli.conversation import Conversation  # noqa: PLC0415 - its line editing is for terminals alone

            return Conversation(client, options, system or "").run()
        turns: Turns = [{"role": "system", "content": system}] if system else []
        ask(client, options, [*turns, {"role": "user", "content": _question(message)}])
    return DONE


def ask(client: Client, options: dict[str, Any], turns: Turns) -> str:
    """Stream one answer to stdout, with control characters escaped. Returns the original text.

    The job is cancelled when its reader leaves: with Ctrl-C, or by closing the terminal or the pipe.
    """
    body = {**options, "messages": turns, "queue": {"priority": "interactive"}}
    printer = AnswerPrinter()
    with ended_by_signals(), ProgressLine(sys.stderr, os.environ, quiet=not sys.stderr.isatty()) as progress:
        progress.phase("waiting for the first token")
        client.on_retry(printer.waiting(progress.say))
        key, job_id = uuid.uuid4().hex, ""
        try:
            job_id = client.submit(body, key)["id"]
            print_answer(client, job_id, printer, lambda event: progress.end() if event.text else None)
        except (KeyboardInterrupt, BrokenPipeError):
            progress.end()
            with suppress(Problem):
                # If the reader left before the answer to the submit, the job may be queued: the same key finds it.
                job_id = job_id or client.post("/v1/jobs", body, **{"Idempotency-Key": key})["id"]
                client.post(f"/v1/jobs/{job_id}/cancel", {})
            raise
    return printer.text


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise Leaving at the signals that end a process within the block, unless they are ignored (nohup)."""

    def leave(*_: object) -> None:
        raise Leaving

    before = {each: signal.getsignal(each) for each in ENDING}
    for each, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(each, leave)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _question(message: str | None) -> str:
    """The message, and behind it what stdin brings. Raises Problem."""
    said = "" if message in (None, "-") else message or ""
    piped = "" if sys.stdin is None or (sys.stdin.isatty() and message != "-") else _stdin()
    question = "\n\n".join(part for part in (said, piped) if part.strip())
    if not question:
        raise Problem("there is nothing to ask", next_step='penstock chat "a question"', exit_code=USAGE, code="usage")
    return question


def _stdin() -> str:
    with ProgressLine(sys.stderr, os.environ, quiet=not sys.stderr.isatty()) as progress:
        if not sys.stdin.isatty():
            progress.phase("reading stdin to its end")
        try:
            return sys.stdin.read()
        except UnicodeDecodeError as error:
            raise Problem(
                "stdin is no UTF-8 text", cause=str(error), next_step="convert it first", exit_code=USAGE, code="usage"
            ) from None
