"""Part `gate` of the program: it runs in short form, repeats itself, and its goals judge what they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.order.__main__ import main
from bench.order.gate import ALWAYS, GATE, GREEDY, NEVER, goals
from bench.report import load


@pytest.mark.slow
def test_a_quick_run_shows_every_rule_and_judges_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--part", "gate", "--quick", "--jobs", "1", "--out", str(tmp_path)]) == 0
    assert "Past-Future gate" in capsys.readouterr().out
    found = load(tmp_path / "order-gate-quick.json")
    assert len(found.rows) == 8 and found.ratios == ()
    assert {row["evictions"] for row in found.rows if row["rule"] == NEVER} == {0}


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
