"""`penstock up` of a test, in a folder of its own."""

from __future__ import annotations

import http.client
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Self

from house import end, eventually

from cli.__main__ import main
from cli.instance import DataDir
from cli.instance import Instance as State

ROOT = Path(__file__).parents[2]


def said_here(*words: str) -> tuple[str, int, str]:
    """What a command says on stdout, its exit code, and its errors; in this process, which takes no start, and in a
    thread without an event loop."""
    with (
        redirect_stdout(io.StringIO()) as said,
        redirect_stderr(io.StringIO()) as errors,
        ThreadPoolExecutor(1) as thread,
    ):
        code = thread.submit(main, list(words)).result()
    return said.getvalue(), code, errors.getvalue()


def a_state(home: DataDir, url: str = "http://127.0.0.1:1", **changes: Any) -> State:
    """The state of an instance of a data folder."""
    return State(**{
        "version": "1", "pid": os.getpid(), "state": "ready", "phase": "", "url": url, "redis_url": "",
        "data_dir": str(home.path), "engine": "sim", "models": ("sim",), "started": 1.0,
    } | changes)  # fmt: skip


@contextmanager
def running_at(url: str, folder: Path, **changes: Any) -> Iterator[DataDir]:
    """A data folder whose instance says that it answers there."""
    home = DataDir(folder)
    with home.lock():
        home.prepare()
        home.write(a_state(home, url, **changes))
        yield home


class Instance:
    """`penstock up` in a folder of its own; without an offline process, whose start costs most, unless `batches`."""

    def __init__(self, folder: Path, *words: str, batches: bool = False) -> None:
        self.folder = folder
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        self._environ |= {"PYTHONPATH": str(ROOT), "PENSTOCK_UPSTREAM_CACHE_PROMPT": "false"}
        self._environ["PENSTOCK_OFFLINE_PROCESSES"] = str(int(batches))
        command = [sys.executable, "-m", "cli", "up", "--port", "0", "--data-dir", "data", *words]
        with (folder / "out").open("wb") as out:
            self._process = subprocess.Popen(command, cwd=folder, env=self._environ, stdout=out, stderr=out)
        try:
            eventually(self._is_ready, seconds=120)
        except BaseException:  # who calls has nothing to close
            self.close()
            raise
        state = json.loads((folder / "data" / "run" / "state.json").read_text())
        self.port = int(state["url"].rpartition(":")[2])

    def _is_ready(self) -> bool:
        said = (self.folder / "out").read_text()
        assert self._process.poll() is None, said
        return "  Stop" in said

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cli", *words]
        return subprocess.run(command, cwd=self.folder, env=self._environ, capture_output=True, text=True, check=False)

    def ps(self) -> list[dict[str, Any]]:
        """What `penstock ps --json` says."""
        return [*map(json.loads, said_here("ps", "--json", "--data-dir", str(self.folder / "data"))[0].splitlines())]

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        found = reply.status, json.loads(reply.read())
        connection.close()
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        end(self._process)
