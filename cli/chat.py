"""`penstock chat`: one question, or a conversation; only the answer goes to stdout."""

from __future__ import annotations

import os
import sys
from typing import Any, TypeAlias

import click

from cli.client import Client, chunk_text
from cli.errors import DONE, USAGE, Problem
from cli.options import Command, Where, where_options
from cli.output import emit, note
from cli.progress import ProgressLine

PROMPT = ">>> "

Turns: TypeAlias = list[dict[str, str]]


@click.command(cls=Command)
@click.argument("message", required=False)
@click.option("--model", help="Model to ask [the instance's default].")
@click.option("--system", help="System prompt.")
@click.option("--max-tokens", type=click.IntRange(1), help="Maximum tokens of an answer.")
@where_options(url=True)
def chat(message: str | None, model: str | None, system: str | None, max_tokens: int | None, where: Where) -> int:
    """Ask the model. Without MESSAGE: a conversation, or the prompt from stdin if that is a pipe."""
    client = Client.find(where)
    options: dict[str, Any] = {"model": model or client.default_model()}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    turns: Turns = [{"role": "system", "content": system}] if system else []
    if message is None and sys.stdin.isatty():
        return _converse(client, options, turns)
    question = sys.stdin.read() if message in (None, "-") else message
    if not question or not question.strip():
        raise Problem("there is nothing to ask", next_step='penstock chat "a question"', exit_code=USAGE, code="usage")
    _ask(client, options, [*turns, {"role": "user", "content": question}])
    return DONE


def _converse(client: Client, options: dict[str, Any], turns: Turns) -> int:
    """Read and answer turns until Ctrl-D. Ctrl-C stops the current answer."""
    import readline  # noqa: F401, PLC0415 - its import gives `input` line editing

    note(f"{options['model']} at {client.url}   Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        try:
            question = input(PROMPT)
        except EOFError:
            note("")
            return DONE
        if not question.strip():
            continue
        turns.append({"role": "user", "content": question})
        try:
            turns.append({"role": "assistant", "content": _ask(client, options, turns)})
        except KeyboardInterrupt:
            note("\n(stopped)")
            turns.pop()


def _ask(client: Client, options: dict[str, Any], turns: Turns) -> str:
    """Stream one answer to stdout, with control characters escaped. Returns the original text."""
    body = {**options, "messages": turns, "stream": True}
    answer: list[str] = []
    progress = ProgressLine(sys.stderr, os.environ, quiet=not sys.stderr.isatty())
    with progress:
        progress.phase("waiting for the first token")
        with client.events("POST", "/v1/chat/completions", body=body) as events:
            for event in events:
                if event.data == "[DONE]":
                    break
                text = chunk_text(event.data)
                if text:
                    progress.end()
                    answer.append(text)
                    emit(text)
                    sys.stdout.flush()
            else:
                raise Problem("the answer was cut off", cause="the connection ended before the last token")
    sys.stdout.write("\n")
    return "".join(answer)
