"""The offline process as it says of itself, and its end when a turn never ends."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import offline.__main__ as program
from offline.__main__ import EXIT_STUCK, OfflineProcess
from penstock.config import Config
from penstock.process import Lifeline
from streaming.fleet.processes import this_process
from telemetry.metrics import Metrics


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OfflineProcess:
    """Of two slots, not begun and without Celery."""
    monkeypatch.setattr(program, "build_app", lambda *_: None)
    config = Config({"files": {"dir": str(tmp_path / "files")}, "offline": {"concurrency": 2}})
    return OfflineProcess(this_process("offline", "offline-7"), config, Metrics.start("", "offline"), Lifeline(None))


async def test_a_turn_that_never_ends_ends_the_process(
    process: OfflineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a code that has a fresh one started: what holds the turn up cannot be had back."""
    runner = SimpleNamespace(look_at_batch=lambda *_: asyncio.Event().wait())
    monkeypatch.setattr(program, "HARD_LIMIT_S", 0.01)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(program.logging, "shutdown", lambda: None)
    process._loop = asyncio.get_running_loop()
    process._runner = runner  # type: ignore[assignment]
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(process._look_at_batch, "batch", 1)
    assert ended.value.code == EXIT_STUCK
