"""The history of output lengths, and what is drawn from it."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import pytest

from workers.gate import (
    MAX_TENANTS,
    MIN_TENANT_LENGTHS,
    UNKNOWN,
    WINDOW,
    LengthHistory,
    LengthWindow,
    OutputLengths,
)


def test_at_first_every_text_is_expected_to_use_its_limit() -> None:
    """As GUARANTEED_NO_EVICT reserves it."""
    window = LengthHistory().window("standard")
    assert window.draws(0, 300, 50, Random(1)) == [300] * 50
    assert window.draws(7, 7000, 50, Random(1)) != [7000] * 50  # between what it has and its limit


def test_each_answer_replaces_an_unknown_one() -> None:
    window = LengthWindow(unknown=WINDOW // 2)
    shares = []
    for _ in range(WINDOW // 2):
        window.add(10)
        shares.append(window.draws(0, 99, 400, Random(2)).count(99) / 400)
    assert shares[0] > 0.9 and 0.4 < shares[len(shares) // 2 - 1] < 0.6 and shares[-1] == 0


def test_only_the_newest_lengths_count() -> None:
    window = LengthWindow(unknown=WINDOW // 2)
    for length in [*range(5000, 5050), *([10] * WINDOW)]:
        window.add(length)
    assert (len(window), window.known) == (WINDOW, (10,) * WINDOW)
    assert set(window.draws(0, 9999, 100, Random(3))) == {10}


def test_a_running_text_is_drawn_from_the_lengths_above_what_it_has() -> None:
    """Evenly over the parts between neighbours: what it has, 100, 200, its limit; all within these."""
    window = LengthWindow([10, 20, 100, 200])
    drawn = window.draws(50, 1000, 30_000, Random(4))
    assert min(drawn) > 50 and max(drawn) <= 1000
    parts = Counter("low" if each <= 100 else "middle" if each <= 200 else "high" for each in drawn)
    assert all(0.31 < parts[part] / len(drawn) < 0.36 for part in ("low", "middle", "high"))
    assert min(drawn) < 53 and max(drawn) > 990


@pytest.mark.parametrize("generated", [0, 1, 9, 10, 11, 49, 99])
def test_no_draw_leaves_the_bounds(generated: int) -> None:
    """Above what it has and at most its limit, also where the history is longer, shorter, or unknown."""
    for window in (LengthWindow([10, 60, 500]), LengthWindow(unknown=3), LengthWindow([10], unknown=3), LengthWindow()):
        drawn = window.draws(generated, 100, 500, Random(5))
        assert all(generated < each <= 100 for each in drawn)


def test_a_tenant_is_drawn_from_its_own_lengths_once_enough_are_known() -> None:
    history = LengthHistory()
    for number in range(MIN_TENANT_LENGTHS):
        assert history.window("batch", "long") is history.window("batch"), number
        history.add("batch", "long", 900)
        history.add("batch", "short", 5)
    assert set(history.window("batch", "long").draws(0, 2000, 50, Random(8))) == {900}
    assert history.window("interactive", "long") is history.window("interactive")


def test_the_history_is_bounded() -> None:
    """The tenants that were silent for longest go first."""
    history = LengthHistory()
    for number in range(MAX_TENANTS + 10):
        for _ in range(WINDOW + 10):
            history.add("batch", f"tenant-{number}", number)
        if number == MAX_TENANTS - 1:
            history.add("batch", "tenant-0", 0)  # it is not silent any more
    message = history.message()
    kept = (*range(11, MAX_TENANTS), 0, *range(MAX_TENANTS, MAX_TENANTS + 10))
    assert [each.tenant for each in message.tenants] == [f"tenant-{number}" for number in kept]
    assert {len(each.lengths) for each in message.tenants} == {len(message.lanes["batch"])} == {WINDOW}
    assert len(msgspec.msgpack.encode(message)) < 64_000


def test_a_stored_history_continues() -> None:
    """The same draws as before; what was unknown is unknown again, and no sentinel is stored."""
    history = LengthHistory()
    for length in range(1, 81):
        history.add("standard", "t", length)
    data = msgspec.msgpack.encode(history.message())
    again = LengthHistory(msgspec.msgpack.decode(data, type=OutputLengths))
    for tenant in ("t", "other"):
        then = [of.window("standard", tenant).draws(3, 500, 50, Random(9)) for of in (history, again)]
        assert then[0] == then[1]
    assert again.message() == history.message() and again.added == 0
    assert UNKNOWN not in history.message().lanes["standard"]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"lanes": {"standard": [1] * (WINDOW + 1)}}, OutputLengths)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"lanes": {"standard": [-1]}}, OutputLengths)
