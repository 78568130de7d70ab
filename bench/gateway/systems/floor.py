"""The engine behind a bare socket server: what nothing at all costs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bench.gateway.system import Say, ServingGateway
from bench.ports import free_port
from bench.processes import Processes
from workers.engines.sim.settings import SimSettings


class Floor:
    """See bench.gateway.floor."""

    name = "floor"
    title = "engine behind a bare asyncio socket server"

    def prepare(self, say: Say) -> None:
        """Nothing is needed."""

    @contextmanager
    def serve(self, folder: Path, engine: SimSettings) -> Iterator[ServingGateway]:
        with Processes(folder) as processes:
            yield ServingGateway(start_engine_server(processes, engine), [processes])


def start_engine_server(processes: Processes, engine: SimSettings) -> int:
    """Also what other gateways forward to. Returns its port. Raises Died."""
    port, settings = free_port(), msgspec.json.encode(engine).decode()
    processes.start("engine", [sys.executable, "-m", "bench.gateway.floor", str(port), settings])
    processes.wait_port(port)
    return port
