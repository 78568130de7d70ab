"""Engine check: builds each plug-in engine in a process of its own, as a worker would, before any worker is started.

In a process of its own, because a plug-in may import heavy libraries, take long, or crash.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from cli.deployment import Deployment
from cli.instance import DataDir
from cli.supervisor import signal_name
from penstock.config import ConfigError
from streaming.fleet.plans import pool_name
from workers.engines.registry import is_plugin

CHECK_TIMEOUT_S = 120.0
ERROR = "error: "
MANUAL = "see docs/engines.md"


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """What was found of one pool's engine. `error` is None if it can be built."""

    pool: str
    engine: str
    error: ConfigError | None


def check_plugins(deployment: Deployment, home: DataDir) -> Iterator[EngineCheck]:
    """Check the plug-in engine of each pool. `home.settings` must be saved."""
    for name, model in deployment.models.items():
        for shape, pool in model.pools.items():
            if is_plugin(pool.engine):
                program = deployment.worker_program(home, "engine-check", name, shape)
                key = f"models.{name}.engine"
                error = _error(key, [*program.argv, "--check"], program.env)
                if error is not None and error.key == key and not deployment.config.source(key):
                    error = ConfigError("up.engine", error.problem, error.hint)
                yield EngineCheck(pool_name(name, shape), pool.engine, error)


def _error(key: str, argv: Sequence[str], env: Mapping[str, str]) -> ConfigError | None:
    """What the worker says of its settings, or how else it ended; `key` is the engine's setting."""
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ConfigError(key, f"the engine was not built within {CHECK_TIMEOUT_S:.0f} s", MANUAL)
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        name = signal_name(-done.returncode)
        return ConfigError(key, f"the process that built the engine was killed by {name}", MANUAL)
    try:
        return ConfigError(*msgspec.json.decode(done.stdout.rpartition(b"\n\n")[2], type=tuple[str, str, str]))
    except msgspec.DecodeError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
    ended = f"the process that built the engine exited with {done.returncode}"
    return ConfigError(key, lines[-1].removeprefix(ERROR) if lines else ended, MANUAL)
