"""The chat beside large requests in short form, and what becomes a figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from api.schemas import check_choices, parse
from bench.abuse.__main__ import main
from bench.abuse.ask import Size
from bench.abuse.figures import Case, Round, goal_of, row_of
from bench.report import load
from workers.sim import count_tokens


@pytest.mark.parametrize(("choices", "prompts", "n"), [(1, 1, 1), (64, 64, 1), (128, 128, 1), (1024, 128, 8)])
def test_a_large_request_is_one_that_is_accepted(choices: int, prompts: int, n: int) -> None:
    """The most prompts, then the most choices of each, and every token of the context."""
    body = Size(choices, 100, 900).body("m", 3)
    request = parse("completion", json.dumps(body).encode())
    check_choices(request, choices)
    assert (request.prompts, request.n, request.max_tokens) == (prompts, n, 900)
    assert {count_tokens(prompt) for prompt in body["prompt"]} == {100} and len(set(body["prompt"])) == prompts
    with pytest.raises(ValueError, match="1025 choices"):
        Size(1025, 1, 1).body("m", 0)


def test_the_median_of_the_rounds_is_judged() -> None:
    """A first token that did not come in time is as late as the limit, and is counted."""
    rounds = [Round([0.1, 0.1], [0.2, 0.3, 0.2]), Round([0.1], [0.2, None]), Round([0.1], [None])]
    row = row_of("this tree", Case(4, 64), rounds, 5.0)
    assert row["ratios"] == pytest.approx([2.0, 26.0, 50.0]) and row["ratio"] == pytest.approx(26.0)
    assert (row["late"], row["worst_ms"]) == (2, 5000.0)
    assert goal_of(Case(4, 64), rounds, 5.0).holds is False
    assert goal_of(Case(4, 64), rounds[:1], 5.0).holds is True
    assert goal_of(Case(4, 64, bodies=2), rounds, 5.0).holds is None


def test_a_short_run(tmp_path: Path) -> None:
    """Real processes and two tenants; every chat came, beside a request that did not end."""
    words = ["--quick", "--rounds", "1", "--chats", "2", "--out", str(tmp_path), "--limit", "30"]
    assert main(words) in (0, 1)  # how long it took is the full form's
    found = load(tmp_path / "abuse-quick.json")
    assert [row["slots"] for row in found.rows] == [16, 4]
    assert all(row["late"] == 0 and row["alone_ms"] > 0 and row["beside_ms"] > 0 for row in found.rows)
