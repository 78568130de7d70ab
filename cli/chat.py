"""`penstock chat`: one question, or a conversation; only the answer goes to stdout."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from cli.chat_answer import Turns, ask
from cli.client import Client
from cli.conversation import TerminalChat
from cli.errors import DONE, USAGE, Problem
from cli.options import Command, Where, where_options
from cli.progress import ProgressLine
from penstock.text import fault_of


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
            return TerminalChat(client, options, system or "").run()
        turns: Turns = [{"role": "system", "content": system}] if system else []
        ask(client, options, [*turns, {"role": "user", "content": _question(message)}])
    return DONE


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
        return stdin_text()


def stdin_text() -> str:
    """All of stdin. Raises Problem if it is not UTF-8 text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        cause = f"it is {fault_of(error.object)}"
        raise Problem(
            "stdin is no UTF-8 text", cause=cause, next_step="convert it first", exit_code=USAGE, code="usage"
        ) from None
