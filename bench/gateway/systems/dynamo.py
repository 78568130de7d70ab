"""NVIDIA Dynamo: its Rust frontend, which tokenizes, and a Python worker around the same engine, joined over TCP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bench.environments import Environment
from bench.gateway.system import ROOT, Say, ServingGateway
from bench.ports import free_port
from bench.processes import Processes
from workers.engines.sim.settings import SimSettings

ENVIRONMENT = Environment(
    name="dynamo",
    packages=(
        "ai-dynamo-runtime==1.6.1",
        "msgspec==0.22.0",
        "prometheus-client==0.26.0",
        "pyzmq==27.3.0",
        "tokenizers==0.23.3",
        "transformers==5.23.0",
        "uvloop==0.23.0",
    ),
    bare=("ai-dynamo==1.6.1",),
)
"""`ai-dynamo` comes without its dependencies: they bring simulation and Kubernetes packages that nothing here uses."""


class Dynamo:
    """One frontend, one worker; no etcd and no NATS, for one machine needs neither."""

    name = "dynamo"
    title = f"NVIDIA Dynamo ({ENVIRONMENT.bare[0]}): Rust frontend and Python worker"

    def prepare(self, say: Say) -> None:
        self._python = ENVIRONMENT.prepare(say)

    @contextmanager
    def serve(self, folder: Path, engine: SimSettings) -> Iterator[ServingGateway]:
        environ = {
            **os.environ,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "warn",
            "HF_HUB_OFFLINE": "1",
            "HOME": str(folder),  # where it keeps copies of models
            "PYTHONPATH": str(ROOT),
        }
        with Processes(folder, environ) as processes:
            port, settings = free_port(), msgspec.json.encode(engine).decode()
            frontend: list[str | Path] = [
                self._python,
                "-m",
                "dynamo.frontend",
                "--http-host",
                "127.0.0.1",
                "--http-port",
                str(port),
            ]
            processes.start("frontend", frontend)
            worker: list[str | Path] = [
                self._python,
                "-m",
                "bench.gateway.guests.dynamo_worker",
                folder / "model",
                settings,
            ]
            processes.start("worker", worker)
            processes.wait_page(port, "/v1/models", b'"id"')
            yield ServingGateway(port, [processes])
