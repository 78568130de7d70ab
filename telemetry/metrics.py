"""Metrics: the instruments of one process, built from the catalogue, and the sum over one machine's processes.

Without a metrics folder, a process shows only its own numbers. With one, the processes of a machine write their numbers
to files there, and each can show the sum, including processes that have ended. This module knows neither requests nor
lanes: its callers count, and it shows the counts.

prometheus_client chooses between the two modes while it is imported, so it is imported by `Metrics.start`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from telemetry.buffered import BufferedCounter, BufferedHistogram, Labelled
from telemetry.catalogue import (
    GROUPS,
    JobMetrics,
    MetricSpec,
    OfflineMetrics,
    RecordMetrics,
    RequestMetrics,
    WorkerMetrics,
)

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Metric


@dataclass(frozen=True, slots=True)
class GaugeSample:
    """One value of a gauge that is computed at each scrape, with its label values in the gauge's order."""

    gauge: MetricSpec
    labels: tuple[str, ...]
    value: float


class MetricsPage:
    """What the library shows as a registry: the metrics that `collect` returns, asked for at each reading."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect


def families(samples: Iterable[GaugeSample]) -> Iterable[Metric]:
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415 - see the module's docstring

    families: dict[str, GaugeMetricFamily] = {}
    for sample in samples:
        spec = sample.gauge
        family = families.setdefault(spec.name, GaugeMetricFamily(spec.name, spec.meaning, labels=spec.labels))
        family.add_metric(sample.labels, sample.value)
    return families.values()


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the text that `Metrics.expose` returns."""

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class AnswerMetrics(NamedTuple):
    """The metrics of the answers of one operation and model, looked up together because every answer needs all."""

    duration: BufferedHistogram
    first_token: BufferedHistogram
    per_token: BufferedHistogram
    input: BufferedHistogram
    output: BufferedHistogram


class Metrics(RequestMetrics, JobMetrics, WorkerMetrics, OfflineMetrics, RecordMetrics):
    """The instruments of one process. Made once, by `start`, before anything else imports prometheus_client.

    Label values come from settings or from short fixed lists, never from a request: each new value is a new series.
    """

    def __init__(self, metrics_dir: str, role: str, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._buffered: list[Labelled[BufferedCounter] | Labelled[BufferedHistogram]] = []
        """Buffered metrics, counted per request or per token; `flush` adds them to the library's metrics."""
        self._answers: dict[tuple[str, str], AnswerMetrics] = {}
        self._dir = Path(metrics_dir) if metrics_dir else None
        self._servers: list[tuple[WSGIServer, threading.Thread]] = []
        for rows in GROUPS.values():
            for attribute, row in rows.items():
                setattr(self, attribute, self._instrument(row))
        self.processes.labels(role).set(1)

    def _instrument(self, row: MetricSpec) -> object:
        """The instrument of a row. A counter whose only label has a fixed list of values shows all from the start: what
        is first seen at 1 has not grown, for Prometheus, and no alert would tell."""
        from prometheus_client import Counter, Gauge, Histogram  # noqa: PLC0415 - see the module's docstring

        about = (row.name, row.meaning, row.labels)
        if row.combined == "computed":
            return row
        if row.kind == "gauge":
            return Gauge(*about, registry=self._registry, multiprocess_mode=row.combined)
        if row.kind == "counter" and not row.buffered:
            counter = Counter(*about, registry=self._registry)
            for value in row.values if len(row.labels) == 1 else ():
                counter.labels(value)
            return counter
        found: Labelled[BufferedCounter] | Labelled[BufferedHistogram]
        if row.kind == "counter":
            found = Labelled(Counter(*about, registry=None), BufferedCounter)
        else:
            whole = Histogram(*about, registry=None, buckets=row.buckets)
            found = Labelled(whole, lambda each: BufferedHistogram(each, row.buckets))
        self._registry.register(found)
        self._buffered.append(found)
        return found

    @classmethod
    def start(cls, metrics_dir: str, role: str) -> Metrics:
        """The instruments of this process, shared through `metrics_dir` if one is given.

        Raises RuntimeError when prometheus_client was imported before, in the other mode.
        """
        if metrics_dir:
            Path(metrics_dir).mkdir(parents=True, exist_ok=True)
            drop_live_gauges(Path(metrics_dir), os.getpid())  # of an earlier process that had this pid
            os.environ[FOLDER_VARIABLE] = metrics_dir
        else:
            os.environ.pop(FOLDER_VARIABLE, None)
        from prometheus_client import CollectorRegistry, disable_created_metrics, values  # noqa: PLC0415

        if (values.ValueClass is values.MutexValue) == bool(metrics_dir):
            os.environ.pop(FOLDER_VARIABLE, None)
            raise RuntimeError(
                "prometheus_client was imported before Metrics.start, which fixed how it stores values: "
                "start the metrics first, once per process"
            )
        disable_created_metrics()  # type: ignore[no-untyped-call]
        return cls(metrics_dir, role, CollectorRegistry())

    def answers(self, operation: str, model: str) -> AnswerMetrics:
        """The metrics of the answers with these labels."""
        found = self._answers.get((operation, model))
        if found is None:
            of = (operation, model)
            found = self._answers[of] = AnswerMetrics(
                self.request_duration.labels(*of),
                self.time_to_first_token.labels(*of),
                self.time_per_output_token.labels(*of),
                self.token_usage.labels(*of, "input"),
                self.token_usage.labels(*of, "output"),
            )
        return found

    def count_error(self, code: str) -> None:
        """Count an error that is told to a client; only `counted` in api/openai/rendering.py tells one."""
        self.errors.labels(code).inc()

    def flush(self) -> None:
        """Pass on what was counted since the last flush: about once a second if a folder is shared (6 us a series)."""
        for each in self._buffered:
            each.flush()

    def expose(self, extra: Iterable[GaugeSample] = ()) -> bytes:
        """The /metrics page: of all processes in the folder, or of this one. `extra` is shown as it is.

        Reads every process's file (about 2 ms each): call it in a thread where that would hold up an event loop.
        """
        from prometheus_client import generate_latest  # noqa: PLC0415 - see the module's docstring

        page = [*sorted(self.collect(), key=lambda metric: metric.name), *families(extra)]
        return generate_latest(MetricsPage(lambda: page))

    def collect(self) -> Iterable[Metric]:
        """The metrics of all processes in the folder, or of this one; as slow as `expose`."""
        self.flush()
        return self._registry.collect() if self._dir is None else merged(self._dir)

    def serve(self, port: int, host: str = "127.0.0.1", live: Callable[[], Iterable[GaugeSample]] = tuple) -> int:
        """Show this process's own numbers at http://host:port/metrics, from a thread; returns the port (for port 0).

        Args:
            live: gauges computed at each reading; called in that thread.

        Raises OSError, naming the address, when the port is taken.
        """
        from prometheus_client import start_http_server  # noqa: PLC0415 - see the module's docstring

        try:
            page = MetricsPage(lambda: [*self._registry.collect(), *families(live())])
            server, thread = start_http_server(port, addr=host, registry=page)
        except OSError as error:
            raise OSError(error.errno, f"metrics cannot be served on {host}:{port}: {error.strerror}") from error
        self._servers.append((server, thread))
        return int(server.server_port)

    def close(self) -> None:
        """Flush what is left, take this process's live gauges out of the folder, stop serving."""
        self.flush()
        if self._dir is not None:
            drop_live_gauges(self._dir, os.getpid())
        while self._servers:
            server, thread = self._servers.pop()
            server.shutdown()
            server.server_close()
            thread.join()


def merged(folder: Path) -> Iterable[Metric]:
    """The sum over all processes, of those that are gone without their gauges."""
    from prometheus_client.multiprocess import MultiProcessCollector  # noqa: PLC0415 - see the module's docstring

    files = [str(path) for path in folder.glob("*.db") if _has_values(path) and not _is_stale(path)]
    merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
    return merged


def _has_values(path: Path) -> bool:
    """False for a file that another process is just creating: the library cannot read it."""
    return path.exists() and path.stat().st_size > 0


def _is_stale(path: Path) -> bool:
    kind, _, pid = path.stem.rpartition("_")
    return kind.startswith("gauge_live") and not _alive(int(pid))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's process, so there is one
    return True


def drop_live_gauges(folder: Path, pid: int) -> None:
    for path in folder.glob(f"gauge_live*_{pid}.db"):
        path.unlink(missing_ok=True)
