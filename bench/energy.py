"""Energy of a measured server's GPUs: by NVML if it runs on this machine, else by the metrics of a Penstock.

Where neither tells, the energy is unknown: None, never 0.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from bench.load.target import TargetServer
from telemetry.gpu import GpuReadings

METRIC = re.compile(r'^penstock_gpu_energy_joules\{[^}]*gpu="([^"]+)"[^}]*\} (\S+)$', re.MULTILINE)
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Counters = Mapping[str, float]
"""Joules that each GPU has used so far, by its UUID."""


@dataclass(frozen=True, slots=True)
class EnergyMeter:
    """Reads the counters of a server's GPUs."""

    read: Callable[[], Counters]
    source: str
    """Of the counters; "": there is none."""

    @classmethod
    def of(cls, server: TargetServer, gpus: GpuReadings | None) -> EnergyMeter:
        """The first source that tells now. `gpus`: those of this machine."""
        if server.host in LOOPBACK and gpus is not None and gpus.joules():
            return cls(gpus.joules, "NVML")
        metrics = partial(counters_of, server)
        return cls(metrics, "its metrics") if metrics() else cls(dict, "")


def counters_of(server: TargetServer) -> Counters:
    """The counters in a Penstock's metrics; none if it does not show any."""
    try:
        status, text = server.page(urlsplit(server.path).path.removesuffix("/v1") + "/metrics")
        found = METRIC.findall(text.decode(errors="replace")) if status == 200 else ()
        return {uuid: float(value) for uuid, value in found}
    except (OSError, http.client.HTTPException, ValueError):  # it is no Penstock, or not one that tells
        return {}


def used(before: Counters, after: Counters) -> float | None:
    """Joules between two readings, of all GPUs that tell in both. None: none does, or a counter stood still or fell,
    as it does when the driver is loaded again."""
    steps = [after[uuid] - before[uuid] for uuid in before if uuid in after]
    return sum(steps) if steps and min(steps) > 0 else None
