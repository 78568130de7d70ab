"""Part `gate` of the program: its goals judge what they name."""

from __future__ import annotations

from bench.order.gate import ALWAYS, GATE, GREEDY, NEVER, goals


def test_the_goals() -> None:
    """Evictions against one rule, throughput against the best of all."""
    rows = [
        {"load": "stationary", "seed": 1, "rule": rule, "evictions": evictions, "tokens_per_s": rate}
        for rule, evictions, rate in ((NEVER, 0, 50.0), (ALWAYS, 100, 80.0), (GREEDY, 30, 100.0), (GATE, 6, 96.0))
    ]
    of = {ratio.what: (ratio.value, ratio.verdict) for ratio in goals(rows, 0.21)}
    assert list(of.values()) == [(6.0, "missed"), (0.96, "missed"), (0.21, "missed")]
    rows[3] |= {"evictions": 5, "tokens_per_s": 97.0}
    assert {ratio.verdict for ratio in goals(rows, 0.2)} == {"reached"}
