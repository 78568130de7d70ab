"""Readings of GPUs by a DCGM exporter or by NVML: absent where it does not tell, never zero."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from http.server import ThreadingHTTPServer
from typing import Any
from unittest.mock import Mock

import pytest
from house import eventually
from http_serving import QuietHandler, serving_http

from telemetry import gpu
from telemetry.gpu import DcgmReadings, GpuReading, GpuReadings, readings_of
from telemetry.settings import TelemetrySettings
from workers.__main__ import gpu_source

LABELS = 'device="nvidia{0}",modelName="NVIDIA H100 80GB HBM3",Hostname="node-7",DCGM_FI_DRIVER_VERSION="570.124.06"'


def series(name: str, gpu: int, value: object, more: str = "") -> str:
    """A line as the exporter writes it."""
    uuid = f"GPU-{gpu}"
    return f'{name}{{gpu="{gpu}",UUID="{uuid}",pci_bus_id="0",{LABELS.format(gpu)}{more}}} {value}\n'


def family(name: str, kind: str, help_text: str, *lines: str) -> str:
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n{''.join(lines)}"


ENERGY, POWER = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_POWER_USAGE"
BUSY, MEMORY = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"
POD = ',container="worker",namespace="llm",pod="worker-{}"'
TEXT = (
    family("DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock frequency (in MHz).", series("DCGM_FI_DEV_SM_CLOCK", 0, 1980))
    + family(POWER, "gauge", "Power draw (in W).", series(POWER, 0, "310.532000"), series(POWER, 1, "70.1"))
    + family(ENERGY, "counter", "Total energy consumption since boot (in mJ).", series(ENERGY, 0, 2481906237))
    + family(BUSY, "gauge", "GPU utilization (in %).", series(BUSY, 0, 87, POD.format(1)), series(BUSY, 1, 0))
    + family(MEMORY, "gauge", "Framebuffer memory used (in MiB).", series(MEMORY, 0, 70123))
)


def test_a_text_of_the_exporter_in_our_units() -> None:
    assert readings_of(TEXT) == {
        "GPU-0": GpuReading(pytest.approx(2481906.237), 0.87, 310.532, 70123 * 1024.0**2),
        "GPU-1": GpuReading(busy=0.0, watts=70.1),
    }


@pytest.mark.parametrize(
    "blank", ["9223372036854775794", "9223372036854775792", "140737488355328", "2147483632", "NaN", "-1"]
)
def test_what_dcgm_does_not_know_is_absent(blank: str) -> None:
    """A field that is not supported, not permitted or not found comes as a number that no GPU can have."""
    text = family(POWER, "gauge", "Power draw (in W).", series(POWER, 0, blank), series(POWER, 1, 5))
    assert readings_of(text) == {"GPU-1": GpuReading(watts=5.0)}


def test_parts_of_a_gpu_are_not_the_whole() -> None:
    """With MIG: how busy an instance is says nothing of the others. Two pods on a GPU do not use twice its power."""
    instance = ',GPU_I_PROFILE="1g.10gb",GPU_I_ID="{}"'
    text = family(BUSY, "gauge", "GPU utilization (in %).", series(BUSY, 0, 99, instance.format(7)))
    text += family(POWER, "gauge", "Power draw (in W).", *(series(POWER, 0, 300, POD.format(n)) for n in (1, 2)))
    assert readings_of(text) == {"GPU-0": GpuReading(watts=300.0)}


class Exporter(ThreadingHTTPServer):
    """Answers with a text, or with an error."""

    answer: tuple[int, str] = (200, TEXT)
    asked = 0


class Answer(QuietHandler):
    server: Exporter

    def do_GET(self) -> None:  # noqa: N802
        self.server.asked += 1
        self.send(*self.server.answer, "text/plain")


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with serving_http(Exporter(("127.0.0.1", 0), Answer)) as server:
        yield server


def test_an_exporter_is_asked_again_and_again(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last answer stays for a while when it fails, and then there is none."""
    readings = DcgmReadings(f"http://127.0.0.1:{exporter.server_port}/metrics", interval_s=0.02)
    try:
        eventually(lambda: set(readings.read()) == {"GPU-0", "GPU-1"})
        exporter.answer = (200, family(POWER, "gauge", "Power draw (in W).", series(POWER, 3, 5)))
        eventually(lambda: set(readings.read()) == {"GPU-3"})
        for broken in ((500, ""), (200, "<html>{ not a metric }</html>")):
            exporter.answer = broken
            eventually(lambda: readings._outage.active)
            assert set(readings.read()) == {"GPU-3"}
            exporter.answer = (200, TEXT.replace("GPU-0", "GPU-3"))
            eventually(lambda: not readings._outage.active)
            exporter.answer = (200, family(POWER, "gauge", "Power draw (in W).", series(POWER, 3, 5)))
            eventually(lambda: set(readings.read()) == {"GPU-3"})
        exporter.answer = (500, "")
        eventually(lambda: readings._outage.active)
        monkeypatch.setattr(gpu, "MAX_AGE_S", 0.0)
        assert readings.read() == {}
    finally:
        readings.close()


def test_a_worker_reads_the_configured_exporter_and_else_the_driver(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = object()
    monkeypatch.setattr(GpuReadings, "open", lambda: driver)
    assert gpu_source(TelemetrySettings()) is driver
    found = gpu_source(TelemetrySettings(dcgm_url=f"http://127.0.0.1:{exporter.server_port}/metrics"))
    assert isinstance(found, DcgmReadings)
    try:
        eventually(lambda: set(found.read()) == {"GPU-0", "GPU-1"})
    finally:
        found.close()


def test_an_exporter_is_named_as_it_was_given_but_for_its_password(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(DcgmReadings, "_fetch", Mock(side_effect=OSError("it is away")))
    readings = DcgmReadings("http://me:hidden@gpus/metrics")
    try:
        eventually(lambda: readings._outage.active)
    finally:
        readings.close()
    assert caplog.messages == ["the exporter of GPUs at gpus tells nothing: it is away"]


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
    assert readings.read() == {"GPU-1": GpuReading(5.0, 0.8, 310.5, float(1 << 30)), "GPU-2": GpuReading(busy=0.0)}
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
