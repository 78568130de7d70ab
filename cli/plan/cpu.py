"""This machine's CPU as a device: its memory's bandwidth and its rate of arithmetic, measured in about a second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from planner.facts.catalogue import PlanError
from planner.facts.device import Accelerator

COPY_BYTES = 1 << 27
"""More than any cache holds."""
SIDE = 1024
"""Rows of the matrices that are multiplied."""
REPEATS = 5
LINK_BYTES_S = 1e9
"""To another machine, over 10 Gbit/s: assumed."""
HOP_S = 50e-6
"""The same: assumed."""


def measured_cpu() -> Accelerator:
    """Measure. Raises PlanError if numpy is not installed, without which nothing here computes fast enough."""
    try:
        import numpy as np  # noqa: PLC0415 - optional
    except ImportError:
        raise PlanError("--gpu cpu is measured with numpy, which is not installed: pip install '.[llamacpp]'") from None
    source, target = np.ones(COPY_BYTES // 8), np.zeros(COPY_BYTES // 8)
    left, right = np.ones((SIDE, SIDE), np.float32), np.ones((SIDE, SIDE), np.float32)
    copied = best_s(lambda: np.copyto(target, source))
    multiplied = best_s(lambda: left @ right)
    return Accelerator(
        name="cpu",
        source=f"measured now: {os.cpu_count()} cores, a copy of {COPY_BYTES >> 20} MiB, a float32 product of {SIDE}^2",
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        bytes_s=2 * COPY_BYTES / copied,  # read and written
        peak={16: 2 * SIDE**3 / multiplied},
        link_bytes_s=LINK_BYTES_S,
        hop_s=HOP_S,
        watts=0.0,
    )


def best_s(action: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs, after one that is not counted."""
    action()
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return min(found)
