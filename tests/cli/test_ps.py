"""The table of `penstock ps`: what it says of a worker that people should not take for one that serves."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_instance import Instance
from house import eventually
from redis import Redis

from cli.processes import _print
from streaming.fleet.process import Process
from streaming.keys import fleet_key

NAMES = ("id", "state", "model", "shape")
WORKER: dict[str, Any] = {"id": "worker-1", "state": "ready", "model": "m", "shape": "", "away": ""}


AWAY = "http://x (connection refused)"


@pytest.mark.parametrize(("change", "words", "others"), [
    ({}, "ready", "SHAPE"), ({"shape": "long"}, "SHAPE", "server away"), ({"away": AWAY}, "server away", "ready"),
    ({"state": "starting", "away": AWAY}, "starting", "ready"),
])  # fmt: skip
def test_what_a_worker_is_said_to_do(
    change: dict[str, str], words: str, others: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One whose server is away is not ready, if it has begun to serve; shapes have a column if there are any."""
    _print([WORKER | change], NAMES, as_json=False)
    shown = capsys.readouterr().out
    assert words in shown and others not in shown


@pytest.mark.slow
def test_two_instances_of_a_host_show_the_others_processes_as_the_others(tmp_path: Path, redis_url: str) -> None:
    """They share a store and a host name, and their processes have the same names. One that was killed is not taken
    for another's, and a worker that the common plan has stopped is gone."""
    shared = ("--engine", "sim", "--workers", "1", "--redis-url", redis_url)
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with Instance(folders[0], *shared) as one, Instance(folders[1], *shared) as two:

        def listed(instance: Instance) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
            rows = instance.ps()
            return [row for row in rows if "host" not in row], [row for row in rows if "host" in row]

        def agree() -> bool:
            lists = [listed(each) for each in (one, two)]
            pids = [[{row["pid"] for row in rows} for rows in each] for each in lists]
            states = {row["state"] for each in lists for rows in each for row in rows}
            assert "stopped" not in states and "silent" not in states
            return states == {"ready"} and pids[0][0] == pids[1][1] and pids[0][1] == pids[1][0] and bool(pids[0][0])

        eventually(agree, seconds=60)
        (pid,) = [row["pid"] for row in listed(one)[0] if row["role"] == "api"]
        os.kill(pid, signal.SIGKILL)
        assert pid not in [row["pid"] for row in listed(one)[1]]
        eventually(agree, seconds=60)


@pytest.mark.slow
def test_a_process_is_ready_only_as_far_as_the_store_confirms_it(tmp_path: Path) -> None:
    """A store that hangs, a process of another machine with the same name, and a worker that hangs."""
    with Instance(tmp_path, "--engine", "sim") as running:

        def states() -> dict[str, str]:
            return {f"{row['id']}@{row.get('host') or ''}": row["state"] for row in running.ps()}

        eventually(lambda: set(states().values()) == {"ready"}, seconds=60)
        pids = {row["id"]: row["pid"] for row in running.ps()}
        os.kill(pids["redis-1"], signal.SIGSTOP)  # one that is killed is started again at once
        try:
            found = states()
            assert found.pop("redis-1@") == "no answer" and set(found.values()) == {"no store"}
            assert "the store does not answer" in running.run("ps", "--data-dir", "data").stderr
        finally:
            os.kill(pids["redis-1"], signal.SIGCONT)
        eventually(lambda: set(states().values()) == {"ready"}, seconds=60)
        url = json.loads((tmp_path / "data" / "run" / "state.json").read_text())["redis_url"]
        with Redis.from_url(url) as store:
            other = Process(
                role="worker", id="worker-1", life="f" * 16, pid=1, host="elsewhere", state="ready", since=1
            )
            store.set(fleet_key("proc", "worker:" + "f" * 16), msgspec.json.encode(other), ex=600)
            store.zadd(fleet_key("procs"), {"worker:" + "f" * 16: time.time() * 1000 + 600_000})
            assert states() | {"worker-1@elsewhere": "ready"} == states()
            os.kill(pids["worker-1"], signal.SIGSTOP)  # last: once its lease has lapsed, it will end as fenced
            try:
                eventually(lambda: states()["worker-1@"] == "silent", seconds=60)
                assert states()["worker-1@elsewhere"] == "ready"
            finally:
                os.kill(pids["worker-1"], signal.SIGCONT)
