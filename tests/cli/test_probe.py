"""What a HEALTHCHECK or a kubelet hears of a process: starting, ready, draining, hung, gone, and nobody to ask."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cli_instance import running_at
from house import House, eventually, free_port
from redis import Redis

from cli.__main__ import main
from streaming.fleet.processes import HEARTBEAT_TIMEOUT_S
from streaming.keys import fleet_key

pytestmark = pytest.mark.slow

LOADING = {"PENSTOCK_SIM_LOAD_MS": "600000"}


@pytest.fixture
def asked(empty_house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """Commands given where this house's settings hold."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", empty_house.redis_url)
    monkeypatch.setenv("PENSTOCK_API_PORT", str(empty_house.port))
    return empty_house


def probe(*words: str) -> int:
    return main(["probe", *words])


def test_a_worker_is_ready_when_its_engine_is(asked: House) -> None:
    """While it loads it lives and is not ready; of another name there is none."""
    asked.start("workers", "--id", "slow", **LOADING)
    asked.start("workers", "--id", "quick")
    eventually(lambda: probe("worker", "--id", "quick") == 0)
    eventually(lambda: probe("worker", "--id", "slow", "--alive") == 0)
    assert probe("worker", "--id", "slow") == 1
    assert probe("worker", "--id", "other", "--alive") == 1
    assert probe("scheduler", "--id", "quick", "--alive") == 1, "the role counts too"


def test_without_a_name_it_is_this_machines(asked: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the images name their processes."""
    monkeypatch.setattr("socket.gethostname", lambda: "pod-7")
    asked.start("scheduler", "--id", "pod-7")
    eventually(lambda: probe("scheduler") == 0)


def test_an_offline_process_is_asked_for_like_a_worker(asked: House) -> None:
    """Ready once it takes work, and no more when it has ended."""
    offline = asked.start("offline", "--id", "o")
    eventually(lambda: probe("offline", "--id", "o") == 0)
    assert probe("worker", "--id", "o") == 1
    offline.terminate()
    assert offline.wait(30) == 0 and probe("offline", "--id", "o", "--alive") == 1


def test_a_process_that_hangs_is_gone(asked: House) -> None:
    """Stopped in its tracks it says nothing more, and what it said is kept for ten seconds; here for less."""
    worker = asked.start("workers", "--id", "w")
    eventually(lambda: probe("worker", "--id", "w") == 0)
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        with Redis.from_url(asked.redis_url) as redis:
            (key,) = redis.keys(fleet_key("proc", "worker:*"))
            assert 0 < redis.pttl(key) <= 1000 * HEARTBEAT_TIMEOUT_S
            redis.pexpire(key, 100)
        eventually(lambda: probe("worker", "--id", "w", "--alive") == 1)
    finally:
        os.kill(worker.pid, signal.SIGCONT)


def test_a_silent_redis_kills_nobody(asked: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say whether the worker lives, so it is left alone; ready it is not."""
    monkeypatch.setenv("PENSTOCK_REDIS_URL", f"redis://127.0.0.1:{free_port()}/0")
    assert probe("worker", "--id", "w", "--alive") == 0
    assert probe("worker", "--id", "w") == 3


def test_an_api_process_is_asked_at_its_door(asked: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alive as soon as it answers, ready with the first worker; 0.0.0.0 is called at home."""
    assert probe("api", "--alive") == 3
    asked.start_api()
    monkeypatch.setenv("PENSTOCK_API_HOST", "0.0.0.0")  # noqa: S104
    assert probe("api", "--alive") == 0
    assert probe("api") == 1
    asked.start("workers")
    eventually(lambda: probe("api") == 0)


def test_a_running_instance_says_where_its_processes_are(
    asked: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its port and its Redis are of its own choice; the settings name others. In another folder nothing runs."""
    asked.start_api()
    asked.start("workers", "--id", "w")
    monkeypatch.setenv("PENSTOCK_API_PORT", str(free_port()))
    monkeypatch.setenv("PENSTOCK_REDIS_URL", f"redis://127.0.0.1:{free_port()}/0")
    url, folder = f"http://127.0.0.1:{asked.port}", ("--data-dir", str(tmp_path / "data"))
    with running_at(url, tmp_path / "data", redis_url=asked.redis_url):
        eventually(lambda: probe("api", *folder) == 0)
        eventually(lambda: probe("worker", "--id", "w", *folder) == 0)
        assert probe("api", "--data-dir", str(tmp_path / "other")) == 3
        assert "cause: Connection refused\n" in capsys.readouterr().err
