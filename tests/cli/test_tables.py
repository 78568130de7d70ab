"""Tables, progress and answers: as a terminal shows them, and whole in a pipe."""

from __future__ import annotations

import io
import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from terminals import Terminal

from cli import jobs, output
from cli.output import (
    ProgressLine,
    StreamWrapper,
    ago,
    cells,
    print_rows,
    print_table,
    remaining_s,
    short,
    shortener,
    size,
)
from telemetry.records.reader import Skipped, create, read_records

ESC = "\x1b"
IDS = [f"job_00{digit * 30}" for digit in "0123456789abcdef"]
JOB = {
    "id": IDS[0], "status": "in_progress", "priority": "standard", "model": "smollm2-135m-instruct",
    "created_at": "2026-11-24T02:06:37Z", "took": "12.3 s", "tokens": 128,
}  # fmt: skip


def test_ids_are_as_short_as_tells_them_apart() -> None:
    """Eight digits, or more where two share them; words that are no ids stay."""
    assert shortener(IDS)(IDS[3]) == "job_00333333"
    twins = ["job_" + "0" * 10 + "a" * 22, "job_" + "0" * 10 + "b" * 22]
    assert [shortener(twins)(each) for each in twins] == ["job_0000000000a", "job_0000000000b"]
    assert shortener(twins)("worker-1") == "worker-1"
    assert shortener([])(f"see {IDS[0]}") == f"see {IDS[0]}"


def test_times_and_sizes_are_short() -> None:
    """One unit; the future says so; a clock that is a little ahead is now."""
    times = {-300: "in 5m", -0.4: "0s ago", 59: "59s ago", 61: "1m ago", 7200: "2h ago", 90_000: "1d ago"}
    assert {seconds: ago(seconds) for seconds in times} == times
    sizes = {0: "0", 999: "999", 1500: "1.5k", 9_960: "10k", 999_499: "999k", 999_600: "1.0M", 268_435_456: "268M"}
    assert {count: size(count) for count in sizes} == sizes


@pytest.mark.parametrize(
    ("environ", "coloured"), [({"TERM": "xterm"}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_states_are_coloured_on_a_terminal_that_wants_it(
    environ: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lists and in one object; the id is short and the time relative with colour or without."""
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    print_rows([JOB | {"status": "failed"}], jobs.COLUMNS)
    print_table(("FIELD", "VALUE"), [("status", "completed"), ("error", "completed")])
    shown = screen.getvalue()
    assert f"{IDS[0][:12]}  " in shown and IDS[0] not in shown and " ago" in shown and "CREATED AT" not in shown
    assert (ESC in shown) is coloured
    if coloured:
        assert f"{ESC}[31mfailed{ESC}[0m" in shown
        assert shown.count(f"{ESC}[32mcompleted") == 1


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


@pytest.mark.parametrize(("spent_s", "first", "share", "rest"), [
    (10.0, 0.0, 0.25, 30.0),
    (10.0, 0.5, 0.75, 10.0),  # what was there before it began took no time
    (1.0, 0.0, 0.5, None),  # too early to say
    (10.0, 0.25, 0.25, None),  # nothing has moved
    (10.0, 0.0, 1.0, None),
    (10.0, 0.0, 0.0, None),
])  # fmt: skip
def test_the_rest_follows_from_the_pace(spent_s: float, first: float, share: float, rest: float | None) -> None:
    assert remaining_s(spent_s, first, share) == rest


def test_times_are_short() -> None:
    assert [short(each) for each in (0.2, 59.6, 99, 150, 7260)] == ["1 s", "60 s", "99 s", "2 min", "2 h 1 min"]


def test_a_terminal_shows_how_long_a_phase_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that it has taken, and that which is left; a new phase begins anew."""
    clock = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: clock[0])
    line = ProgressLine(Terminal(), {})
    line.amount("fetching", 10_000_000, 100_000_000)
    assert line._line().endswith("0.0 s")
    clock[0] = 104.0
    line.amount("fetching", 50_000_000, 100_000_000)
    assert line._line().endswith("50.0/100.0 MB  4.0 s, about 5 s left")
    line.phase("checking")
    assert line._line() == "checking  0.0 s"


def test_reading_records_says_how_much_is_read(tmp_path: Path) -> None:
    """In bytes, to the end, whatever the window leaves out."""
    for number, length in enumerate((100, 300)):
        path, descriptor = create(tmp_path, 1_800_000_000.0 + number, "worker", number)
        path.write_bytes(b"x" * length)
        os.close(descriptor)
    told: list[tuple[int, int]] = []
    assert list(read_records(tmp_path, 0.0, 1e11, Skipped(), lambda *both: told.append(both))) == []
    assert told == [(0, 400), (100, 400), (400, 400)]
    line = ProgressLine(io.StringIO(), {}, quiet=True)
    list(read_records(tmp_path, 0.0, 1e11, Skipped(), partial(line.amount, "reading records")))


def shown(pieces: list[str], width: int) -> str:
    written = list[str]()
    wrapper = StreamWrapper(written.append, lambda: width)
    for piece in pieces:
        wrapper.feed(piece)
    wrapper.flush()
    return "".join(written)


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


@pytest.mark.parametrize(("text", "lines"), [
    ("one two three", ["one two", "three"]),
    ("http://a.example/b/cdef g", ["http://a.example/b/cdef", "g"]),
    ("go to http://a.example/b", ["go to", "http://a.example/b"]),
    ("    indented code", ["    indented", "code"]),
    ("\u6d41\u6c34\u6d41\u6c34\u6d41\u6c34", ["\u6d41\u6c34\u6d41\u6c34\u6d41", "\u6c34"]),
    ("a\u6d41\u6c34\u6d41\u6c34\u6d41", ["a\u6d41\u6c34\u6d41\u6c34", "\u6d41"]),
])  # fmt: skip
def test_where_lines_end(text: str, lines: list[str]) -> None:
    """A word without room stays whole, for what is copied; wide characters may stand at the end of a line."""
    assert shown(list(text), 12 if " " in text else 10) == "\n".join(lines)
    assert cells(lines[0]) <= 12 or "http" in lines[0]


def test_a_word_is_shown_once_its_end_is_there() -> None:
    written = list[str]()
    wrapper = StreamWrapper(written.append, lambda: 10)
    wrapper.feed("one tw")
    assert "".join(written) == "one"
    wrapper.feed("o three")
    assert "".join(written) == "one two"
    wrapper.flush()
    assert "".join(written) == "one two\nthree"
