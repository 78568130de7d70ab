"""Readings of GPUs by NVML: read where the driver tells, absent where it does not, never zero."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from telemetry.gpu import GpuReading, GpuReadings

NOT_SUPPORTED = 3


class FakeNvml:
    """NVML of a machine with these counters in millijoules; None: the GPU does not count."""

    def __init__(self, *counters: int | None, starts: int = 0) -> None:
        self.counters, self._starts = counters, starts

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
        counter = self.counters[(device.value or 0) - 1]
        used._obj.value = counter or 0
        return NOT_SUPPORTED if counter is None else 0

    rates: tuple[int | None, ...] = ()
    """Percent of the time in which each GPU is busy; None: it does not tell."""

    def nvmlDeviceGetUtilizationRates(self, device: ctypes.c_void_p, rates: Any) -> int:  # noqa: N802 - NVML's name
        rate = self.rates[(device.value or 0) - 1]
        rates._obj.gpu = rate or 0
        return NOT_SUPPORTED if rate is None else 0

    watts: tuple[int | None, ...] = ()
    """Milliwatts of each GPU, and bytes in use; None: it does not tell."""
    used: tuple[int | None, ...] = ()

    def nvmlDeviceGetPowerUsage(self, device: ctypes.c_void_p, power: Any) -> int:  # noqa: N802 - NVML's name
        value = self.watts[(device.value or 0) - 1]
        power._obj.value = value or 0
        return NOT_SUPPORTED if value is None else 0

    def nvmlDeviceGetMemoryInfo_v2(self, device: ctypes.c_void_p, memory: Any) -> int:  # noqa: N802 - NVML's name
        assert memory._obj.version == 0x02000028, "40 bytes, version 2: the driver refuses others"
        value = self.used[(device.value or 0) - 1]
        memory._obj.used = value or 0
        return NOT_SUPPORTED if value is None else 0


def test_a_reading_has_what_each_gpu_tells() -> None:
    nvml = FakeNvml(5000, None, None)
    nvml.rates, nvml.watts, nvml.used = (80, 0, None), (310_500, None, None), (1 << 30, None, None)
    assert GpuReadings(nvml).read() == {
        "GPU-1": GpuReading(5.0, 0.8, 310.5, float(1 << 30)),
        "GPU-2": GpuReading(busy=0.0),
    }


def test_a_driver_that_cannot_tell_memory_tells_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One before version 510 does not have the function."""
    nvml = FakeNvml(5000)
    nvml.rates, nvml.watts = (80,), (310_500,)
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetMemoryInfo_v2")
    assert GpuReadings(nvml).read() == {"GPU-1": GpuReading(5.0, 0.8, 310.5)}


def test_each_gpu_by_its_uuid() -> None:
    nvml = FakeNvml(5000, None, 0)
    energy = GpuReadings(nvml)
    assert energy.joules() == {"GPU-1": 5.0, "GPU-3": 0.0}
    nvml.counters = (7500, None, 1)
    assert energy.joules() == {"GPU-1": 7.5, "GPU-3": 0.001}


def test_a_gpu_that_does_not_tell_is_left_out() -> None:
    """Of the share of time in which it is busy, too; 0 is a reading."""
    readings = GpuReadings(FakeNvml(1, None, 3))
    readings._library.rates, readings._library.watts, readings._library.used = (80, None, 0), (None,) * 3, (None,) * 3
    assert {name: each.busy for name, each in readings.read().items()} == {"GPU-1": 0.8, "GPU-3": 0.0}


def test_a_driver_that_does_not_start_is_an_error() -> None:
    with pytest.raises(OSError, match="NVML answers 9"):
        GpuReadings(FakeNvml(starts=9))


def test_a_machine_without_the_library_has_none() -> None:
    assert GpuReadings.open("libno-such-library.so.1") is None
