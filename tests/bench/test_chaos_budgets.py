"""Budgets of the fault rows: near what was seen, and only for the answers that a row's fault explains."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from bench.chaos.asks import ANY, REFUSALS
from bench.chaos.checker import check
from bench.chaos.rows import ROWS
from bench.chaos.stage import FaultRow
from bench.report import RESULTS

SEEN: dict[str, tuple[float, float]] = {
    "F04": (17.5, 13.5), "F05": (3.4, 3.9), "F06": (14.4, 14.8), "F07": (0.8, 0.3), "F07b": (2.8, 0),
    "F23": (14.4, 14.8), "F18": (0, 7),
}  # fmt: skip
"""Of answers in a trial, refused and broken off, at the most, on machines that were busier than those of the published
runs, or in runs whose place a later one took."""


def _plays() -> list[dict[str, Any]]:
    """Every play of a row that is published, also those that failed; not those of an older form, which lack counts."""
    files = [msgspec.json.decode((RESULTS / name).read_bytes()) for name in ("chaos.json", "chaos-busy.json")]
    rows = list(itertools.chain.from_iterable(found["faults"] for found in files))
    plays = [{"id": row["id"], "trials": 0, "refused": 0, "broken": 0} | play for row in rows
             for play in (row, *row.get("before", ()))]  # fmt: skip
    return [play for play in plays if isinstance(play["refused"], int) and play["trials"]]


def _seen(row: str, *, passed: bool = False) -> tuple[float, float]:
    """By all plays, or by those alone that passed."""
    plays = [play for play in _plays() if play["id"] == row and (play["passed"] or not passed)]
    most = [max((play[kind] / play["trials"] for play in plays), default=0.0) for kind in ("refused", "broken")]
    return max(most[0], SEEN.get(row, (0, 0))[0]), max(most[1], SEEN.get(row, (0, 0))[1])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_budget_is_near_what_was_seen(row: FaultRow) -> None:
    """A row that answers ten times worse must fail; few answers of a kind may be twice as many by chance."""
    (refused, broken), (refused_rightly, broken_rightly) = _seen(row.id), _seen(row.id, passed=True)
    budget = row.budget
    if budget.refused != ANY:
        others = sum(other.most for other in budget.others)
        assert refused_rightly <= budget.refused + others <= max(6, 3 * refused) + others
    assert broken_rightly <= budget.broken <= max(12 if broken else 1, 3 * broken)
    assert budget.unanswered <= 3


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_budget_names_the_refusals_that_its_fault_explains(row: FaultRow) -> None:
    """Any other refusal is a violation."""
    budget = row.budget
    assert (budget.codes is None) is (budget.refused == 0)
    assert len(budget.codes or ()) <= 1 and set(budget.codes or ()) <= {code for _, code in REFUSALS}
    explained = {other.code for other in budget.others} | set(budget.codes or ())
    for status, code in sorted(REFUSALS):
        answer = {"t": 0.1, "event": "answered", "what": "", "status": status, "code": code, "retry_after": "1"}
        found = [violation.kind for violation in check([answer], budget=budget)]
        assert set(found) == (set() if code in explained else {"refused"}), code
