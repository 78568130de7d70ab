"""Readings of GPUs from a DCGM exporter: what its text says, absent where DCGM marks a value as unknown, never zero."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import pytest
from house import eventually
from http_serving import serving_http

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


class Answer(BaseHTTPRequestHandler):
    server: Exporter

    def do_GET(self) -> None:
        status, text = self.server.answer
        self.server.asked += 1
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Quiet."""


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


def test_an_exporter_that_stays_away_is_told_of_once(exporter: Exporter, caplog: pytest.LogCaptureFixture) -> None:
    """It is asked every few seconds, and the log is not for each."""
    exporter.answer, asked = (500, ""), exporter.asked
    readings = DcgmReadings(f"http://127.0.0.1:{exporter.server_port}/metrics", interval_s=0.02)
    try:
        eventually(lambda: exporter.asked >= asked + 5)
    finally:
        readings.close()
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["it answers 500"]


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


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="dcgm_url: expected http"):
        TelemetrySettings(dcgm_url="127.0.0.1:9400")


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
