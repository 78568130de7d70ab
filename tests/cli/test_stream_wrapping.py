"""Answers on a terminal: lines end between words, wherever the pieces end, and no letter is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.output import StreamWrapper, cells


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


def test_a_word_is_shown_once_its_end_is_there() -> None:
    written = list[str]()
    wrapper = StreamWrapper(written.append, lambda: 10)
    wrapper.feed("one tw")
    assert "".join(written) == "one"
    wrapper.feed("o three")
    assert "".join(written) == "one two"
    wrapper.flush()
    assert "".join(written) == "one two\nthree"
