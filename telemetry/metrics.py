"""Metrics: the instruments of one process, built from the catalogue, and the sum over one machine's processes.

Without a metrics folder, a process shows only its own numbers. With one, the processes of a machine write their numbers
to files there, and each can show the sum, including processes that have ended. This module knows neither requests nor
lanes: its callers count, and it shows the counts.

prometheus_client chooses between the two modes while it is imported, so it is imported by `Metrics.start`.

What is counted for every request and every token is buffered: an observation then costs 0.2 us; in the library 1.1 us,
or 2.7 us with a label look-up and a shared folder. Buffered counts only grow and have one writer, the event loop;
`flush`, in any thread, adds the growth to the library's metric. So no observation is lost even if another thread
flushes in the middle of one.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

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

    from prometheus_client import CollectorRegistry, Counter, Histogram, Metric


class BufferedCounter:
    """A buffered counter."""

    __slots__ = ("_counter", "_flushed", "_value")

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._value = self._flushed = 0

    def inc(self, n: int = 1) -> None:
        self._value += n

    def flush(self) -> None:
        """Add the growth since the last flush to the counter; never from two threads at once."""
        if (now := self._value) != self._flushed:
            self._counter.inc(now - self._flushed)
            self._flushed = now


class BufferedHistogram:
    """A buffered histogram."""

    __slots__ = ("_bounds", "_bucket", "_counts", "_flushed", "_flushed_total", "_histogram", "_total", "_value")

    def __init__(self, histogram: Histogram, bounds: tuple[float, ...]) -> None:
        self._histogram = histogram
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._value, self._bucket = 0.0, 0
        """The value that `observe_equal` had last, and its bucket."""
        self._flushed = list(self._counts)
        self._flushed_total = 0.0

    def observe(self, value: float, n: int = 1) -> None:
        """Add `n` observations of the same value, in seconds."""
        self._counts[bisect_left(self._bounds, value)] += n
        self._total += value * n

    def observe_equal(self, total: float, n: int) -> None:
        """Add `n` equal observations of `total` seconds together. Inlined, because it runs once a token."""
        value = total / n
        if value != self._value:  # the tokens of one engine step all have the same value
            self._value, self._bucket = value, bisect_left(self._bounds, value)
        self._counts[self._bucket] += n
        self._total += total

    def flush(self) -> None:
        """Add the growth since the last flush to the histogram; never from two threads at once."""
        counts, total = list(self._counts), self._total
        if counts == self._flushed:
            return
        for bucket, now, before in zip(self._histogram._buckets, counts, self._flushed, strict=True):
            if now != before:
                bucket.inc(now - before)
        self._histogram._sum.inc(total - self._flushed_total)
        self._flushed, self._flushed_total = counts, total


Buffer = TypeVar("Buffer", BufferedCounter, BufferedHistogram)


class Labelled(Generic[Buffer]):
    """A buffered metric with labels: one buffer per set of label values, flushed whenever the library collects it."""

    def __init__(self, instrument: Counter | Histogram, buffered: Callable[[Any], Buffer]) -> None:
        """`instrument`: the library's metric. `buffered` makes the buffer of its part with some label values."""
        self.instrument = instrument
        self._buffered: Callable[[Any], Buffer] = buffered
        self._by_labels: dict[tuple[str, ...], Buffer] = {}
        self._lock = threading.Lock()

    def labels(self, *values: str) -> Buffer:
        """The buffer of these label values; hot code keeps a reference to it."""
        buffer = self._by_labels.get(values)
        if buffer is None:
            buffer = self._by_labels[values] = self._buffered(self.instrument.labels(*values))
        return buffer

    def flush(self) -> None:
        """Pass on what came since the last time."""
        with self._lock:
            for buffer in list(self._by_labels.values()):
                buffer.flush()

    def collect(self) -> Iterable[Metric]:
        self.flush()
        return self.instrument.collect()

    def describe(self) -> Iterable[Metric]:
        return self.instrument.describe()


class GaugeSample(NamedTuple):
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
        self._buffered: list[Labelled[Any]] = []
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
        found: Labelled[Any]
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
        found = self._answers.get(of := (operation, model))
        if found is None:
            times = (self.request_duration, self.time_to_first_token, self.time_per_output_token)
            usage = (self.token_usage.labels(*of, which) for which in ("input", "output"))
            found = self._answers[of] = AnswerMetrics(*(each.labels(*of) for each in times), *usage)
        return found

    def count_error(self, code: str) -> None:
        """Count an error that a client is told."""
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

    # A file without a size is one that another process is just creating: the library cannot read it.
    there = [path for path in folder.glob("*.db") if path.exists() and path.stat().st_size and not _is_stale(path)]
    merged: Iterable[Metric] = MultiProcessCollector.merge(list(map(str, there)))  # type: ignore[no-untyped-call]
    return merged


def _is_stale(path: Path) -> bool:
    """Whether it has the live gauges of a process that is gone."""
    kind, _, pid = path.stem.rpartition("_")
    try:
        if kind.startswith("gauge_live"):
            os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # somebody else's process, so there is one
    return False


def drop_live_gauges(folder: Path, pid: int) -> None:
    for path in folder.glob(f"gauge_live*_{pid}.db"):
        path.unlink(missing_ok=True)
