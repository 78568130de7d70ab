"""The table of `penstock ps`: what it says of a worker that people should not take for one that serves."""

from __future__ import annotations

from typing import Any

import pytest

from cli.ps import _found

NAMES = ("id", "state", "model")
WORKER: dict[str, Any] = {"id": "worker-1", "state": "ready", "model": "m", "shape": "", "away": ""}


def shown(capsys: pytest.CaptureFixture[str], **change: Any) -> str:
    _found([WORKER | change], NAMES).print(as_json=False)
    return capsys.readouterr().out


def test_a_worker_whose_server_is_away_is_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ready" in shown(capsys)
    away = shown(capsys, away="http://x (connection refused)")
    assert "server away" in away and "ready" not in away


def test_a_worker_that_starts_is_said_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    """Its server may be away as well: it has not begun to serve."""
    assert "starting" in shown(capsys, state="starting", away="http://x (connection refused)")


def test_shapes_have_a_column_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    assert "SHAPE" not in shown(capsys) and "SHAPE" in shown(capsys, shape="long")
