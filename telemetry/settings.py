"""Settings of logs, metrics and traces: section [telemetry]."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class TelemetrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [telemetry]. Nothing leaves the machine unless `otlp_endpoint` is set."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is logged."""
    otlp_endpoint: str = ""
    """Base URL of an OTLP/HTTP collector, e.g. http://127.0.0.1:4318."""
    trace_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """Share of the requests whose spans are recorded; the API decides it for each, whatever its client says."""
    metrics_dir: str = ""
    """Folder where the processes of one machine share their counters; `penstock up` sets it."""
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Port of a process's own /metrics; 0: none. The API also has /metrics among its other routes."""
    metrics_host: str = "127.0.0.1"
    """Address that this port listens on; it requires no key."""

    dcgm_url: str = ""
    """Address of the DCGM exporter of this machine, e.g. http://127.0.0.1:9400/metrics; empty: workers ask NVML."""

    def __post_init__(self) -> None:
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError("otlp_endpoint: expected http://HOST:PORT or https://..., the base URL of a collector")
        if self.dcgm_url and not self.dcgm_url.startswith(("http://", "https://")):
            raise ValueError("dcgm_url: expected http://HOST:PORT/metrics, the address of a DCGM exporter")
