"""Energy of NVIDIA GPUs: what each GPU of this machine has used since its driver was loaded, by NVML.

NVML is the driver's library, so nothing needs to be installed. A machine without it, and a GPU that does not count its
energy, give nothing: never 0.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

log = logging.getLogger(__name__)

LIBRARY = "libnvidia-ml.so.1"
UUID_BYTES = 96
MJ_PER_J = 1000


class GpuEnergy:
    """Reads the counters. Made once per process, where starting may take a second."""

    def __init__(self, library: Any) -> None:
        """`library`: NVML, as ctypes loads it. Raises OSError if it cannot be started."""
        self._library = library
        self._check(library.nvmlInit_v2())
        count = ctypes.c_uint()
        self._check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        self._devices = dict(self._device(index) for index in range(count.value))

    @classmethod
    def open(cls, path: str = LIBRARY) -> GpuEnergy | None:
        """None on a machine without NVML, or where it does not start."""
        try:
            return cls(ctypes.CDLL(path))
        except OSError as error:
            log.debug("the energy of GPUs is not known: %s", error)
            return None

    def joules(self) -> dict[str, float]:
        """What each GPU has used, by its UUID; GPUs that do not tell are left out."""
        found = {}
        for uuid, device in self._devices.items():
            used = ctypes.c_ulonglong()
            if self._library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(used)) == 0:
                found[uuid] = used.value / MJ_PER_J
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
