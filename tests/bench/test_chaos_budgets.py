"""Budgets of the fault rows: only for the answers that a row's fault explains."""

from __future__ import annotations

from bench.chaos.asks import REFUSALS
from bench.chaos.checker import check
from bench.chaos.rows import ROWS


def test_a_budget_names_the_refusals_that_its_fault_explains() -> None:
    """Any other refusal is a violation."""
    for row in ROWS:
        budget = row.budget
        assert (budget.codes is None) is (budget.refused == 0), row.id
        assert len(budget.codes or ()) <= 1 and set(budget.codes or ()) <= {code for _, code in REFUSALS}, row.id
        explained = {other.code for other in budget.others} | set(budget.codes or ())
        for status, code in sorted(REFUSALS):
            answer = {"t": 0.1, "event": "answered", "what": "", "status": status, "code": code, "retry_after": "1"}
            found = [violation.kind for violation in check([answer], budget=budget)]
            assert set(found) == (set() if code in explained else {"refused"}), (row.id, code)
