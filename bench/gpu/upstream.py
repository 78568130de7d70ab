"""`penstock up --upstream` of a measurement: all processes of one machine, in front of an engine's server."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from bench.penstock import own_environ, variables
from bench.processes import Processes
from bench.table1.client import TargetServer

WORKER, NAME = "worker-1", "penstock"


class UpstreamPenstock:
    """`with UpstreamPenstock(folder, url, model, slots) as penstock:` serves until the end of it. `folder` must exist.
    `slots`: how many texts the engine computes at once, which its server does not say."""

    def __init__(self, folder: Path, url: str, model: str, slots: int) -> None:
        self._url, self.model, self._data = url, model, folder / "data"
        self._processes = Processes(folder, own_environ() | variables({"upstream.slots": slots}))

    def __enter__(self) -> UpstreamPenstock:
        try:
            argv = [sys.executable, "-P", "-m", "cli", "up", "--upstream", self._url, "--port", "0"]
            self._processes.start(NAME, [*argv, "--data-dir", self._data])
            self._processes.until(lambda: self._state()["state"] == "ready", "penstock up to be ready")
        except BaseException:
            self._processes.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    @property
    def target(self) -> TargetServer:
        """Raises NotAServer."""
        return TargetServer.at(f"{self._state()['url']}/v1", self.model, name=NAME)

    def cpu_s(self) -> float:
        """Of all its processes, its store among them."""
        return sum(self._processes.cpu_s().values())

    def kill_worker(self) -> None:
        """Its only one, with SIGKILL; it starts another one."""
        os.kill(self._worker()["pid"], signal.SIGKILL)

    def restarts(self) -> int:
        """Of its worker."""
        return int(self._worker()["restarts"])

    def _state(self) -> dict[str, Any]:
        """What `up` tells of itself. Raises FileNotFoundError."""
        return dict(json.loads((self._data / "run" / "state.json").read_bytes()))

    def _worker(self) -> dict[str, Any]:
        return next(dict(each) for each in self._state()["processes"] if each["id"] == WORKER)
