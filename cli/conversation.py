"""Conversation of `penstock chat` in a terminal: answers lines, and obeys its commands, which /help lists."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from cli.chat_answer import Leaving, Turns, ask
from cli.client import Client
from cli.errors import DONE, Problem
from cli.output import complain, note
from cli.suggestions import completed
from penstock.files import write_file

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
        import readline  # noqa: F401, PLC0415 - its import gives `input` line editing

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

    def run(self) -> int:
        """Read and answer lines until Ctrl-D or /quit. What fails is told, and the conversation goes on."""
        note(f"{self._options['model']} at {self._client.url}   /help lists commands, /quit ends")
        while True:
            try:
                line = input(PROMPT)
            except EOFError:
                note("")
                return DONE
            except KeyboardInterrupt:
                note("\n(Ctrl-D or /quit ends)")
                continue
            if line.rstrip() in ENDINGS:
                return DONE
            try:
                self._obey(line)
            except Leaving:
                raise
            except KeyboardInterrupt:
                note("\n(stopped)")
            except Problem as problem:
                problem.next_step = completed(problem.next_step)
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
        answer = ask(self._client, self._options, self._with_system(asked))
        self._turns = [*asked, {"role": "assistant", "content": answer}]

    def _with_system(self, turns: Turns) -> Turns:
        return [{"role": "system", "content": self._system}, *turns] if self._system else turns

    def _retry(self, _: str) -> None:
        if not self._question:
            note("nothing has been asked yet")
            return
        answered = len(self._turns) > 1 and self._turns[-2]["content"] == self._question
        before = self._turns[-1] if answered else None
        self._answer(self._question, self._turns[:-2] if answered else self._turns)
        if self._turns[-1] == before:
            note("(the same answer: the model gives it each time; change the question, /system or /model)")

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
        turns = self._with_system(self._turns)
        as_json = json.dumps(turns, ensure_ascii=False, indent=1)
        as_text = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
        try:
            write_file(path, ((as_json if path.suffix == ".json" else as_text) + "\n").encode())
        except OSError as error:
            raise Problem(f"cannot write {path}", cause=os.strerror(error.errno or 0)) from None
        self._saved.add(path)
        note(f"saved {len(self._turns)} turns to {path}")
