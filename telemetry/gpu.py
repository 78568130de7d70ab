"""GPU readings, by NVML or a DCGM exporter, and the sampler that writes a process's use of its machine as records."""

from __future__ import annotations

import asyncio
import ctypes
import http.client
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from penstock.loops import ExpectedErrors, coalesced
from telemetry.records.schema import SampleRecord
from telemetry.records.writer import RecordSink


class GpuReading(NamedTuple):
    """Reading of one GPU. None: the source does not tell, which is never 0."""

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


log = logging.getLogger(__name__)

INTERVAL_S, TIMEOUT_S = 5.0, 3.0
MAX_AGE_S = 30.0
"""The exporter itself reads its GPUs every 30 s by default; an older answer is none."""
MAX_BYTES = 8 << 20
FIELDS: Mapping[str, tuple[str, float]] = {
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("joules", 1e-3),
    "DCGM_FI_DEV_POWER_USAGE": ("watts", 1.0),
    "DCGM_FI_DEV_GPU_UTIL": ("busy", 1e-2),
    "DCGM_FI_DEV_FB_USED": ("memory_bytes", 1024.0**2),
}
"""The exporter's metrics, with the field of a reading and the factor to its unit: they are in mJ, W, percent, MiB."""
OF_AN_INSTANCE = "GPU_I_ID"
"""Label of a series about a part of a GPU (MIG), of which only power and energy are those of the whole."""
BLANKS = ((2.0**31 - 16, 2.0**31), (2.0**47, 2.0**47 + 16), (2.0**63 - 2048, float("inf")))
"""From where to where DCGM's marks for unknown values are: 32-bit numbers, floating-point ones, 64-bit ones."""


def readings_of(text: str) -> dict[str, GpuReading]:
    """The readings in an exporter's text, by UUID. Series of one GPU that differ in their pod say the same; the largest
    counts. Raises ValueError if it is not the text of an exporter."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - only where it is configured

    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            field, factor = FIELDS.get(sample.name.removesuffix("_total"), ("", 0.0))
            uuid, value = sample.labels.get("UUID"), sample.value
            whole = field in ("joules", "watts") or not sample.labels.get(OF_AN_INSTANCE)
            if field and uuid and whole and value >= 0 and not any(low <= value < high for low, high in BLANKS):
                own = found.setdefault(uuid, {})
                own[field] = max(own.get(field, 0.0), value * factor)
    return {uuid: GpuReading(**fields) for uuid, fields in found.items()}


class DcgmReadings:
    """Asks an exporter again and again, in a thread of its own. Its readings are at most MAX_AGE_S old.

    Clusters have such an exporter on every machine, also where a worker's container does not have the driver's library.
    DCGM marks what it does not know by numbers that no GPU can have; they count as absent, as does an exporter that
    does not answer.
    """

    def __init__(self, url: str, *, interval_s: float = INTERVAL_S) -> None:
        """`url`: http://HOST:PORT/metrics of the exporter of this machine."""
        self._url, self._interval_s = urlsplit(url), interval_s
        self._read_at, self._readings = 0.0, dict[str, GpuReading]()
        address = self._url.netloc.rpartition("@")[2].replace("%", "%%")
        message = f"the exporter of GPUs at {address} tells nothing: %s"
        self._outage = ExpectedErrors((OSError, http.client.HTTPException, ValueError), log.warning, message, once=True)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep_asking, name="dcgm", daemon=True)
        self._thread.start()

    def read(self) -> Mapping[str, GpuReading]:
        """The last readings; none if they are too old."""
        return self._readings if time.monotonic() - self._read_at < MAX_AGE_S else {}

    def close(self) -> None:
        """End the thread."""
        self._done.set()
        self._thread.join()

    def _keep_asking(self) -> None:
        while True:
            with self._outage:
                self._readings, self._read_at = readings_of(self._fetch()), time.monotonic()
                if not self._readings:
                    raise ValueError("its answer has no GPU")
            if self._done.wait(self._interval_s):
                return

    def _fetch(self) -> str:
        """Raises OSError, HTTPException, ValueError."""
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", self._url.path or "/metrics")
            with connection.getresponse() as answer:
                if answer.status != http.client.OK:
                    raise ValueError(f"it answers {answer.status}")
                return answer.read(MAX_BYTES).decode()
        finally:
            connection.close()


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
    """GPU readings by NVML. Made once per process, where starting may take a second.

    NVML is the driver's library, so nothing needs to be installed. A machine without it, and a GPU that does not tell,
    give nothing: never 0.
    """

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
        return {uuid: each.joules for uuid, each in self.read().items() if each.joules is not None}

    def read(self) -> dict[str, GpuReading]:
        """Everything that the driver tells of each GPU, by its UUID."""
        found = {}
        for uuid, device in self._devices.items():
            millijoules, milliwatts, rates = ctypes.c_ulonglong(), ctypes.c_uint(), _Rates()
            memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
            reading = GpuReading(
                millijoules.value / MJ_PER_J if self._told(device, "TotalEnergyConsumption", millijoules) else None,
                rates.gpu / 100 if self._told(device, "UtilizationRates", rates) else None,
                milliwatts.value / MW_PER_W if self._told(device, "PowerUsage", milliwatts) else None,
                float(memory.used) if self._told(device, "MemoryInfo_v2", memory) else None,
            )
            if reading != NOTHING:
                found[uuid] = reading
        return found

    def _told(self, device: ctypes.c_void_p, what: str, into: Any) -> bool:
        """Ask a GPU; False if it does not tell, or the driver (MemoryInfo_v2 came in 2022) does not know the call."""
        call = getattr(self._library, f"nvmlDeviceGet{what}", None)
        return call is not None and call(device, ctypes.byref(into)) == 0

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


LAG_CHECK_INTERVAL_S, BACKGROUND_LAG_CHECK_INTERVAL_S = 0.5, 1.0
"""In API processes and workers, whose lag delays tokens; in other processes."""
MIN_LOGGED_LAG_S = 1.0
"""A shorter lag is normal on a busy machine and is not logged."""

Facts = Mapping[str, Any]
"""Fields of a sample that only the process knows, by name."""


class Sampler:
    """Sampler of one process: CPU time, memory, event-loop lag, GPUs. `facts` is called in the event loop."""

    def __init__(
        self,
        sink: RecordSink,
        role: str,
        process: str,
        *,
        model: str = "",
        facts: Callable[[], Facts] = dict,
        interval_s: float = 10.0,
    ) -> None:
        check_s = LAG_CHECK_INTERVAL_S if role in ("api", "worker") else BACKGROUND_LAG_CHECK_INTERVAL_S
        self._sink, self._facts, self._interval_s, self._check_s = sink, facts, interval_s, min(check_s, interval_s)
        self._who: Facts = {"role": role, "process": process, "model": model, "pid": os.getpid()}
        self._lag_s = 0.0

    async def keep_sampling(self) -> None:
        """Sample until cancelled; the last sample is written then."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        try:
            while True:
                if loop.time() >= due:
                    self.sample()
                    due = loop.time() + self._interval_s
                expected = loop.time() + coalesced(self._check_s)
                await asyncio.sleep(expected - loop.time())
                late_s = loop.time() - expected
                self._lag_s = max(self._lag_s, late_s)
                if late_s > MIN_LOGGED_LAG_S:  # it explains otherwise unexplained stalls
                    log.warning("the event loop was held up for %.1f s", late_s)
        finally:
            self.sample()

    def sample(self) -> None:
        """Write one sample."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        self._sink.write(
            SampleRecord(
                at_us=int(time.time() * 1e6),
                cpu_s=round(used.ru_utime + used.ru_stime, 4),
                rss_bytes=resident_bytes(),
                lag_ms=round(self._lag_s * 1000, 2),
                written=self._sink.written,
                dropped=self._sink.dropped,
                **self._who,
                **self._facts(),
            )
        )
        self._lag_s = 0.0


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()
