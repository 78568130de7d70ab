"""`bench abuse`: what is made of its rounds."""

from __future__ import annotations

from collections import Counter

from bench.abuse.__main__ import LIMIT_S, AbuseRound, goals_of, row_of
from bench.abuse.abuser import ABUSES


def test_a_chat_that_never_comes_counts_against_both_goals() -> None:
    """As not accepted, and as late as the limit."""
    slots = ABUSES["slots"]
    good = AbuseRound([0.03, 0.03, 0.05], [0.06, 0.06, 0.05], Counter({"200": 2}))
    bad = AbuseRound([0.03, 0.03, 0.05], [0.06, None, None], Counter({"200": 1, "429": 4}))
    row = row_of(slots, [good, bad])
    assert round(row["accepted"], 1) == 66.7 and row["worst_ms"] == 1000 * LIMIT_S
    assert row["answered"] == "200: 3, 429: 4"
    assert [each.verdict for each in goals_of(slots, [good, good])] == ["reached", "reached"]
    assert [each.verdict for each in goals_of(slots, [bad, bad])] == ["missed", "missed"]
    assert goals_of(slots, [good])[1].value == 2.0
