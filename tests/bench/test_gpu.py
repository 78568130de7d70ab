"""`bench gpu` where there is no GPU: what it needs, and what follows from the rows that one measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu.__main__ import main
from bench.gpu.judged import by_card, card_of, knee_notes, knees
from bench.report import load

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def test_without_a_gpu_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "error: " in capsys.readouterr().out


def test_the_kept_knees_are_those_of_the_kept_rows() -> None:
    """By the fit and by the rule, and none at the largest batch is called the knee."""
    kept = load(RESULTS / "gpu-frontier.json")
    assert list(kept.notes[:2]) == knee_notes(kept.rows)
    found = knees(kept.rows)
    assert {name: each.batch for name, each in found.items()} == kept.settings["knees"]
    for name, each in found.items():
        rates = {row["batch"]: row["tokens_per_s"] for row in kept.rows if row["shape"] == name}
        flat = [batch for batch in rates if 2 * batch in rates and rates[2 * batch] / rates[batch] < 1.1]
        assert each.ruled == min(flat, default=max(rates))
        assert (f"{max(rates)} or beyond by" in " ".join(kept.notes)) or each.ruled < max(rates)


def test_the_kept_shares_are_those_of_the_card() -> None:
    """The step's bound as `penstock plan roofline --gpu h200` has it, less than with the bandwidth of the run."""
    kept = load(RESULTS / "gpu-bound.json")
    assert by_card(kept.rows, card_of(kept.settings["device"])) == kept.rows
    assert all(0 < row["card_share"] < row["share"] for row in kept.rows)
    assert card_of("NVIDIA H200") is not None and card_of("Radeon VII") is None
    assert by_card(kept.rows[:1], None)[0]["card_share"] is None


def test_an_earlier_run_is_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU; the machine that measured stays."""
    words = ["--again", str(RESULTS), "--out", str(tmp_path), "--plots", str(tmp_path)]
    assert main(words) == 1, "the decode bound is missed"
    for name in ("gpu-frontier.json", "gpu-bound.json"):
        again, kept = load(tmp_path / name), load(RESULTS / name)
        assert (again.rows, again.notes, again.cores) == (kept.rows, kept.notes, kept.cores)
    assert "by single doublings" in capsys.readouterr().out
