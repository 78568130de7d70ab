"""Engine check: builds each plug-in engine in a process of its own, as a worker would, before any worker is started.

In a process of its own, because a plug-in may import heavy libraries, take long, or crash.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cli.deployment import Deployment
from cli.instance import DataDir
from streaming.fleet.plans import pool_name
from workers.engines.registry import is_plugin

CHECK_TIMEOUT_S = 120.0
ERROR = "error: "


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """What was found of one pool's engine. `problem` is "" if it can be built."""

    pool: str
    engine: str
    problem: str


def check_plugins(deployment: Deployment, home: DataDir) -> Iterator[EngineCheck]:
    """Check the plug-in engine of each pool. `home.settings` must be saved."""
    for name, model in deployment.models.items():
        for shape, pool in model.pools.items():
            if is_plugin(pool.engine):
                program = deployment.worker_program(home, "engine-check", name, shape)
                problem = _problem([*program.argv, "--check"], program.env)
                yield EngineCheck(pool_name(name, shape), pool.engine, problem)


def _problem(argv: Sequence[str], env: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it was not built within {CHECK_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"its process was killed by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    told = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    return (told or lines or [f"its process exited with {done.returncode}"])[-1]
