"""Telemetry of one process: its log, its metrics, its traces and its records, from its start to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.process import Launch, needed_to_start
from telemetry import logs
from telemetry.metrics import GaugeSample, Metrics
from telemetry.otlp import SpanSender
from telemetry.records.schema import RecordSettings
from telemetry.records.writer import NO_RECORDS, RecordSink, RecordWriter
from telemetry.settings import TelemetrySettings
from telemetry.tracing import Tracing


class Telemetry:
    """Logs, metrics, traces and records of one process, which closes what they open when it ends. Raises StartError,
    then and later."""

    def __init__(self, launch: Launch, role: str) -> None:
        self._launch, self._role = launch, role
        self._settings = launch.config.section("telemetry", TelemetrySettings)
        logs.setup(role, self._settings.log_level)
        with needed_to_start(OSError):
            self.metrics = Metrics.start(self._settings.metrics_dir, role)
        launch.on_exit.callback(self.metrics.close)

    def keep_records(self) -> RecordSink:
        """Start writing records to the local disk, if they are wanted and have a folder."""
        settings = self._launch.config.section("records", RecordSettings)
        if not (settings.enabled and settings.dir):
            return NO_RECORDS
        writer = RecordWriter(
            settings,
            self._role,
            on_written=self.metrics.records_written.inc,
            on_dropped=lambda why, number: self.metrics.records_dropped.labels(why).inc(number),
        )
        writer.start()
        self._launch.on_exit.callback(writer.close)
        return writer

    def serve_metrics(self, live: Callable[[], Iterable[GaugeSample]] = tuple) -> None:
        """Serve /metrics on a port of its own, which asks for no key, if one is set. `live` as in `Metrics.serve`."""
        if self._settings.metrics_port:
            with needed_to_start(OSError):
                self.metrics.serve(self._settings.metrics_port, self._settings.metrics_host, live)

    def trace(self) -> Tracing:
        """Start recording spans, if a collector is set."""
        with needed_to_start(ValueError):
            tracing = start_tracing(f"penstock-{self._role}", self._settings.otlp_endpoint, self._settings.trace_ratio)
        self._launch.on_exit.callback(tracing.close)
        return tracing


def start_tracing(service: str, endpoint: str, ratio: float = 1.0) -> Tracing:
    """Make the tracing of one process.

    Args:
        endpoint: base URL of an OTLP/HTTP collector, or "" to record and send nothing.
        ratio: share of the traces that begin here which are recorded, 0 to 1.

    Raises ValueError for a malformed variable of OpenTelemetry.
    """
    return Tracing(SpanSender(service, endpoint) if endpoint else None, ratio)
