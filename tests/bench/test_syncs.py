"""Kills of a server while its syncs are slow: how they are played, without strace here, and counted."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from house import eventually

from bench import syncs

pytestmark = pytest.mark.slow


def test_writes_are_counted_until_the_server_is_gone(tmp_path: Path) -> None:
    """At fsync always, all that were answered are there when it is started again."""
    with syncs._server(tmp_path, "always") as redis, ThreadPoolExecutor(1) as writer:
        written = writer.submit(syncs._write, redis, "one", threading.Barrier(1))
        eventually(lambda: int(redis.dbsize()) > 1)  # type: ignore[arg-type]  # its stub has the answers of both kinds
        os.kill(int(redis.info("server")["process_id"]), signal.SIGKILL)
        answered = written.result(30)
    assert answered and answered == [f"one, {number}" for number in range(len(answered))]
    with syncs._server(tmp_path, "always") as redis:
        assert redis.exists(*answered) == len(answered) <= int(redis.dbsize())  # type: ignore[arg-type]


def test_a_kill_at_fsync_always_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many writers at once."""
    monkeypatch.setattr(syncs, "WRITES_S", (0.1, 0.2))
    answered, kept = syncs._kill("always", slow=())
    assert answered == kept


def test_losses_are_counted_kill_by_kill() -> None:
    assert syncs._row("everysec", [(10, 10), (20, 13), (5, 4)]) == {
        "fsync": "everysec",
        "kills": 3,
        "lossy": 2,
        "answered": 35,
        "lost": 8,
        "worst": 7,
    }


def test_without_strace_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert syncs.main(["--out", str(tmp_path / "syncs.json")]) == 2
    assert not (tmp_path / "syncs.json").exists()
