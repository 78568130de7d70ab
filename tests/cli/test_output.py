"""How commands speak: streams, colour, JSON and the error block."""

from __future__ import annotations

import http.server
import io
import json
import os
import re
import subprocess
import sys
import termios
import unicodedata

import pytest
from house import eventually
from http_serving import QuietHandler, serving_http
from terminals import Terminal

from cli.__main__ import main
from cli.output import (
    Problem,
    ProgressLine,
    VisibleBytes,
    complain,
    emit,
    list_result,
    note,
    print_json,
    print_rows,
    print_table,
    styled,
    visible,
)

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
    assert styled(Terminal(), environ) is terminal
    assert styled(io.StringIO(), environ) is pipe


def test_json_list_is_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the values hold, each object stays on its line."""
    list_result([{"a": "x\ny"}, {"a": None}], ("a",), "none").print(as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]] == [{"a": "x\ny"}, {"a": None}]


@pytest.mark.parametrize("columns", [40, 120])
def test_errors_and_notes_wrap_between_words(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, below the first word; a command to paste stays in one piece, a pipe gets one line."""
    monkeypatch.setattr("cli.output.terminal_width", lambda _stream: columns)
    monkeypatch.setenv("NO_COLOR", "1")
    step = (
        "penstock jobs events --url http://127.0.0.1:8000 job_0074d316, or wait, or look at the logs of all processes"
    )
    message = "20000 at most, so an API process takes 19232 connections, not as many as api.max_connections allows"
    for stream in (terminal := Terminal(), pipe := io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        complain(Problem(message, next_step=step), as_json=False)
        note(message)
    assert pipe.getvalue() == f"error: {message}\nnext:  {step}\n{message}\n"
    lines = terminal.getvalue().rstrip("\n").split("\n")
    command = step.partition(",")[0]
    assert all(len(line) <= columns or line.strip() == command + "," for line in lines)
    assert " ".join(" ".join(lines).split()) == f"error: {message} next: {step} {message}"
    assert any(command in line for line in lines)
    block = lines[: next(place for place, line in enumerate(lines) if line.startswith("20000"))]
    assert all(line.startswith(("error: ", "next:", " " * 7)) for line in block)


def test_error_as_json_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json stdout stays empty on failure."""
    complain(Problem("it broke", cause="c", next_step="n", code="x", request_id="r"), as_json=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err) == {
        "error": {"code": "x", "message": "it broke", "cause": "c", "next": "n", "request_id": "r"}
    }


def test_red_only_where_wanted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--color always styles the label in a pipe, --color never takes it back."""
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")  # so that both variables are restored whatever the command sets
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["help", "nothing", "--color", "always"]) == 2
    assert ESC in capsys.readouterr().err
    assert main(["help", "nothing", "--color", "never"]) == 2
    assert ESC not in capsys.readouterr().err


def test_progress_in_a_pipe_is_one_line_per_phase() -> None:
    """No redrawing, no repetition of the same phase."""
    stream = io.StringIO()
    with ProgressLine(stream, {}) as progress:
        for phase in ("loading", "loading", "warming up"):
            progress.phase(phase)
    assert stream.getvalue() == "loading\nwarming up\n"


def test_progress_says_why_nothing_happens() -> None:
    """Behind the phase, as long as there is a reason."""
    reasons, stream = ["no worker is ready: starting"], Terminal()
    with ProgressLine(stream, {"TERM": "xterm"}) as progress:
        progress.explain(lambda: reasons[0])
        progress.phase("waiting")
        eventually(lambda: "  waiting (no worker is ready: starting)  " in stream.getvalue())
        reasons[0] = ""
        stream.seek(0)
        stream.truncate()
        eventually(lambda: re.search(r"  waiting  [0-9.]+ s", stream.getvalue()))


@pytest.mark.parametrize("columns", [20, 80, 120])
def test_progress_never_wraps(columns: int) -> None:
    """In a terminal of any width the line fits. The bar goes first, then the phase's text; figures stay longest."""
    leader, follower = os.openpty()
    termios.tcsetwinsize(follower, (24, columns))
    with os.fdopen(follower, "w") as stream, os.fdopen(leader, "rb", buffering=0) as terminal:
        with ProgressLine(stream, {"TERM": "xterm"}) as progress:
            progress.amount(f"batch_{'0' * 32}", 12_345, 50_000, "123.4/s  ETA 5 min 10 s  17 failed")
            progress._show(changed=False)
        stream.write("END")
        stream.flush()
        shown = ""
        while not shown.endswith("END"):  # one read may bring only a part
            shown += terminal.read(100_000).decode()
    shown = shown.removesuffix("END")
    assert "\n" not in shown
    drawn = [line for line in shown.split("\r") if line.strip()]
    assert max(map(len, drawn)) < columns
    assert drawn[-1].lstrip().startswith("12345/50000" if columns < 80 else "batch_00000000  ")
    assert re.search("…$" if columns < 80 else r"17 failed  \d+\.\d s$", drawn[-1])
    assert ("[#####" in drawn[-1]) is (columns == 120)


def test_broken_pipe_is_silent() -> None:
    """A reader that has seen enough is no error."""
    command = [sys.executable, "-m", "cli", "help", "environment"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
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
    assert visible(HOSTILE) == shown
    for code in (*range(0x20), *range(0x7F, 0xA0)):
        assert (visible(chr(code)) == chr(code)) is (chr(code) in "\t\n")
    plain = "Tab\tand\nline, הַבַּיִת, 日本語, 👩‍👩‍👧, می‌خواهم, क्‍ष"
    assert visible(plain) == plain


def test_no_character_that_is_not_seen_gets_through() -> None:
    """Of all there are: format characters, separators of lines and controls are shown, the joiners, tab and newline
    are not touched, and neither is any that people write with."""
    for code in range(sys.maxunicode + 1):
        kind = unicodedata.category(char := chr(code))
        if char in JOINERS + "\t\n":
            assert visible(char) == char
        elif kind in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            assert json.loads(f'"{visible(char)}"') == char != visible(char), hex(code)
        elif kind != "Cn":  # not given to any character yet
            assert visible(char) == char, hex(code)


def test_bytes_in_pieces_are_read_as_a_whole() -> None:
    """A C1 code is two bytes, which may come apart."""
    shown = VisibleBytes()
    assert shown.feed(b"a\xc2") + shown.feed(b"\x9bb\x1b") == rb"a\u009bb\u001b"


def test_no_way_to_a_terminal_leaves_them_in(capfd: pytest.CaptureFixture[str]) -> None:
    """Tables with and without styles, notes, errors, progress and JSON, which stays the same JSON."""
    row = {"id": HOSTILE[:-1], "model": "m"}
    print_rows([row], ("id", "model"))
    print_table(("FIELD", HOSTILE[:-1]), [("id", HOSTILE)])
    emit(HOSTILE)
    note(HOSTILE)
    complain(Problem(HOSTILE, cause=HOSTILE, next_step=HOSTILE), as_json=False)
    progress = ProgressLine(sys.stderr, {})
    progress.phase(HOSTILE)
    progress.say(HOSTILE)
    progress.end()
    shown = capfd.readouterr()
    assert not OBEYED.search(shown.out + shown.err)
    print_json(row)
    complain(Problem(HOSTILE), as_json=True)
    shown = capfd.readouterr()
    assert not OBEYED.search(shown.out + shown.err)
    assert json.loads(shown.out) == row
    assert json.loads(shown.err)["error"]["message"] == HOSTILE


def test_a_table_with_styles_has_no_code_of_its_cells(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The styles are ours, and the cell's are not."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_table(("NAME",), [("\x1b]0;owned\x07",)])
    assert "\x1b]" not in capsys.readouterr().out


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
    assert written == {True: visible(WRITABLE), False: WRITABLE}


def test_what_a_server_says_of_its_steps_cannot_drive_the_terminal() -> None:
    """The words behind a bar are another's, too: names of batches and of lanes."""
    stream = Terminal()
    with ProgressLine(stream, {"TERM": "xterm"}) as progress:
        progress.amount("computing", 1, 2, f"{ESC}]52;c;aGk=\x07")
        progress._show(changed=False)
    assert r"\u001b]52;c;aGk=\u0007" in stream.getvalue() and f"{ESC}]52" not in stream.getvalue()


def test_a_model_cannot_drive_the_terminal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`penstock chat` shows what the model said; `penstock jobs show` what the server complains of."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with serving_http(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile)) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["chat", "hello", "--model", "m", "--url", url]) == 0
        answered = capfd.readouterr()
        assert answered.out == visible(HOSTILE) + "\n"
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
