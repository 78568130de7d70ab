"""Streams of jobs, followed with the official clients of Durable Streams through the death of the worker and of the API
process, and resumed at another one from a saved offset.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from batching import said
from house import House, eventually, free_port

from bench.environments import Absent, Environment, cache

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TOKENS = 300
PYTHON = Environment(name="durable-streams", packages=("durable-streams==0.1.0",))
NODE_PACKAGE = "@durable-streams/client@0.2.7"


def python_client() -> tuple[list[str], dict[str, str]]:
    """The Python client's command and variables, made once. Skips the test if it cannot be had."""
    try:
        return [str(PYTHON.prepare(lambda _: None)), str(HERE / "durable_client.py")], {}
    except Absent as error:
        pytest.skip(f"durable-streams cannot be installed here: {error}")


def node_client() -> tuple[list[str], dict[str, str]]:
    """The Node client's. Skips the test if there is no Node, or the client cannot be had."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs node and npm")
    folder = cache(os.environ) / "durable-streams-node"
    if not (folder / "node_modules" / "@durable-streams" / "client" / "package.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        install = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts", NODE_PACKAGE]
        done = subprocess.run(install, capture_output=True, timeout=300, check=False)
        if done.returncode:
            pytest.skip(f"{NODE_PACKAGE} cannot be installed here: {done.stderr.decode()[-300:]}")
    return [node, str(HERE / "durable_client.cjs")], {"NODE_PATH": str(folder / "node_modules")}


Client = Callable[[], tuple[list[str], dict[str, str]]]


class Follower(threading.Thread):
    """A client in a process of its own; `batches` grows as it prints them."""

    def __init__(self, command: list[str], environ: Mapping[str, str], *args: str) -> None:
        super().__init__(daemon=True)
        self.batches: list[tuple[str, list[dict[str, Any]]]] = []
        variables = {"PATH": os.environ["PATH"], **environ}
        self.process = subprocess.Popen([*command, *args], stdout=subprocess.PIPE, stderr=sys.stderr, env=variables)
        self.start()

    def run(self) -> None:
        with self.process.stdout:
            for line in self.process.stdout:
                offset, messages = json.loads(line)
                self.batches.append((offset, messages))

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [message for _, messages in self.batches for message in messages]

    def has(self, count: int) -> None:
        """Wait for so many messages."""
        eventually(lambda: len(self.messages) >= count)

    def ended(self) -> int:
        """Its exit status, once it has printed everything."""
        status = self.process.wait(60)
        self.join(60)
        return status

    def close(self) -> None:
        self.process.kill()
        self.ended()


@pytest.mark.parametrize(("client", "live"), [(python_client, "long-poll"), (node_client, "sse")])
def test_an_official_client_follows_a_job_through_every_death(empty_house: House, client: Client, live: str) -> None:
    """First its worker's, then that of the API process that it reads from."""
    command, environ = client()
    house, doomed_port = empty_house, free_port()
    house.environ["PENSTOCK_SIM_STEP_MS"] = "15"
    house.start_api()
    doomed = house.start_api(doomed_port)
    body = {"model": "sim", "messages": [{"role": "user", "content": live}], "max_tokens": TOKENS}
    job_id = json.loads(house.post("/v1/jobs", body)[2])["id"]
    path = f"/v1/jobs/{job_id}/stream"
    first = Follower(command, environ, f"http://127.0.0.1:{doomed_port}{path}", "-1", live)
    try:
        eventually(lambda: first.batches)  # the job begins once its reader is there
        worker = house.start("workers", "--id", "worker-1")
        first.has(10)
        house.start("workers", "--id", "worker-2")
        os.kill(worker.pid, signal.SIGKILL)
        eventually(lambda: json.loads(house.get(f"/v1/jobs/{job_id}")[1])["attempts"] == 2)
        first.has(len(first.messages) + 5)
        os.kill(doomed.pid, signal.SIGKILL)
        doomed.wait()
    finally:
        first.close()
    second = Follower(command, environ, f"{house.url}{path}", first.batches[-1][0], live)
    try:
        assert second.ended() == 0
    finally:
        second.close()
    whole = json.loads(house.get(path)[1])
    assert first.messages + second.messages == whole
    assert len(second.messages) > 1, "it was cut while the job ran"
    assert [each["event"] for each in whole] == ["delta"] * (len(whole) - 1) + ["completed"]
    assert "".join(each["data"]["text"] for each in whole[:-1]) == said(live, TOKENS)
