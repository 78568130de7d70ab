"""Readings of NVIDIA GPUs from a DCGM exporter: the text that it shows to Prometheus, read from a configured address.

Clusters have such an exporter on every machine, also where a worker's container does not have the driver's library.
DCGM marks what it does not know by numbers that no GPU can have; they count as absent, as does an exporter that does
not answer.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from telemetry.records.gpus import GpuReading

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
    """Asks an exporter again and again, in a thread of its own. Its readings are at most MAX_AGE_S old."""

    def __init__(self, url: str, *, interval_s: float = INTERVAL_S) -> None:
        """`url`: http://HOST:PORT/metrics of the exporter of this machine."""
        self._url, self._interval_s = urlsplit(url), interval_s
        self._read_at, self._readings, self._problem = 0.0, dict[str, GpuReading](), ""
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
            self._ask()
            if self._done.wait(self._interval_s):
                return

    def _ask(self) -> None:
        """Read once; a problem is logged when it begins."""
        try:
            self._readings, self._read_at = readings_of(self._fetch()), time.monotonic()
            problem = "" if self._readings else "its answer has no GPU"
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = str(error) or type(error).__name__
        if problem and not self._problem:
            log.warning("the exporter of GPUs at %s tells nothing: %s", self._url.netloc, problem)
        self._problem = problem

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
