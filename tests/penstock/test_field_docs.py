"""What a field of a settings struct means is the first sentence of the text below it."""

from __future__ import annotations

import msgspec

from penstock.config import field_meanings


class Example(msgspec.Struct):
    """A section."""

    first: int = 1
    """Its number, e.g. 3. More about
    it."""
    second: str = ""
    third: float = 0.5
    """A text over
    two lines"""


def test_a_meaning_is_one_sentence_on_one_line() -> None:
    """An abbreviation ends no sentence before a number; a field without a text has no meaning."""
    assert field_meanings(Example) == {"first": "Its number, e.g. 3.", "third": "A text over two lines"}


def test_without_its_source_nothing_is_said() -> None:
    """As where only compiled files are installed."""
    assert field_meanings(msgspec.defstruct("Made", [("first", int, 1)])) == {}
