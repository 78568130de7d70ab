"""`penstock chat` against real processes: a conversation in a terminal, and API processes that die in mid-answer."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from batching import said
from house import House, eventually
from terminals import OnTerminal

from penstock.engine import ChatTurn
from workers.engines.sim.answers import prompt_text, token_text

pytestmark = pytest.mark.slow

CHAT = [sys.executable, "-m", "cli", "chat"]
CUT = "(cut at --max-tokens)\n"
ENDLESS = "8000"
"""Tokens of an answer that no test waits for: 16 s of the simulated engine."""
CONTROLLED = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
"""Runs a command under the control of its terminal, whose Ctrl-C is then an interrupt."""


def answer(*turns: tuple[str, str], tokens: int) -> str:
    """What the simulated engine says to these turns."""
    prompt = prompt_text(tuple(ChatTurn(role, text) for role, text in turns))
    return "".join(token_text(prompt, index) for index in range(tokens))


class Typed(OnTerminal):
    """A conversation typed at a terminal of 80 columns, whose words are waited for one after the other."""

    _from = 0

    @property
    def _rest(self) -> str:
        """What is shown behind the words that were waited for last."""
        return self.seen.replace("\r\n", "\n")[self._from :]

    def shows(self, words: str) -> str:
        """Wait until the terminal shows these words behind those before. Returns what came till then."""
        self.until(lambda _: words in self._rest, 30)
        came, found, _ = self._rest.partition(words)
        assert found, f"it ended before {words!r}: {came!r}"
        self._from += len(came) + len(words)
        return came

    def say(self, line: str, prompt: str = ">>> ") -> str:
        """Type a line and return what is shown up to the next prompt."""
        self.type(f"{line}\r")
        self.shows(f"{line}\n")
        return self.shows(prompt)


@contextmanager
def typing(house: House, *words: str) -> Iterator[Typed]:
    environ = {**house.environ, "PENSTOCK_URL": house.url, "TERM": "dumb"}
    with Typed(["-c", CONTROLLED, *CHAT, *words], house.folder, environ=environ) as typed:
        typed.shows(">>> ")
        yield typed


@contextmanager
def piped(house: House, message: str, tokens: str, notes: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A question whose answer goes into a pipe, and what is said beside it into a file."""
    environ, pipe = {**os.environ, **house.environ, "PENSTOCK_URL": house.url}, subprocess.PIPE
    command = [*CHAT, message, "--max-tokens", tokens]
    with notes.open("wb") as stderr, subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=stderr, env=environ
    ) as process:  # fmt: skip
        yield process


def test_the_commands_of_a_conversation(house: House) -> None:
    with typing(house, "--max-tokens", "5", "--system", "be brief") as typed:
        assert "/save FILE" in typed.say("/help")
        assert "nothing has been asked yet" in typed.say("/retry")
        briefly = answer(("system", "be brief"), ("user", "hello"), tokens=5)
        assert briefly in typed.say("hello")
        again = typed.say("/retry")
        assert briefly in again
        assert "no model x is served here: sim" in typed.say("/model x")
        assert "* sim" in typed.say("/model") and "* sim" in typed.say("/model sim")
        assert "system prompt: (none)" in typed.say("/system -")
        plainly = answer(("user", "hello"), tokens=5)
        again = typed.say("/retry")
        assert plainly in again
        third = answer(("user", "hello"), ("assistant", plainly), ("user", " /why"), tokens=5)
        assert third in typed.say(" /why")
        assert "there is no command /why" in typed.say("/why")
        assert "system prompt: (none)" in typed.say("/system")
        assert "system prompt: be long" in typed.say("/system be long")
        assert "saved 4 turns" in typed.say("/save talk.json") and "saved 4 turns" in typed.say("/save talk.txt")
        assert "saved 4 turns" in typed.say("/save talk.json") and "say where" in typed.say("/save")
        (house.folder / "mine").write_text("keep")
        assert "mine exists already" in typed.say("/save mine") and (house.folder / "mine").read_text() == "keep"
        assert "error: cannot write" in typed.say("/save none/such")
        typed.type("\x03")
        typed.shows("(Ctrl-D or /quit ends)\n>>> ")
        typed.type("\x04")
        assert typed.end() == 0
    turns = [("system", "be long"), ("user", "hello"), ("assistant", plainly), ("user", " /why"), ("assistant", third)]
    saved = json.loads((house.folder / "talk.json").read_text())
    assert saved == [{"role": role, "content": text} for role, text in turns]
    assert (house.folder / "talk.txt").read_text() == "\n\n".join(f"{role}: {text}" for role, text in turns) + "\n"


def stopped(typed: Typed, beginning: str) -> None:
    """Ctrl-C once the answer has begun so."""
    typed.shows(beginning)
    typed.type("\x03")
    typed.shows("(stopped)\n>>> ")


def ended_by(typed: Typed, word: str) -> None:
    typed.type(f"{word}\r")
    assert typed.end() == 0


def test_a_stopped_answer_is_cancelled_and_asked_again(house: House) -> None:
    with typing(house, "--max-tokens", ENDLESS) as typed:
        typed.type("a long one\r")
        stopped(typed, answer(("user", "a long one"), tokens=3))
        status, body = house.get("/v1/jobs?limit=1")
        assert status == 200 and json.loads(body)["data"][0]["status"] == "cancelled"
        typed.type("/retry\r")
        stopped(typed, answer(("user", "a long one"), tokens=3))
        ended_by(typed, "/exit")


def unwrapped(shown: str) -> str:
    """An answer of the simulated engine, whose lines a terminal's width has ended."""
    return " ".join(shown.split())


@pytest.mark.parametrize(("number", "answers"), [(signal.SIGTERM, False), (signal.SIGHUP, True)])
def test_a_conversation_ends_when_it_is_told_to(house: House, number: signal.Signals, answers: bool) -> None:
    """At its prompt, or in an answer, whose job ends too."""
    with typing(house, "--max-tokens", ENDLESS) as typed:
        if answers:
            typed.type("a long one\r")
            typed.shows(answer(("user", "a long one"), tokens=3))
        typed.process.send_signal(number)
        assert typed.end() == (130 if answers else -number)
    assert not answers or json.loads(house.get("/v1/jobs?limit=1")[1])["data"][0]["status"] == "cancelled"


def test_a_closed_terminal_ends_the_answer_and_its_job(house: House) -> None:
    """The rest of what was said cannot be written any more."""
    with typing(house, "--max-tokens", ENDLESS) as typed:
        typed.type("a long one\r")
        typed.shows(answer(("user", "a long one"), tokens=3))
        typed.hang_up()
        assert typed.process.wait(30) == 1
    assert json.loads(house.get("/v1/jobs?limit=1")[1])["data"][0]["status"] == "cancelled"


def test_an_answer_outlives_the_api_process(empty_house: House, tmp_path: Path) -> None:
    """kill -9 in mid-answer, and a new process at the same address: one line on stderr, and not a token twice."""
    house = empty_house
    house.environ["PENSTOCK_SIM_STEP_MS"] = "5"
    house.start("workers")
    doors = [house.start_api()]
    house.wait_ready()

    def restart() -> None:
        for door in doors:
            door.kill()
            door.wait()
        doors[:] = [house.start_api()]

    with typing(house, "--max-tokens", "300") as typed:
        typed.type("in a terminal\r")
        start = answer(("user", "in a terminal"), tokens=5)
        typed.shows(start)
        restart()
        rest = typed.shows("(cut at --max-tokens)\n>>> ")
        (line,) = re.findall(r"\n\(.*\)\n", rest)
        assert line == f"\n(the connection to {house.url} broke; trying again)\n"
        assert unwrapped(start + rest.replace(line, "", 1)) == said("in a terminal", 300)
    with piped(house, "in a pipe", "300", tmp_path / "stderr") as process:
        first = process.stdout.read(20)
        restart()
        text = (first + process.stdout.read()).decode()
        assert process.wait(30) == 0 and text == said("in a pipe", 300) + "\n"
        assert (tmp_path / "stderr").read_text() == f"(the connection to {house.url} broke; trying again)\n" + CUT


def test_the_loss_of_a_worker_is_said_beside_the_answer(empty_house: House, tmp_path: Path) -> None:
    """kill -9 in mid-answer, and another worker later: stderr says both, and the answer is whole."""
    house = empty_house
    house.environ["PENSTOCK_SIM_STEP_MS"] = "5"
    victim = house.start("workers", "--id", "worker-1")
    house.start("scheduler")
    house.start_api()
    house.wait_ready()
    with piped(house, "hello", "600", tmp_path / "stderr") as process:
        first = process.stdout.read(20)
        victim.kill()
        eventually(lambda: "worker-1 was lost" in (tmp_path / "stderr").read_text())
        house.start("workers", "--id", "worker-2")
        text = (first + process.stdout.read()).decode()
        assert process.wait(60) == 0 and text == said("hello", 600) + "\n"
    waits, goes_on, cut = (tmp_path / "stderr").read_text().splitlines()
    assert "waiting" in waits and re.search(r"continued by worker-2 after [\d.]+ m?s", goes_on) and f"{cut}\n" == CUT
