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
    "at": "2026-11-24T02:06:37Z", "who": "key_4f1c2d3e4a5b6c7d", "action": "dead_letter.replay", "outcome": "refused",
    "target": "0-1795486176000-0", "address": "2001:db8:1111:2222:3333:4444:5555:6666", "status": 403,
}  # fmt: skip
SHORT = LONG | {"who": None, "action": "pool.resume", "target": "sim", "outcome": "done", "address": "10.0.0.1"}


def test_the_table_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    with patch("cli.output.terminal_width", lambda _: 80):
        print_rows([LONG, SHORT], AUDIT_COLUMNS)
    lines = re.sub(r"\x1b\[[0-9]+m", "", screen.getvalue()).splitlines()
    assert all(len(line) <= 80 for line in lines)
    head, first, *_, last, address = lines
    for column, cells in (("ACTION", ("dead_letter.replay", "pool.resume")), ("OUTCOME", ("refused", "done"))):
        place = head.index(column)
        assert (first[place:].startswith(cells[0]), last[place:].startswith(cells[1])) == (True, True)
    assert (
        LONG["target"] in first
        and LONG["who"] in first
        and LONG["address"] in screen.getvalue()
        and "10.0.0.1" in address
    )
