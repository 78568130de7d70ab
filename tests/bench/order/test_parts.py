"""The parts of the program run in short form, and their goals judge what they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.order import replay
from bench.order.__main__ import main
from bench.order.replay import CONTENDERS, FIFO, OURS
from bench.report import load
from planner.simulator.engine import ModelText


@pytest.mark.slow
def test_a_quick_run_shows_every_order_and_judges_nothing(tmp_path: Path) -> None:
    assert main(["--part", "replay", "--quick", "--jobs", "1", "--out", str(tmp_path)]) == 0
    found = load(tmp_path / "order-replay-quick.json")
    assert {row["rule"] for row in found.rows} >= {OURS, FIFO} and found.ratios == ()


def test_a_chat_is_in_time_if_it_keeps_both_limits() -> None:
    def text(first_s: float | None, ended_s: float | None, lane: str = "interactive") -> bool:
        made = ModelText(10, 11, 16, lane=lane, generated=11)
        made.first_s, made.ended_s = first_s, ended_s
        return replay.is_in_time(made)

    assert text(1.0, 1.5) and text(29.0, 29.4, "standard")
    assert not text(1.1, 1.2) and not text(0.5, 1.1) and not text(None, None) and not text(0.1, None)


def test_goodput_is_held_against_each_other_order_that_has_some() -> None:
    rows = [{"cache": 9, "rate": 4, "rule": rule, "goodput": 2.0} for rule in CONTENDERS]
    rows[1]["goodput"], rows[2]["goodput"] = 0.0, 2.1
    assert [ratio.verdict for ratio in replay.goals(rows)] == ["missed", "reached"]
