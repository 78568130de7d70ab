"""Penstock as it is run, at each level of durability that one machine can keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.gateway.system import Say, ServingGateway
from bench.penstock import Penstock as Deployment
from bench.penstock import start_redis
from bench.processes import Processes
from streaming.settings import Durability
from workers.engines.sim.settings import SimSettings

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
class PenstockGateway:
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

    def prepare(self, say: Say) -> None:
        """Nothing is needed."""

    @contextmanager
    def serve(self, folder: Path, engine: SimSettings) -> Iterator[ServingGateway]:
        for name in ("store", "metrics", "penstock"):
            (folder / name).mkdir()
        with Processes(folder / "store") as store:
            url = start_redis(store, *OPTIONS[self.level])
            if self.level == "D3":
                start_redis(store, f"replicaof 127.0.0.1 {url.split(':')[-1].split('/')[0]}", name="replica")
            with Deployment(
                folder / "penstock",
                apis=self.apis,
                schedulers=1,
                offline=1,
                redis_url=url,
                settings=self._settings(folder, engine),
                tree=self.tree,
            ) as penstock:
                yield ServingGateway(penstock.port, [store, penstock.processes])

    def _settings(self, folder: Path, engine: SimSettings) -> dict[str, object]:
        return {
            "redis.durability": self.level,
            "telemetry.metrics_dir": folder / "metrics",
            # Only what differs from the defaults: a tree of another commit may not know the rest.
            **{f"sim.{key}": value for key, value in msgspec.to_builtins(engine).items() if value != DEFAULTS[key]},
        }
