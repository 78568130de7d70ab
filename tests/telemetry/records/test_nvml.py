"""Readings of GPUs by NVML: read where the driver tells, absent where it does not, never zero."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest

from telemetry.gpu import GpuReading, GpuReadings

NOT_SUPPORTED = 3


class FakeNvml:
    """NVML of a machine: for each GPU millijoules, percent, milliwatts and bytes; None: it does not tell."""

    def __init__(
        self,
        *counters: int | None,
        rates: Sequence[int | None] = (),
        watts: Sequence[int | None] = (),
        used: Sequence[int | None] = (),
        starts: int = 0,
    ) -> None:
        self.counters, self._rates, self._watts, self._used, self._starts = counters, rates, watts, used, starts

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's name
        return self._starts

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802 - NVML's name
        count._obj.value = len(self.counters)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:  # noqa: N802 - NVML's name
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetUUID(self, device: ctypes.c_void_p, uuid: Any, size: int) -> int:  # noqa: N802 - NVML's name
        uuid.value = f"GPU-{device.value}".encode()
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: ctypes.c_void_p, used: Any) -> int:  # noqa: N802 - NVML's name
        return self._tell(self.counters, device, used, "value")

    def nvmlDeviceGetUtilizationRates(self, device: ctypes.c_void_p, rates: Any) -> int:  # noqa: N802 - NVML's name
        return self._tell(self._rates, device, rates, "gpu")

    def nvmlDeviceGetPowerUsage(self, device: ctypes.c_void_p, power: Any) -> int:  # noqa: N802 - NVML's name
        return self._tell(self._watts, device, power, "value")

    def nvmlDeviceGetMemoryInfo_v2(self, device: ctypes.c_void_p, memory: Any) -> int:  # noqa: N802 - NVML's name
        assert memory._obj.version == 0x02000028, "40 bytes, version 2: the driver refuses others"
        return self._tell(self._used, device, memory, "used")

    @staticmethod
    def _tell(values: Sequence[int | None], device: ctypes.c_void_p, into: Any, field: str) -> int:
        value = values[(device.value or 0) - 1] if values else None
        setattr(into._obj, field, value or 0)
        return NOT_SUPPORTED if value is None else 0


def test_a_reading_has_what_each_gpu_tells() -> None:
    """By its UUID; one that tells nothing is left out, and 0 is a reading."""
    nvml = FakeNvml(5000, None, None, rates=(80, 0, None), watts=(310_500, None, None), used=(1 << 30, None, None))
    readings = GpuReadings(nvml)
    assert readings.read() == {
        "GPU-1": GpuReading(5.0, 0.8, 310.5, float(1 << 30)),
        "GPU-2": GpuReading(busy=0.0),
    }
    nvml.counters = (7500, None, 1)
    assert readings.joules() == {"GPU-1": 7.5, "GPU-3": 0.001}


def test_a_driver_that_cannot_tell_memory_tells_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One before version 510 does not have the function."""
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetMemoryInfo_v2")
    nvml = FakeNvml(5000, rates=(80,), watts=(310_500,))
    assert GpuReadings(nvml).read() == {"GPU-1": GpuReading(5.0, 0.8, 310.5)}


def test_a_driver_that_does_not_start_is_an_error_and_one_that_is_not_there_is_none() -> None:
    with pytest.raises(OSError, match="NVML answers 9"):
        GpuReadings(FakeNvml(starts=9))
    assert GpuReadings.open("libno-such-library.so.1") is None
