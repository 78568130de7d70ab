"""Metrics: the instruments of one process, built from the catalogue, and the sum over one machine's processes.

Without a metrics folder, a process shows only its own numbers. With one, the processes of a machine write their numbers
to files there, and each can show the sum, including processes that have ended. This module knows neither requests nor
lanes: its callers count, and it shows the counts.

prometheus_client chooses between the two modes while it is imported, so it is imported by `Metrics.start`.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from telemetry.catalogue import CATALOGUE, MetricSpec

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric


# A buffered observation costs 0.2 us; in the library 1.1 us, or 2.7 us with a label look-up and a shared folder. Each
# count only grows and has one writer, the event loop; `flush` may run in any thread.


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
    """A buffered histogram that costs 0.2 us per observation (measured; the library: 1.1 us, or 2.7 us in a folder).

    Counts only grow and have one writer, the event loop; `flush` adds the growth to the library's histogram. So no
    observation is lost even if another thread flushes in the middle of one.
    """

    __slots__ = ("_bounds", "_bucket", "_counts", "_flushed", "_flushed_total", "_histogram", "_total", "_value")

    def __init__(self, histogram: Histogram, bounds: tuple[float, ...]) -> None:
        self._histogram = histogram
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._value, self._bucket = 0.0, 0
        """The last observed value and its bucket."""
        self._flushed = list(self._counts)
        self._flushed_total = 0.0

    def observe(self, value: float, n: int = 1) -> None:
        """Add `n` observations of the same value, in seconds."""
        if value != self._value:  # the tokens of one engine step all have the same value
            self._value, self._bucket = value, bisect_left(self._bounds, value)
        self._counts[self._bucket] += n
        self._total += value * n

    def observe_equal(self, total: float, n: int) -> None:
        """Add `n` equal observations of `total` seconds together. Inlined, because it runs once a token."""
        value = total / n
        if value != self._value:
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


@dataclass(frozen=True, slots=True)
class GaugeSample:
    """One value of a gauge that is computed at each scrape, with its label values in the gauge's order."""

    gauge: MetricSpec
    labels: tuple[str, ...]
    value: float


LANE_WAITING = CATALOGUE["penstock_lane_waiting"]
LANE_RUNNING = CATALOGUE["penstock_lane_running"]
LANE_OLDEST = CATALOGUE["penstock_lane_oldest_seconds"]
LANE_CLASS_OLDEST = CATALOGUE["penstock_lane_class_oldest_seconds"]
BATCHES_UNFINISHED = CATALOGUE["penstock_batches_unfinished"]
BATCH_TOKENS = CATALOGUE["penstock_batch_enqueued_tokens"]


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


class Metrics:
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
        self._count_requests()
        self._count_jobs()
        self._count_batches()
        self._watch_workers()
        self._count_records()
        for each in self._buffered:
            registry.register(each)
        self.processes.labels(role).set(1)

    def _count_requests(self) -> None:
        """Requests, counted by the API."""
        self.requests = self._counted("penstock_requests_total")
        self.errors = self._counter("penstock_errors_total")
        self.open_streams = self._gauge("penstock_open_streams")
        self.stream_resumes = self._counter("penstock_stream_resumes_total")
        self.stream_resets = self._counter("penstock_stream_resets_total")
        self.request_duration = self._observed("gen_ai_server_request_duration_seconds")
        self.time_to_first_token = self._observed("gen_ai_server_time_to_first_token_seconds")
        self.time_per_output_token = self._observed("gen_ai_server_time_per_output_token_seconds")
        self.token_usage = self._observed("gen_ai_client_token_usage")

    def _count_jobs(self) -> None:
        """Jobs, counted by whichever process does it."""
        self.jobs = self._counted("penstock_jobs_total")
        self.job_failures = self._counter("penstock_job_failures_total")
        self.claims = self._counted("penstock_claims_total")
        self.attempts = self._counted("penstock_attempts_total")
        self.continuations = self._counted("penstock_continuations_total")
        self.preemptions = self._counted("penstock_preemptions_total")
        self.fallbacks = self._counted("penstock_fallbacks_total")
        self.queue_time = self._observed("penstock_queue_time_seconds")
        self.parts = self._observed("penstock_part_seconds")
        self.tokens = self._counted("penstock_tokens_total")
        self.cancel_to_abort = self._observed("penstock_cancel_to_abort_seconds")
        self.deadline_misses = self._counter("penstock_deadline_misses_total")

    def _count_batches(self) -> None:
        """Batches and events, counted by the offline processes."""
        self.batches = self._counter("penstock_batches_total")
        self.batch_lines = self._counter("penstock_batch_lines_total")
        self.batch_turns = self._counter("penstock_batch_turns_total")
        self.batch_due_notices = self._counter("penstock_batch_due_notices_total")
        self.webhooks = self._counter("penstock_webhook_attempts_total")
        self.events = self._counter("penstock_events_published_total")
        self.taken = self._counter("penstock_events_taken_total")

    def _watch_workers(self) -> None:
        """Workers and the scheduler."""
        self.worker_slots = self._gauge("penstock_worker_slots")
        self.worker_reserved = self._gauge("penstock_worker_reserved_slots")
        self.worker_running = self._gauge("penstock_worker_running")
        self.worker_kv = self._gauge("penstock_worker_kv_tokens")
        self.worker_kv_used = self._gauge("penstock_worker_kv_used_tokens")
        self.evictions = self._counter("penstock_engine_evictions_total")
        self.miscounted = self._counter("penstock_engine_miscounted_total")
        self.gpu_energy = self._gauge("penstock_gpu_energy_joules")
        self.gpu_busy = self._gauge("penstock_gpu_busy_ratio")
        self.gpu_power = self._gauge("penstock_gpu_power_watts")
        self.gpu_memory = self._gauge("penstock_gpu_memory_used_bytes")
        self.gate_waits = self._counter("penstock_gate_waits_total")
        self.gate_peak = self._gauge("penstock_gate_peak_tokens")
        self.gate_reserve = self._gauge("penstock_gate_reserve_ratio")
        self.lapsed_workers = self._counter("penstock_lapsed_workers_total")
        self.lease_reclaims = self._counter("penstock_lease_reclaims_total")
        self.given_up = self._counter("penstock_jobs_given_up_total")
        self.workers_wanted = self._gauge("penstock_workers_wanted")
        self.decisions = self._counter("penstock_scale_decisions_total")
        self.processes = self._gauge("penstock_processes")

    def _count_records(self) -> None:
        """Records on the local disk, counted by the process that writes them."""
        self.records_written = self._counter("penstock_records_written_total")
        self.records_dropped = self._counter("penstock_records_dropped_total")

    def _counter(self, name: str) -> Counter:
        """A counter. If its only label has a fixed list of values, all are shown from the start: what is first seen at
        1 has not grown, for Prometheus, and no alert would tell."""
        from prometheus_client import Counter  # noqa: PLC0415 - see the module's docstring

        spec = CATALOGUE[name]
        counter = Counter(name, spec.meaning, spec.labels, registry=self._registry)
        for value in spec.values if len(spec.labels) == 1 else ():
            counter.labels(value)
        return counter

    def _gauge(self, name: str) -> Gauge:
        from prometheus_client import Gauge  # noqa: PLC0415 - see the module's docstring

        spec = CATALOGUE[name]
        assert spec.combined != "computed", "the API computes it at each scrape"
        return Gauge(name, spec.meaning, spec.labels, registry=self._registry, multiprocess_mode=spec.combined)

    def _counted(self, name: str) -> Labelled[BufferedCounter]:
        """A buffered counter."""
        from prometheus_client import Counter  # noqa: PLC0415 - see the module's docstring

        spec = CATALOGUE[name]
        found = Labelled(Counter(name, spec.meaning, spec.labels, registry=None), BufferedCounter)
        self._buffered.append(found)
        return found

    def _observed(self, name: str) -> Labelled[BufferedHistogram]:
        """A buffered histogram."""
        from prometheus_client import Histogram  # noqa: PLC0415 - see the module's docstring

        spec = CATALOGUE[name]
        whole = Histogram(name, spec.meaning, spec.labels, registry=None, buckets=spec.buckets)
        found = Labelled(whole, lambda each: BufferedHistogram(each, spec.buckets))
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
        """Count an error that is told to a client; only api/error_answers.py tells one."""
        self.errors.labels(code).inc()

    def flush(self) -> None:
        """Pass on what was counted since. Call once a second or so where a folder is shared (6 us a series)."""
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
        """Fold what is left, take this process's live gauges out of the folder, stop serving."""
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
