"""How commands speak: streams, colour, JSON and the error block."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from cli.__main__ import main
from cli.errors import Problem
from cli.output import complain, error_block, print_rows, styled
from cli.progress import Progress, amount

ESC = "\x1b"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


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


def test_table_in_a_pipe_is_plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Aligned columns, a dash for what is missing, no escape."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    print_rows([{"id": "api-1", "pid": 7, "model": ""}], ("id", "pid", "model"), as_json=False)
    assert capsys.readouterr().out == "ID     PID  MODEL\napi-1  7    -\n"


def test_table_with_colour(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced colour gives styles; the words stay the same."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_rows([{"id": "[api]"}], ("id",), as_json=False)
    out = capsys.readouterr().out
    assert ESC in out
    assert "[api]" in out


def test_json_list_is_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the values hold, each object stays on its line."""
    print_rows([{"a": "x\ny"}, {"a": None}], ("a",), as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]] == [{"a": "x\ny"}, {"a": None}]


def test_error_block_is_four_lines_at_most() -> None:
    """A cause of many lines is still one line."""
    problem = Problem("it broke", cause="one\ntwo\nthree", next_step="mend it")
    assert error_block(problem) == ["error: it broke", "cause: one two three", "next:  mend it"]


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
    with Progress(stream, {}) as progress:
        for phase in ("loading", "loading", "warming up"):
            progress.phase(phase)
    assert stream.getvalue() == "loading\nwarming up\n"


def test_progress_on_a_terminal_leaves_nothing() -> None:
    """The line is drawn over by blanks; a lasting line stays above it; no escape is sent."""
    stream = Terminal()
    with Progress(stream, {"TERM": "xterm"}) as progress:
        progress.phase("loading weights")
        progress.say("a note")
    shown = stream.getvalue()
    assert "loading weights  0." in shown
    assert "a note\n" in shown
    assert ESC not in shown
    assert shown.endswith("\r")
    assert shown.split("\r")[-2].strip() == ""


def test_quiet_progress_says_only_what_lasts() -> None:
    """Phases are dropped, notes are not."""
    stream = io.StringIO()
    with Progress(stream, {}, quiet=True) as progress:
        progress.phase("loading")
        progress.say("a note")
    assert stream.getvalue() == "a note\n"


def test_amount() -> None:
    """A bar where the total is known; megabytes, or steps where there are few."""
    assert amount(3, 6) == "  [############............] 3/6"
    assert amount(50_000_000, 100_000_000) == "  [############............] 50.0/100.0 MB"
    assert amount(5_000_000, 0) == "  5.0 MB"


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
