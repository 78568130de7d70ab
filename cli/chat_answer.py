"""Answer to a chat: streams it to stdout, and cancels its job if the reader leaves."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from cli.client import Client
from cli.errors import Problem
from cli.job import AnswerPrinter, interruption, print_answer
from cli.progress import ProgressLine
from penstock.client import StreamEvent

Turns: TypeAlias = list[dict[str, str]]

ENDING = (signal.SIGTERM, signal.SIGHUP)


class Leaving(KeyboardInterrupt):
    """Raised by signals that end the chat, so that its job ends too."""


def ask(client: Client, options: dict[str, Any], turns: Turns) -> str:
    """Stream one answer to stdout, with control characters escaped. Returns the original text.

    The job is cancelled when its reader leaves: with Ctrl-C, or by closing the terminal or the pipe.
    """
    body = {**options, "messages": turns, "queue": {"priority": "interactive"}}
    printer = AnswerPrinter()
    with ended_by_signals(), ProgressLine(sys.stderr, os.environ, quiet=not sys.stderr.isatty()) as progress:
        progress.phase("waiting for the first token")
        progress.explain(lambda: client.worker_problem(options["model"]))
        client.on_retry(printer.waiting(progress.say))
        key, job_id = uuid.uuid4().hex, ""

        def seen(event: StreamEvent) -> None:
            if event.text:
                progress.end()
            if words := interruption(event):
                printer.aside(f"({words})", progress.say)

        try:
            job_id = client.submit(body, key)["id"]
            print_answer(client, job_id, printer, seen)
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
