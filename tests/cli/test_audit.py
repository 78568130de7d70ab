"""`penstock audit`: a table that fits a terminal."""

from __future__ import annotations

import re
import sys
from unittest.mock import patch

import pytest
from terminals import Terminal

from cli.admin import AUDIT_COLUMNS
from cli.output import print_rows

LONG = {
    "at": "2026-11-24T02:06:37Z", "action": "dead_letter.replay", "target": "key_4f1c2d3e4a5b6c7d",
    "outcome": "refused", "by": "key_4f1c2d3e4a5b6c7d from 2001:db8:1111:2222:3333:4444:5555:6666",
}  # fmt: skip
SHORT = LONG | {"action": "pool.resume", "target": "sim", "outcome": "done", "by": "root from 10.0.0.1"}


@pytest.mark.parametrize("rows", [[LONG, SHORT], [SHORT]])
def test_the_table_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, str]]) -> None:
    """Who it was stands below its row where there is no room."""
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    with patch("cli.output.terminal_width", lambda _: 80):
        print_rows(rows, AUDIT_COLUMNS)
    lines = re.sub(r"\x1b\[[0-9]+m", "", screen.getvalue()).splitlines()
    assert all(len(line) <= 80 for line in lines)
    head, *below = lines
    for row in rows:
        (line,) = [line for line in below if f" {row['action']} " in line]
        for name in ("action", "target", "outcome"):
            assert line[head.index(name.upper()) :].startswith(row[name])
        assert row["by"] in screen.getvalue()
