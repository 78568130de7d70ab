"""How commands speak: streams, colour, JSON and the error block."""

from __future__ import annotations

import http.server
import io
import json
import os
import re
import subprocess
import sys
import threading
import unicodedata
from types import FrameType
from typing import Any

import pytest
from house import eventually
from http_serving import QuietHandler, serving_http
from terminals import Terminal

from cli import output
from cli.__main__ import main

pytestmark = pytest.mark.slow

ESC = "\x1b"


@pytest.mark.parametrize(
    ("environ", "terminal", "pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, False, False),
    ],
)
def test_colour_rules(environ: dict[str, str], terminal: bool, pipe: bool) -> None:
    """TERM=dumb outranks NO_COLOR, which outranks FORCE_COLOR, which outranks looking at the stream."""
    assert output.styled(Terminal(), environ) is terminal
    assert output.styled(io.StringIO(), environ) is pipe


def test_errors_and_notes_wrap_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal; a command to paste stays in one piece, and a pipe gets one line."""
    monkeypatch.setattr("cli.output.terminal_width", lambda _stream: 40)
    monkeypatch.setenv("NO_COLOR", "1")
    command = "penstock jobs events --url http://127.0.0.1:8000 job_0074d316"
    step = f"{command}, or wait, or look at the logs of all processes"
    message = "20000 at most, so an API process takes 19232 connections, not as many as api.max_connections allows"
    for stream in (terminal := Terminal(), pipe := io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        output.complain(output.Problem(message, next_step=step), as_json=False)
        output.note(message)
    assert pipe.getvalue() == f"error: {message}\nnext:  {step}\n{message}\n"
    lines = terminal.getvalue().rstrip("\n").split("\n")
    assert all(len(line) <= 40 or line.strip() == f"{command}," for line in lines) and f"{command}," in "\n".join(lines)
    assert " ".join(" ".join(lines).split()) == f"error: {message} next: {step} {message}"


def test_red_only_where_wanted(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """--color always styles the label in a pipe, --color never takes it back."""
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")  # so that both variables are restored whatever the command sets
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert ESC in told("help nothing --color always", code=2).err
    assert ESC not in told("help nothing --color never", code=2).err


def test_progress_says_why_nothing_happens() -> None:
    """Behind the phase, as long as there is a reason."""
    reasons, stream = ["no worker is ready: starting"], Terminal()
    with output.ProgressLine(stream, {"TERM": "xterm"}) as progress:
        progress.explain(lambda: reasons[0])
        progress.phase("waiting")
        eventually(lambda: "  waiting (no worker is ready: starting)  " in stream.getvalue())
        reasons[0] = ""
        stream.seek(0)
        stream.truncate()
        eventually(lambda: re.search(r"  waiting  [0-9.]+ s", stream.getvalue()))


@pytest.mark.parametrize("columns", [20, 80, 120])
def test_progress_never_wraps(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal of any width the line fits. The bar goes first."""
    monkeypatch.setattr("cli.output.terminal_width", lambda _stream: columns)
    with output.ProgressLine(stream := Terminal(), {"TERM": "xterm"}) as progress:
        progress.amount(f"batch_{'0' * 32}", 12_345, 50_000, "123.4/s  ETA 5 min 10 s  17 failed")
        progress._show(changed=False)
        drawn = [line for line in stream.getvalue().split("\r") if line.strip()]
    assert max(map(len, drawn)) < columns and "\n" not in stream.getvalue()
    assert drawn[-1].startswith("  batch_00000000") and ("[#####" in drawn[-1]) is (columns == 120)


def test_progress_ends_wherever_a_signal_interrupts_its_end() -> None:
    """An interrupt at any point leaves no lock held: the command, which ends the line once more, goes on."""
    points, before = 0, sys.gettrace()
    is_interrupted = True
    while is_interrupted:
        points += 1
        left = points

        def interrupt(_frame: FrameType, event: str, _arg: object) -> Any:
            nonlocal left
            left -= event != "line"  # Python looks for signals at calls and returns
            if not left:
                raise output.Leaving
            return interrupt

        progress = output.ProgressLine(Terminal(), {"TERM": "xterm"}).__enter__()  # its `__exit__` might never return
        progress.phase("waiting")
        sys.settrace(interrupt)
        try:
            progress.end()
            is_interrupted = False
        except output.Leaving:
            is_interrupted = True
        finally:
            sys.settrace(before)
        again = threading.Thread(target=progress.end, daemon=True)
        again.start()
        again.join(30)
        assert not again.is_alive(), f"the second end waits for ever behind an interrupt at point {points}"
    assert points > 3


def test_broken_pipe_is_silent() -> None:
    """A reader that has seen enough is no error."""
    command = [sys.executable, "-m", "cli", "help", "environment"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_ascii_terminal_speaks_utf8() -> None:
    """Under LANG=C without UTF-8 mode arguments and output are still text of any script."""
    environ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", "cli", "help", "caf\u00e9".encode()]
    done = subprocess.run(command, capture_output=True, env=environ, check=False)
    assert done.returncode == 2
    assert "no help on 'caf\u00e9'".encode() in done.stderr


# --- text of others --------------------------------------------------------------------------------------------------

HOSTILE = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\x08\x7f\r\u202egnp\u2066\u200e\u2028\U000e0041\ud800"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u2028-\u202e\u2066-\u2069\U000e0041\ud800-\udfff]")
JOINERS = "\u200c\u200d"


def test_what_a_terminal_would_obey_is_shown() -> None:
    """Every control code but tab and newline, C1 and bidi overrides among them; other text, in any script, stays."""
    shown = (
        r"\u001b]52;c;ZXZpbA==\u0007\u001b[2J\u009b31m\u0008\u007f\u000d\u202egnp\u2066\u200e\u2028\udb40\udc41\ud800"
    )
    assert output.visible(HOSTILE) == shown
    plain = "Tab\tand\nline, הַבַּיִת, 日本語, 👩‍👩‍👧, می‌خواهم, क्‍ष"
    assert output.visible(plain) == plain


def test_no_character_that_is_not_seen_gets_through() -> None:
    """Of all there are: format characters, bidi overrides, separators of lines and controls are shown, the joiners, tab
    and newline are not touched, and neither is any that people write with."""
    for code in range(sys.maxunicode + 1):
        kind = unicodedata.category(char := chr(code))
        if char in JOINERS + "\t\n":
            assert output.visible(char) == char
        elif kind in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            assert json.loads(f'"{output.visible(char)}"') == char != output.visible(char), hex(code)
        elif kind != "Cn":  # not given to any character yet
            assert output.visible(char) == char, hex(code)


def test_no_way_to_a_terminal_leaves_them_in(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables with and without styles, notes, errors, progress and JSON, which stays the same JSON, an object a line."""
    row = {"id": HOSTILE[:-1], "model": "m\nn"}
    output.print_rows([row], ("id", "model"))
    output.print_table(("FIELD", HOSTILE[:-1]), [("id", HOSTILE)])
    output.emit(HOSTILE)
    output.note(HOSTILE)
    output.complain(output.Problem(HOSTILE, cause=HOSTILE, next_step=HOSTILE), as_json=False)
    progress = output.ProgressLine(sys.stderr, {})
    progress.phase(HOSTILE)
    progress.say(HOSTILE)
    progress.end()
    with output.ProgressLine(screen := Terminal(), {"TERM": "xterm"}) as progress:  # names of batches and of lanes
        progress.amount("computing", 1, 2, f"{ESC}]52;c;aGk=\x07")
        progress._show(changed=False)
    assert r"\u001b]52;c;aGk=\u0007" in screen.getvalue() and f"{ESC}]52" not in screen.getvalue()
    shown = capfd.readouterr()
    assert not OBEYED.search(shown.out + shown.err)
    output.list_result([row, row], ("id",), "none").print(as_json=True)
    output.complain(output.Problem(HOSTILE), as_json=True)
    shown = capfd.readouterr()
    assert not OBEYED.search(shown.out + shown.err)
    assert [json.loads(line) for line in shown.out.split("\n")[:-1]] == [row, row]
    assert json.loads(shown.err)["error"]["message"] == HOSTILE
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output.print_table(("NAME",), [("\x1b]0;owned\x07",)])
    assert "\x1b]" not in capfd.readouterr().out, "the styles are ours, and the cell's are not"


WRITABLE = HOSTILE.replace("\ud800", "")
"""What of it can be UTF-8."""


class Hostile(QuietHandler):
    """A server that answers everything with control codes."""

    def do_GET(self) -> None:  # noqa: N802
        if self.path.endswith("/output"):
            self.send(200, WRITABLE, "application/jsonl")
            return
        if self.path.endswith("/events"):
            delta = {"index": 0, "text": HOSTILE, "tokens": 1}
            events = f"event: delta\ndata: {json.dumps(delta)}\n\nevent: completed\ndata: {{}}\n\n"
            self.send(200, events, "text/event-stream")
            return
        self.send(404, {"error": {"message": HOSTILE, "code": HOSTILE, "param": None, "type": "x"}})

    def do_POST(self) -> None:  # noqa: N802
        self.read_json()
        self.send(202, {"id": "job_x", "status": "queued"})


class Screen(io.TextIOWrapper):
    """Standard output that says whether it is a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__(io.BytesIO(), "utf-8", write_through=True)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def test_the_answers_of_a_batch_cannot_drive_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`penstock batch output` writes bytes as they are into a file or a pipe, and shows them on a terminal."""
    with serving_http(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile)) as server:
        written = {}
        for terminal in (True, False):
            screen = Screen(terminal=terminal)
            monkeypatch.setattr(sys, "stdout", screen)
            assert main(["batch", "output", "batch_x", "--url", f"http://127.0.0.1:{server.server_port}"]) == 0
            written[terminal] = screen.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert written == {True: output.visible(WRITABLE), False: WRITABLE}


def test_a_model_cannot_drive_the_terminal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`penstock chat` shows what the model said; `penstock jobs show` what the server complains of."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with serving_http(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile)) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["chat", "hello", "--model", "m", "--url", url]) == 0
        answered = capfd.readouterr()
        assert answered.out == output.visible(HOSTILE) + "\n"
        assert main(["jobs", "show", "job_x", "--url", url]) != 0
        complained = capfd.readouterr()
    assert r"\u001b]52" in complained.err
    assert not OBEYED.search(answered.err + complained.out + complained.err)


def test_an_error_that_cannot_be_written_keeps_its_exit_code() -> None:
    """The reader of stderr has exited."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        done = subprocess.run([sys.executable, "-m", "cli", "help", "nothing"], stderr=stream, check=False)
    assert done.returncode == 2
