"""The rows between hosts are told in a table that a terminal of 80 columns shows; playing them is `make test-hosts`."""

from __future__ import annotations

import os
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bench.chaos.report import as_document
from bench.chaos.stage import RowOutcome
from bench.hosts.__main__ import table
from bench.hosts.containers import SUBNETS, Failed, networks
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


@pytest.mark.parametrize("broken", ["table", *SUBNETS])
async def test_what_a_run_made_is_removed_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """With commands that only write down what they are asked: what an earlier run left goes first, then its own, and
    one that cannot be removed keeps no other."""
    log = tmp_path / "log"
    for name in ("nft", "podman"):
        lines = f'echo "{name} $*" >> {log}', f'case "$*" in *delete*{broken}*|*rm*{broken}) exit 1 ;; esac'
        (tmp_path / name).write_text("\n".join(["#!/bin/sh", *lines]))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def removals() -> set[str]:
        words = [line.split() for line in log.read_text().splitlines()]
        return {line[2] if "delete" in line else line[-1] for line in words if {"delete", "rm"} & set(line)}

    before: set[str] = set()
    with pytest.raises(Failed):
        async with networks():
            before = removals()
            log.unlink()
    assert before == removals() == {"table", *SUBNETS}
