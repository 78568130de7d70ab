"""Fixture of all tests of the engine `upstream`: it looks and waits more often, so that no test waits for a clock."""

from __future__ import annotations

import pytest

from workers.engines.upstream import engine, pool


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "TICK_S", 0.03)
    monkeypatch.setattr(pool, "HOLD_S", 0.05)
