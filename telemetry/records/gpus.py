"""Readings of GPUs: what one source, NVML or a DCGM exporter, tells of each GPU at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class GpuReading(NamedTuple):
    """Of one GPU. None: the source does not tell, which is never 0."""

    joules: float | None = None
    """Used since its driver was loaded."""
    busy: float | None = None
    """Share of the last sample period in which it ran a kernel."""
    watts: float | None = None
    memory_bytes: float | None = None
    """In use."""


class GpuSource(Protocol):
    """Tells of the GPUs that it sees, by UUID. Never waits."""

    def read(self) -> Mapping[str, GpuReading]:
        """The readings now; of a GPU that tells nothing, there is none."""
