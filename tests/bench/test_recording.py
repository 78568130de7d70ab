"""The recording shows what a terminal received, when it received it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast
from xml.etree import ElementTree

import pytest

from bench.recording import COLUMNS, Glyph, RecordedTerminal, TerminalScreen, as_svg

ROOT = Path(__file__).parents[2]
TEXT = "{http://www.w3.org/2000/svg}text"


def shown(screen: TerminalScreen) -> list[Glyph]:
    return list(screen.runs())


def test_what_comes_together_is_one_text_and_what_is_overwritten_has_an_end() -> None:
    screen = TerminalScreen()
    screen.feed(b"$ ", 0.0)
    screen.feed(b"wait  1 s", 1.0)
    screen.feed(b"\r\x1b[K", 2.0)
    screen.feed(b"The river\r\nbegins", 2.0)
    assert shown(screen) == [
        Glyph(0, 0, "$ ", 0.0, 2.0),
        Glyph(0, 2, "wait  1 s", 1.0, 2.0),
        Glyph(0, 0, "The river", 2.0),
        Glyph(1, 0, "begins", 2.0),
    ]


def test_a_long_line_goes_on_in_the_next_row() -> None:
    screen = TerminalScreen()
    screen.feed(b"a" * COLUMNS + b"b", 0.0)
    assert [(run.row, run.column, run.text) for run in shown(screen)] == [(0, 0, "a" * COLUMNS), (1, 0, "b")]
    assert screen.rows == 2


def test_a_control_that_comes_in_two_pieces_is_none_of_the_text() -> None:
    screen = TerminalScreen()
    screen.feed(b"a\x1b[0", 0.0)
    screen.feed(b"mb", 0.0)
    assert "".join(run.text for run in shown(screen)) == "ab"


def test_the_cursor_moves_and_a_line_is_erased() -> None:
    screen = TerminalScreen()
    screen.feed(b"old\r\nx", 0.0)
    screen.feed(b"\x1b[A\x1b[2K\x1b[Dnew", 1.0)
    assert shown(screen) == [Glyph(0, 0, "old", 0.0, 1.0), Glyph(0, 0, "new", 1.0), Glyph(1, 0, "x", 0.0)]


def test_a_control_that_it_does_not_know_is_no_part_of_a_picture() -> None:
    with pytest.raises(ValueError, match="unknown control 2J"):
        TerminalScreen().feed(b"\x1b[2J", 0.0)


def test_the_picture_shows_each_text_from_its_time_on() -> None:
    screen = TerminalScreen()
    screen.feed(b"<once>", 0.0)
    screen.feed(b"\rtwice ", 5.0)
    svg = as_svg([cast(RecordedTerminal, SimpleNamespace(title="t", screen=screen))], "a note", 10.0)
    texts = [(each.text, each.get("class")) for each in ElementTree.fromstring(svg).iter(TEXT)]  # noqa: S314 - our own
    assert texts == [("t", "title"), ("<once>", "gone a0-5000"), ("twice ", "a5000"), ("a note", "note")]
    assert "@keyframes a5000{0%{opacity:0}50.00%{opacity:1}}" in svg and "prefers-reduced-motion" in svg


def test_the_readme_shows_a_recording_that_is_a_picture() -> None:
    words = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = ElementTree.parse(ROOT / "docs" / "kill.svg")  # noqa: S314 - our own
    text = "".join(each.text or "" for each in tree.iter(TEXT))
    assert "](docs/kill.svg)" in words and "kill -9" in text and "exactly the stored text" in text
