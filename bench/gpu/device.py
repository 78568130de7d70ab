"""The GPU itself: what it is, how fast it copies and multiplies, and the energy it has used."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from planner.facts.device import Accelerator
from telemetry.gpu import GpuReadings

COPY_BYTES = 1 << 32
SIDE = 8192


class NoGpu(RuntimeError):
    """There is none, or torch cannot use it."""


class Device:
    """The first GPU. Raises NoGpu."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise NoGpu("this needs a CUDA GPU and PyTorch with Triton")
        self.name = torch.cuda.get_device_name()
        self.memory = torch.cuda.get_device_properties(0).total_memory
        self._energy = GpuReadings.open()

    def joules(self) -> float | None:
        """Used so far by all GPUs of this machine; None where the driver does not tell."""
        used = self._energy.joules() if self._energy else {}
        return sum(used.values()) if used else None

    def idle_watts(self, seconds: float = 3.0) -> float | None:
        """With memory taken and nothing running."""
        torch.cuda.synchronize()
        before = self.joules()
        time.sleep(seconds)
        after = self.joules()
        return None if before is None or after is None else (after - before) / seconds

    def measured(self) -> Accelerator:
        """What the planner needs to know of it, as measured now; its links and its power are not."""
        return Accelerator(
            name=self.name,
            source="measured by bench gpu",
            memory_bytes=self.memory,
            bytes_s=self.bandwidth(),
            peak={16: self.flops()},
            link_bytes_s=1.0,
            hop_s=0.0,
            watts=0.0,
        )

    def bandwidth(self) -> float:
        """Bytes a second of a large copy, read and written."""
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        return 2 * COPY_BYTES / seconds_of(lambda: target.copy_(source), 10)

    def flops(self) -> float:
        """Operations a second of a large bfloat16 product of random matrices."""
        left, right = (torch.randn(SIDE, SIDE, device="cuda").to(torch.bfloat16) for _ in range(2))
        return 2 * SIDE**3 / seconds_of(lambda: torch.mm(left, right), 10)


def seconds_of(work: Callable[[], object], times: int) -> float:
    """The median, by events of the device, after three that do not count."""
    for _ in range(3):
        work()
    taken = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return float(median(taken))
