"""Tables, progress and answers: as a terminal shows them, and whole in a pipe."""

from __future__ import annotations

import re
import sys
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from terminals import Terminal

from cli import jobs
from cli.output import StreamWrapper, cells, print_rows, print_table

ESC = "\x1b"
IDS = [f"job_00{digit * 30}" for digit in "0123456789abcdef"]
JOB = {
    "id": IDS[0], "status": "in_progress", "priority": "standard", "model": "smollm2-135m-instruct",
    "created_at": "2026-11-24T02:06:37Z", "took": "12.3 s", "tokens": 128,
}  # fmt: skip


@pytest.mark.parametrize("coloured", [True, False])
def test_states_are_coloured_on_a_terminal_that_wants_it(coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In lists and in one object; the id is short and the time relative with colour or without."""
    monkeypatch.setenv("TERM", "xterm" if coloured else "dumb")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    print_rows([JOB | {"status": "failed"}], jobs.COLUMNS)
    print_table(("FIELD", "VALUE"), [("status", "completed"), ("error", "completed")])
    shown = screen.getvalue()
    assert f"{IDS[0][:12]}  " in shown and IDS[0] not in shown and " ago" in shown and "CREATED AT" not in shown
    assert (ESC in shown) == (f"{ESC}[31mfailed{ESC}[0m" in shown) is coloured
    assert shown.count(f"{ESC}[32mcompleted") == coloured


@pytest.mark.parametrize("forced", [False, True])
def test_a_pipe_gets_whole_ids_and_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    """For programs that read the table; colour that is forced adds styles, and changes no word or column."""
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    print_rows([JOB | {"status": "failed"}], jobs.COLUMNS)
    plain = capsys.readouterr().out
    assert IDS[0] in plain and "2026-11-24T02:06:37Z" in plain and "CREATED AT" in plain and ESC not in plain
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
        print_rows([JOB | {"status": "failed"}], jobs.COLUMNS)
        shown = capsys.readouterr().out
        assert f"{ESC}[31mfailed{ESC}[0m" in shown and re.sub(f"{ESC}\\[[0-9]+m", "", shown) == plain


def shown(pieces: list[str], width: int) -> str:
    with patch.object(sys, "stdout", Terminal()) as screen, patch("cli.output.terminal_width", lambda _: width):
        wrapper = StreamWrapper()
        for piece in pieces:
            wrapper.feed(piece)
        wrapper.flush()
        return screen.getvalue()


WORDS = st.text("abc", min_size=1, max_size=9)


@given(st.lists(st.tuples(WORDS, st.sampled_from([" ", "  ", "\n", "\n\n"])), max_size=30), st.integers(1, 7))
def test_lines_fit_and_end_between_words(text: list[tuple[str, str]], size: int) -> None:
    """Breaks of the text stay; each other one stands in place of its blanks."""
    whole = "".join(map("".join, text))
    found = shown([whole[at : at + size] for at in range(0, len(whole), size)], 10)
    assert all(len(line.rstrip(" ")) <= 10 for line in found.split("\n"))
    assert found.split() == whole.split()
    assert shown([whole], 10) == found
    assert shown([whole], 10_000) == whole


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "three"]),
        ("http://a.example/b/cdef g", ["http://a.example/b/cdef", "g"]),
        ("go to http://a.example/b", ["go to", "http://a.example/b"]),
        ("    indented code", ["    indented", "code"]),
        ("\u6d41\u6c34\u6d41\u6c34\u6d41\u6c34", ["\u6d41\u6c34\u6d41\u6c34\u6d41", "\u6c34"]),
        ("a\u6d41\u6c34\u6d41\u6c34\u6d41", ["a\u6d41\u6c34\u6d41\u6c34", "\u6d41"]),
    ],
)
def test_where_lines_end(text: str, lines: list[str]) -> None:
    """A word without room stays whole, for what is copied; wide characters may stand at the end of a line."""
    assert shown(list(text), 12 if " " in text else 10) == "\n".join(lines)
    assert cells(lines[0]) <= 12 or "http" in lines[0]
