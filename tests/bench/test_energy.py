"""Energy of a measured server: by NVML or its metrics where they tell, else absent and never zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer
from typing import cast

from http_serving import QuietHandler, serving_http

from bench.energy import EnergyMeter, counters_of, used
from bench.load.target import TargetServer
from telemetry.gpu import GpuReadings

METRICS = """
# TYPE penstock_gpu_energy_joules gauge
penstock_gpu_energy_joules{gpu="GPU-1",pid="7"} 1500.5
penstock_gpu_energy_joules{gpu="GPU-2"} 20.0
penstock_gpu_busy_ratio{gpu="GPU-1"} 0.5
"""


class FixedGpus:
    """GPUs of this machine, with these counters."""

    def __init__(self, **counters: float) -> None:
        self.counters = counters

    def joules(self) -> dict[str, float]:
        return self.counters


@contextmanager
def served(text: str, status: int = 200) -> Iterator[TargetServer]:
    """A server that answers everything with this text."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            assert self.path == "/metrics"
            self.send(status, text, "text/plain")

    with serving_http(HTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield TargetServer.at(f"http://127.0.0.1:{server.server_port}/v1", "m")


def test_the_metrics_of_a_penstock() -> None:
    with served(METRICS) as server:
        assert counters_of(server) == {"GPU-1": 1500.5, "GPU-2": 20.0}
        assert EnergyMeter.of(server, None).source == "its metrics"
        gpus = cast(GpuReadings, FixedGpus(a=1.0))
        assert EnergyMeter.of(server, gpus).source == "NVML"


def test_a_server_that_does_not_tell() -> None:
    """Another server, one without GPUs, one that is gone, and this machine's GPUs for a server that is elsewhere."""
    with served("not found", 404) as server:
        assert EnergyMeter.of(server, cast(GpuReadings, FixedGpus())).source == ""
    with served("# nothing") as server:
        assert EnergyMeter.of(server, None).read() == {}
    assert counters_of(server) == {}
    far = TargetServer.at("http://elsewhere.invalid:1/v1", "m")
    assert EnergyMeter.of(far, cast(GpuReadings, FixedGpus(a=1.0))).source == ""


def test_energy_between_two_readings() -> None:
    assert used({"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 6.0, "c": 9.0}) == 3.0
    assert used({}, {}) is None and used({"a": 1.0}, {}) is None
    assert used({"a": 1.0}, {"a": 1.0}) is None, "a counter that stands still is no reading of zero"
    assert used({"a": 5.0}, {"a": 1.0}) is None, "the driver was loaded again"
