"""Offsets of streams: their order, their form, and the cursors of live reads."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import durable
from api.durable import FIRST_INTERVAL_S, INTERVAL_S, MAX_JITTER_S, live_cursor, offset_of
from api.openai.cursor import CUT_SHORT, Cursor
from api.openai.errors import ApiError
from streaming.jobs.codec import Run

NOW_S = FIRST_INTERVAL_S + 1000 * INTERVAL_S

positions = st.tuples(st.integers(1, 10**15 - 1), st.integers(0, 10**15 - 1))


@given(first=positions, second=positions, runs=st.tuples(st.text("0123abc", min_size=1), st.integers(1, 99)))
def test_offsets_compare_as_their_positions(
    first: tuple[int, int], second: tuple[int, int], runs: tuple[str, int]
) -> None:
    """Also where one has a run and the other has none."""
    one, other = offset_of(Cursor(*first)), offset_of(Cursor(*second, str(Run(*runs))))
    if first != second:
        assert (one < other) == (first < second)
    for offset in (one, other):
        assert len(offset) <= 256 and offset > "-1" and not set(",&=?/") & set(offset)


def test_an_offset_leads_back_to_its_cursor() -> None:
    run = str(Run("150ef93e4aab", 3))
    for cursor in (Cursor(1, 0), Cursor(7, 12, run), Cursor(2, CUT_SHORT, run)):
        assert durable.read(offset_of(cursor)) == cursor


@pytest.mark.parametrize("text", ["", "0", "-2", "1:2:abc", "now ", "9" * 300, f"{1:015d}_{2:015d}_{'G' * 65}"])
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        durable.read(text)
    assert (refused.value.status, refused.value.param) == (400, "offset")


def test_a_live_cursor_is_the_interval_and_never_one_that_the_reader_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is drawn: the least jitter is shorter than an interval, and still the next cursor is another one."""
    assert live_cursor(None, NOW_S) == live_cursor(999, NOW_S) == live_cursor(None, NOW_S + INTERVAL_S - 0.1) == 1000
    assert live_cursor(None, NOW_S + INTERVAL_S) == 1001
    for jitter_s, further in ((1, 1), (INTERVAL_S - 1, 1), (2 * INTERVAL_S, 2), (MAX_JITTER_S, 180)):

        def drawn(least: int, most: int, jitter_s: int = jitter_s) -> int:
            assert least <= jitter_s <= most
            return jitter_s

        monkeypatch.setattr(random, "randint", drawn)
        assert [live_cursor(seen, NOW_S) - seen for seen in (1000, 1001, 10**9)] == [further] * 3
