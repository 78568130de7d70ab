"""The rows between hosts are told in a table that a terminal of 80 columns shows; playing them is `make test-hosts`."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from bench.chaos.report import as_document
from bench.chaos.stage import RowOutcome
from bench.hosts.__main__ import table
from bench.hosts.rows import ROWS
from bench.report import table as rendered


def test_every_row_and_its_verdict_is_told_in_80_columns() -> None:
    outcomes = [
        RowOutcome(
            row,
            4,
            0,
            [],
            dict.fromkeys(("refused", "unanswered", "broken"), 1000),
            [],
            [12345.0],
            2000,
            {},
            9.0,
            Path(),
        )
        for row in ROWS
    ]
    outcomes[0].wrong.append("a criterion")
    page = StringIO()
    Console(width=80, file=page).print(rendered(table(as_document(outcomes, 9.0))))
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert all(sum(f"{row.id} " in line for line in lines) == 1 and row.proves for row in ROWS)
    assert sum("FAIL" in line for line in lines) == 1 and sum("pass" in line for line in lines) == len(ROWS) - 1
