"""Bars of `penstock jobs timing`."""

from __future__ import annotations

import pytest

from cli.jobs import _bar


@pytest.mark.parametrize(
    ("begun", "spent", "bar"),
    [
        (0, 0, ""),
        (0, 0.001, "\u258f"),
        (50, 0.001, " " * 10 + "\u258f"),
        (0, 50, "\u2588" * 10),
        (50, 50, " " * 10 + "\u2588" * 10),
        (0, 12.5, "\u2588" * 2 + "\u258c"),
        (99.9, 0.1, " " * 19 + "\u258f"),
        (120, 30, " " * 19 + "\u2588"),
    ],
)
def test_a_bar_is_as_long_as_its_part(begun: float, spent: float, bar: str) -> None:
    """To an eighth of a character, which a tiny part has; no bar is longer than the chart."""
    assert _bar(begun, spent, 100, 20) == bar
