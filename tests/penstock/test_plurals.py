"""Counts in words."""

from __future__ import annotations

from penstock.text import counted


def test_one_is_singular_and_all_else_is_not() -> None:
    """Also zero, and a noun whose plural is another word."""
    assert [counted(number, "job") for number in (0, 1, 2)] == ["0 jobs", "1 job", "2 jobs"]
    assert [counted(number, "process uses", "processes use") for number in (1, 3)] == [
        "1 process uses",
        "3 processes use",
    ]
