"""`penstock chat`: one question, or a conversation; only the answer goes to stdout."""

from __future__ import annotations

import json
import signal
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import click

from cli.client import Client
from cli.jobs import AnswerPrinter, interruption, stdin_text
from cli.options import command
from cli.output import Leaving, Problem, ProgressLine, complain, ended_by_signals, explaining, note
from penstock.client import StreamEvent
from penstock.files import write_file

Turns: TypeAlias = list[dict[str, str]]


def ask(client: Client, options: dict[str, Any], turns: Turns) -> str:
    """Stream one answer to stdout, with control characters escaped. Returns the original text.

    The job is cancelled when its reader leaves: with Ctrl-C, or by closing the terminal or the pipe.
    """
    body = {**options, "messages": turns, "queue": {"priority": "interactive"}}
    with ended_by_signals(), ProgressLine(quiet=not sys.stderr.isatty()) as progress:
        progress.phase("waiting for the first token")
        progress.explain(lambda: client.worker_problem(options["model"]))
        printer = _ChatPrinter(progress)
        client.on_retry(printer.waiting)
        key, job_id = uuid.uuid4().hex, ""
        try:
            job_id = client.submit(body, key)["id"]
            printer.print(client, job_id)
        except (KeyboardInterrupt, OSError):  # what was left to print has nowhere to go once the terminal is closed
            progress.end()
            with suppress(Problem):
                # If the reader left before the answer to the submit, the job may be queued: the same key finds it.
                job_id = job_id or client.post("/v1/jobs", body, **{"Idempotency-Key": key})["id"]
                client.post(f"/v1/jobs/{job_id}/cancel", {})
            raise
    return printer.text


class _ChatPrinter(AnswerPrinter):
    """Prints an answer, and beside it that its worker is lost and who goes on."""

    def __init__(self, progress: ProgressLine) -> None:
        super().__init__(progress.say)
        self._progress = progress

    def take(self, event: StreamEvent) -> None:
        if event.text:
            self._progress.end()
        if words := interruption(event):
            self.aside(f"({words})")
        super().take(event)


PROMPT = ">>> "
ENDINGS = ("/quit", "/exit", "/bye")

HELP = """\
  /model [NAME]   show the models, or ask NAME from now on
  /system [TEXT]  show the system prompt, or set it; /system - removes it
  /retry          answer the last question again
  /save FILE      write the conversation to FILE; as JSON if it ends in .json
  /help           this list
  /quit           end; so do /exit, /bye and Ctrl-D
  Ctrl-C stops an answer. A space before a / makes it a question."""


class TerminalChat:
    """One conversation: its model, its system prompt, and the turns so far."""

    def __init__(self, client: Client, options: dict[str, Any], system: str) -> None:
        self._client, self._options, self._system = client, options, system
        self._turns: Turns = []
        self._question = ""
        """The last question, answered or not."""
        self._saved: set[Path] = set()
        self._commands = {
            "/help": lambda _: note(HELP),
            "/model": self._model,
            "/system": self._set_system,
            "/retry": self._retry,
            "/save": self._save,
        }

    def run(self) -> None:
        """Read and answer lines until Ctrl-D or /quit. What fails is told, and the conversation goes on."""
        import readline  # noqa: F401, PLC0415 - its import gives `input` line editing

        note(f"{self._options['model']} at {self._client.url}   /help lists commands, /quit ends")
        while True:
            try:
                line = _typed_line()
            except EOFError:
                note("")
                return
            except KeyboardInterrupt:
                note("\n(Ctrl-D or /quit ends)")
                continue
            if line.rstrip() in ENDINGS:
                return
            try:
                self._obey(line)
            except Leaving:
                raise
            except KeyboardInterrupt:
                note("\n(stopped)")
            except Problem as problem:
                complain(problem, as_json=False)

    def _obey(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if not line.strip():
            return
        if not line.startswith("/"):
            self._answer(line, self._turns)
        elif word in self._commands:
            self._commands[word](rest.strip())
        else:
            note(f"there is no command {word}; /help lists them")

    def _answer(self, question: str, before: Turns) -> None:
        """Ask behind the turns `before`. What was said stays as it is until the answer is there."""
        self._question = question
        asked: Turns = [*before, {"role": "user", "content": question}]
        answer = ask(self._client, self._options, self.with_system(asked))
        self._turns = [*asked, {"role": "assistant", "content": answer}]

    def with_system(self, turns: Turns) -> Turns:
        """The turns behind the system prompt."""
        return [{"role": "system", "content": self._system}, *turns] if self._system else turns

    def _retry(self, _: str) -> None:
        if not self._question:
            note("nothing has been asked yet")
            return
        answered = len(self._turns) > 1 and self._turns[-2]["content"] == self._question
        self._answer(self._question, self._turns[:-2] if answered else self._turns)

    def _model(self, name: str) -> None:
        served = [str(model["id"]) for model in self._client.get("/v1/models")["data"]]
        if name and name not in served:
            note(f"no model {name} is served here: {', '.join(served)}")
            return
        self._options["model"] = name or self._options["model"]
        note("\n".join(("* " if each == self._options["model"] else "  ") + each for each in served))

    def _set_system(self, text: str) -> None:
        if text:
            self._system = "" if text == "-" else text
        note(f"system prompt: {self._system or '(none)'}")

    def _save(self, name: str) -> None:
        path = Path(name).expanduser().absolute()
        if not name or (path.exists() and path not in self._saved):
            note(f"{name} exists already; choose another name" if name else "say where: /save FILE")
            return
        turns = self.with_system(self._turns)
        text = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
        text = json.dumps(turns, ensure_ascii=False, indent=1) if path.suffix == ".json" else text
        with explaining(f"cannot write {path}"):
            write_file(path, f"{text}\n".encode())
        self._saved.add(path)
        note(f"saved {len(self._turns)} turns to {path}")


def _typed_line() -> str:
    """A line typed at the prompt.

    `input` with readline loses a signal that comes between its prompt and its wait for a key: it looks for signals only
    when that wait is interrupted. A timer interrupts it, so Ctrl-C and SIGTERM act after a quarter of a second at most.
    """
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.25, 0.25)
    try:
        return input(PROMPT)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@command("chat")
@click.argument("message", required=False)
@click.option("--model", help="Model to ask [the instance's default].")
@click.option("--system", help="System prompt.")
@click.option("--max-tokens", type=click.IntRange(1), help="Maximum tokens of an answer.")
def chat(client: Client, message: str | None, model: str | None, system: str | None, max_tokens: int | None) -> None:
    """Ask the model. Text on stdin is appended to MESSAGE, or is the question. Without both: a
    conversation, whose /help lists its commands.

    In a loop that reads stdin itself, add < /dev/null.

    \b
    Examples:
      penstock chat "What is a penstock?"
      penstock chat "Summarize:" < report.txt
      penstock chat
      penstock chat "Name a river." --system "Answer in one word."
    """
    options: dict[str, Any] = {"model": model or client.default_model()}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    conversation = TerminalChat(client, options, system or "")
    if message is None and sys.stdin is not None and sys.stdin.isatty():
        conversation.run()
    else:
        ask(client, options, conversation.with_system([{"role": "user", "content": _question(message)}]))


def _question(message: str | None) -> str:
    """The message, and behind it what stdin brings. Raises Problem."""
    said = "" if message in (None, "-") else message or ""
    piped = ""
    if sys.stdin is not None and (message == "-" or not sys.stdin.isatty()):
        with ProgressLine(quiet=not sys.stderr.isatty()) as progress:
            progress.phase("" if sys.stdin.isatty() else "reading stdin to its end")
            piped = stdin_text()
    question = "\n\n".join(part for part in (said, piped) if part.strip())
    if not question:
        raise Problem("there is nothing to ask", next_step='penstock chat "a question"', code="usage")
    return question
