"""The gateway most people write first: FastAPI, StreamingResponse, and one PUBLISH per token on the same Redis."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bench.environments import Environment
from bench.gateway.system import ROOT, Say, ServingGateway
from bench.penstock import start_redis
from bench.ports import free_port
from bench.processes import Processes
from workers.engines.sim.settings import SimSettings

ENVIRONMENT = Environment(
    name="fastapi",
    packages=("fastapi==0.165.0", "uvicorn==0.54.0", "uvloop==0.23.0", "httptools==0.9.0", "redis[hiredis]==8.1.0"),
)


class Plain:
    """See bench.gateway.guests.plain_api and bench.gateway.plain_worker."""

    name = "plain"
    title = "FastAPI + StreamingResponse, one PUBLISH per token"

    def prepare(self, say: Say) -> None:
        self._python = ENVIRONMENT.prepare(say)

    @contextmanager
    def serve(self, folder: Path, engine: SimSettings) -> Iterator[ServingGateway]:
        with Processes(folder) as processes:
            url, port = start_redis(processes), free_port()
            settings = msgspec.json.encode(engine).decode()
            processes.start("worker", [sys.executable, "-m", "bench.gateway.plain_worker", url, settings])
            api: list[str | Path] = [self._python, "-m", "bench.gateway.guests.plain_api", str(port), url]
            processes.start("api", api, {"PYTHONPATH": str(ROOT)})
            processes.wait_port(port)
            yield ServingGateway(port, [processes])
