"""The SGLang router, written in Rust, in front of the floor's engine server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.environments import Environment
from bench.gateway.system import Say, ServingGateway
from bench.gateway.systems.floor import start_engine_server
from bench.ports import free_port
from bench.processes import Processes
from workers.engines.sim.settings import SimSettings

ENVIRONMENT = Environment(name="sglang-router", packages=("sglang-router==0.3.2",))


class Router:
    """One router and one engine server; it forwards bytes and keeps nothing."""

    name = "router"
    title = f"SGLang router ({ENVIRONMENT.packages[0]}) in front of the floor's engine server"

    def prepare(self, say: Say) -> None:
        self._python = ENVIRONMENT.prepare(say)

    @contextmanager
    def serve(self, folder: Path, engine: SimSettings) -> Iterator[ServingGateway]:
        with Processes(folder) as processes:
            behind, port, metrics = start_engine_server(processes, engine), free_port(), free_port()
            argv: list[str | Path] = [self._python, "-m", "sglang_router.launch_router", "--policy", "round_robin"]
            argv += ["--worker-urls", f"http://127.0.0.1:{behind}", "--host", "127.0.0.1", "--port", str(port)]
            argv += ["--prometheus-port", str(metrics), "--log-level", "warn"]
            processes.start("router", argv)
            processes.wait_port(port)
            yield ServingGateway(port, [processes])
