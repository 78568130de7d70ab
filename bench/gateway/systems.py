"""Gateways that are compared: each is made ready once, then started for every round."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from bench.environments import ROOT, Environment, Installable, Peer, Ready
from bench.gateway.engine import MODEL
from bench.gateway.figures import ENGINE, UPSTREAM
from bench.http import fetch
from bench.penstock import Penstock as Deployment
from bench.penstock import start_redis
from bench.ports import free_port
from bench.processes import Processes
from streaming.redis.settings import Durability
from workers.engines.sim.settings import SimSettings


@dataclass(frozen=True, slots=True)
class ServingGateway:
    """A system that answers POST /v1/chat/completions."""

    port: int
    groups: Sequence[Processes]

    @property
    def watch(self) -> dict[str, int]:
        """All its processes by name."""
        return {name: pid for group in self.groups for name, pid in group.pids().items()}

    def check(self) -> None:
        """All of them live. Raises Died."""
        for group in self.groups:
            group.check()


class GatewaySystem(Installable, Protocol):
    """One of the systems compared; its name is that of the command line."""

    def serve(self, folder: Path, engine: SimSettings) -> AbstractContextManager[ServingGateway]:
        """Serving inside the `with`; every process has ended behind it. `folder` is empty. Raises Died, Absent."""


class Floor(Ready):
    """See bench.gateway.floor."""

    name = "floor"
    title = "engine behind a bare asyncio socket server"

    @contextmanager
    def serve(self, folder: Path, engine: SimSettings) -> Iterator[ServingGateway]:
        with Processes(folder) as processes:
            yield ServingGateway(start_engine_server(processes, engine), [processes])


def start_engine_server(processes: Processes, engine: SimSettings) -> int:
    """Also what other gateways forward to. Returns its port. Raises Died."""
    return processes.serve(ENGINE, "bench.gateway.floor", msgspec.json.encode(engine).decode())


OPTIONS: dict[Durability, tuple[str, ...]] = {
    "D0": ("appendonly no",),
    "D1": ("appendfsync everysec",),
    "D2": ("appendfsync always",),
    "D3": ("appendfsync everysec", "min-replicas-to-write 1", "repl-diskless-sync-delay 0"),
}
"""What each level needs of the server."""

KEPT: dict[Durability, str] = {
    "D0": "nothing kept",
    "D1": "append-only file, fsync everysec",
    "D2": "append-only file, fsync always",
    "D3": "everysec, every answer waits for a replica",
}

DEFAULTS = msgspec.to_builtins(SimSettings())


@dataclass(frozen=True)
class PenstockGateway(Ready):
    """All processes that `penstock up` starts, with the durable log on; out of source tree `tree` instead of the one
    installed."""

    name: str
    level: Durability = "D1"
    apis: int = 1
    tree: Path | None = None

    @property
    def title(self) -> str:
        apis = f", {self.apis} API processes" if self.apis > 1 else ""
        return f"Penstock at {self.level}: {KEPT[self.level]}{apis}"

    @contextmanager
    def serve(self, folder: Path, engine: SimSettings) -> Iterator[ServingGateway]:
        # Only what differs from the defaults: a tree of another commit may not know the rest.
        given = {f"sim.{key}": value for key, value in msgspec.to_builtins(engine).items() if value != DEFAULTS[key]}
        with self.deployed(folder, "sim", given) as serving:
            yield serving

    @contextmanager
    def deployed(self, folder: Path, engine: str, settings: Mapping[str, object]) -> Iterator[ServingGateway]:
        """With this engine and its settings."""
        for name in ("store", "metrics", "penstock"):
            (folder / name).mkdir()
        with Processes(folder / "store") as store:
            url = start_redis(store, *OPTIONS[self.level])
            if self.level == "D3":
                start_redis(store, f"replicaof 127.0.0.1 {url.split(':')[-1].split('/')[0]}", name="replica")
            with Deployment(
                folder / "penstock",
                engine=engine,
                apis=self.apis,
                schedulers=1,
                offline=1,
                redis_url=url,
                settings={"redis.durability": self.level, "telemetry.metrics_dir": folder / "metrics", **settings},
                tree=self.tree,
            ) as penstock:
                yield ServingGateway(penstock.port, [store, penstock.processes])


class UpstreamGateway(PenstockGateway):
    """The same, with the engine `upstream` in front of the engine server that the other gateways forward to."""

    @property
    def title(self) -> str:
        return f"{super().title}; its engine is `upstream`, in front of the floor's engine server"

    @contextmanager
    def serve(self, folder: Path, engine: SimSettings) -> Iterator[ServingGateway]:
        (folder / "server").mkdir()
        with Processes(folder / "server") as server:
            url = f"http://127.0.0.1:{start_engine_server(server, engine)}/v1"
            # A server of this kind says how many requests it runs at once.
            with self.deployed(folder, "upstream", {"upstream.urls": url, "upstream.kind": "sglang"}) as serving:
                yield replace(serving, groups=[server, *serving.groups])


ROUTER_ENVIRONMENT = Environment(name="sglang-router", packages=("sglang-router==0.3.2",))


class Router(Peer):
    """One router and one engine server; it forwards bytes and keeps nothing."""

    name = "router"
    title = f"SGLang router ({ROUTER_ENVIRONMENT.packages[0]}) in front of the floor's engine server"
    environment = ROUTER_ENVIRONMENT

    @contextmanager
    def serve(self, folder: Path, engine: SimSettings) -> Iterator[ServingGateway]:
        with Processes(folder) as processes:
            behind, port, metrics = start_engine_server(processes, engine), free_port(), free_port()
            ways = ("--worker-urls", f"http://127.0.0.1:{behind}", "--host", "127.0.0.1", "--port", str(port))
            rest = ("--policy", "round_robin", "--prometheus-port", str(metrics), "--log-level", "warn")
            processes.start("router", (self.python, "-m", "sglang_router.launch_router", *ways, *rest))
            processes.wait_port(port)
            yield ServingGateway(port, [processes])


DYNAMO_ENVIRONMENT = Environment(
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


class Dynamo(Peer):
    """One frontend, one worker; no etcd and no NATS, for one machine needs neither."""

    name = "dynamo"
    title = f"NVIDIA Dynamo ({DYNAMO_ENVIRONMENT.bare[0]}): Rust frontend and Python worker"
    environment = DYNAMO_ENVIRONMENT

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
            listen = ("--http-host", "127.0.0.1", "--http-port", str(port))
            processes.start("frontend", (self.python, "-m", "dynamo.frontend", *listen))
            worker = "bench.gateway.peers.dynamo_worker"
            processes.start("worker", (self.python, "-m", worker, folder / "model", settings))
            processes.until(lambda: b'"id"' in fetch(port, "GET", "/v1/models")[2], "the frontend to know the model")
            yield ServingGateway(port, [processes])


LITELLM_ENVIRONMENT = Environment(name="litellm", packages=("litellm[proxy]==1.106.2",))

CONFIG = """
model_list:
  - model_name: {model}
    litellm_params:
      model: openai/{model}
      api_base: http://127.0.0.1:{port}/v1
      api_key: none
"""

LITELLM_ENVIRON = {
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
}
"""No keys, as for the others; its list of prices is not fetched; it does not log every request."""


class Litellm(Peer):
    """One proxy process, without a database."""

    name = "litellm"
    title = f"LiteLLM proxy ({LITELLM_ENVIRONMENT.packages[0]}) in front of the floor's engine server"
    environment = LITELLM_ENVIRONMENT

    @contextmanager
    def serve(self, folder: Path, engine: SimSettings) -> Iterator[ServingGateway]:
        with Processes(folder, {**os.environ, **LITELLM_ENVIRON}) as processes:
            port, config = free_port(), folder / "config.yaml"
            config.write_text(CONFIG.format(model=MODEL, port=start_engine_server(processes, engine)))
            proxy = self.python.parent / "litellm"
            processes.start("litellm", [proxy, "--config", config, "--host", "127.0.0.1", "--port", str(port)])
            processes.wait_port(port)
            yield ServingGateway(port, [processes])


def systems() -> list[GatewaySystem]:
    """All of them; those that the goals compare are measured next to each other."""
    return [
        Floor(),
        PenstockGateway("penstock", "D1"),
        UpstreamGateway(UPSTREAM, "D1"),
        Router(),
        Dynamo(),
        PenstockGateway("penstock-d0", "D0"),
        PenstockGateway("penstock-d2", "D2"),
        PenstockGateway("penstock-d3", "D3"),
        PenstockGateway("penstock-2", "D1", apis=2),
        Litellm(),
    ]
