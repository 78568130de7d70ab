"""Readings of NVIDIA GPUs by NVML: energy, power and memory of each GPU of this machine, and how busy it is.

NVML is the driver's library, so nothing needs to be installed. A machine without it, and a GPU that does not tell,
give nothing: never 0.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

from telemetry.records.gpus import GpuReading

log = logging.getLogger(__name__)

LIBRARY = "libnvidia-ml.so.1"
UUID_BYTES = 96
MJ_PER_J, MW_PER_W = 1000, 1000
NOTHING = GpuReading()


class _Rates(ctypes.Structure):
    """NVML's nvmlUtilization_t, in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """NVML's nvmlMemory_v2_t, in bytes. Its first version counts as used what the driver keeps for itself."""

    _fields_ = (
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    )


class GpuReadings:
    """Reads them. Made once per process, where starting may take a second."""

    def __init__(self, library: Any) -> None:
        """`library`: NVML, as ctypes loads it. Raises OSError if it cannot be started."""
        self._library = library
        self._check(library.nvmlInit_v2())
        count = ctypes.c_uint()
        self._check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        self._devices = dict(self._device(index) for index in range(count.value))

    @classmethod
    def open(cls, path: str = LIBRARY) -> GpuReadings | None:
        """None on a machine without NVML, or where it does not start."""
        try:
            return cls(ctypes.CDLL(path))
        except OSError as error:
            log.debug("the readings of GPUs are not known: %s", error)
            return None

    def joules(self) -> dict[str, float]:
        """What each GPU has used since its driver was loaded, by its UUID; GPUs that do not tell are left out."""
        found = {}
        for uuid, device in self._devices.items():
            used = ctypes.c_ulonglong()
            if self._library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(used)) == 0:
                found[uuid] = used.value / MJ_PER_J
        return found

    def busy(self) -> dict[str, float]:
        """For which share of the driver's last sample period, up to a second, each GPU ran a kernel; as `joules`."""
        found = {}
        for uuid, device in self._devices.items():
            rates = _Rates()
            if self._library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates)) == 0:
                found[uuid] = rates.gpu / 100
        return found

    def read(self) -> dict[str, GpuReading]:
        """Everything that the driver tells of each GPU, by its UUID."""
        joules, busy = self.joules(), self.busy()
        tell_memory = getattr(self._library, "nvmlDeviceGetMemoryInfo_v2", None)  # drivers since 2022
        found = {}
        for uuid, device in self._devices.items():
            milliwatts, memory = ctypes.c_uint(), _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
            tells_power = self._library.nvmlDeviceGetPowerUsage(device, ctypes.byref(milliwatts)) == 0
            tells_memory = tell_memory is not None and tell_memory(device, ctypes.byref(memory)) == 0
            reading = GpuReading(
                joules.get(uuid),
                busy.get(uuid),
                milliwatts.value / MW_PER_W if tells_power else None,
                float(memory.used) if tells_memory else None,
            )
            if reading != NOTHING:
                found[uuid] = reading
        return found

    def _device(self, index: int) -> tuple[str, ctypes.c_void_p]:
        device, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(UUID_BYTES)
        self._check(self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)))
        self._check(self._library.nvmlDeviceGetUUID(device, uuid, UUID_BYTES))
        return uuid.value.decode(), device

    @staticmethod
    def _check(status: int) -> None:
        """Raises OSError."""
        if status != 0:
            raise OSError(f"NVML answers {status}")
