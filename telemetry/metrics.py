"""Metrics: defines the name, unit and labels of every metric, and sums the counts of one machine's processes.

Without a metrics folder, a process shows only its own numbers. With one, the processes of a machine write their numbers
to files there, and each can show the sum, including processes that have ended. This module knows neither requests nor
lanes: its callers count, and it shows the counts.

prometheus_client chooses between the two modes while it is imported, so it is imported by `Metrics.start`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

from telemetry.buffered import BufferedGauge, BufferedHistogram, LabelledCounter, LabelledHistogram
from telemetry.live_gauges import GaugeSample, MetricsPage, families

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Counter, Gauge
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

BufferedMetric = TypeVar("BufferedMetric", LabelledCounter, BufferedGauge, LabelledHistogram)

GaugeMode: TypeAlias = Literal["livesum", "livemostrecent"]
"""How the gauges of several live processes are combined."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the text that `Metrics.expose` returns."""

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 327.68)
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
ABORT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
USAGE_BUCKETS = tuple(4**power for power in range(11))
"""Upper bounds in seconds (tokens for the last); close to those the GenAI conventions advise."""

GEN_AI = ("gen_ai_operation_name", "gen_ai_request_model")
"""Labels of the metrics that OpenTelemetry's GenAI conventions name: ("chat" | "text_completion", model)."""


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
        self._buffered: list[LabelledCounter | BufferedGauge | LabelledHistogram] = []
        """Buffered metrics, counted per request or per token; `flush` adds them to the library's metrics."""
        self._answers: dict[tuple[str, str], AnswerMetrics] = {}
        self._dir = Path(metrics_dir) if metrics_dir else None
        self._servers: list[tuple[WSGIServer, threading.Thread]] = []
        self._count_requests()
        self._count_jobs()
        self._count_batches()
        self._count_events()
        self._watch_workers()
        self._count_records()
        for each in self._buffered:
            registry.register(each)
        self.processes.labels(role).set(1)

    def _count_requests(self) -> None:
        """Requests, counted by the API."""
        self.requests = self._later(
            LabelledCounter, "penstock_requests_total", "HTTP requests answered.", ("model", "endpoint", "code")
        )
        self.errors = self._counter(
            "penstock_errors_total", "Errors told to a client, in an answer or a stream.", ("code",)
        )
        self.open_streams = self._later(BufferedGauge, "penstock_open_streams", "Event streams open now.")
        self.stream_resumes = self._counter("penstock_stream_resumes_total", "Streams taken up again after a break.")
        self.request_duration = self._later(
            LabelledHistogram,
            "gen_ai_server_request_duration_seconds",
            "From request to last byte.",
            GEN_AI,
            DURATION_BUCKETS,
        )
        self.time_to_first_token = self._later(
            LabelledHistogram,
            "gen_ai_server_time_to_first_token_seconds",
            "From request to first token.",
            GEN_AI,
            TTFT_BUCKETS,
        )
        self.time_per_output_token = self._later(
            LabelledHistogram,
            "gen_ai_server_time_per_output_token_seconds",
            "Between tokens, after the first.",
            GEN_AI,
            TPOT_BUCKETS,
        )
        self.token_usage = self._later(
            LabelledHistogram,
            "gen_ai_client_token_usage",
            "Tokens of one request, by type (input | output).",
            (*GEN_AI, "gen_ai_token_type"),
            USAGE_BUCKETS,
        )

    def _count_jobs(self) -> None:
        """Jobs, counted by whichever process does it."""
        from prometheus_client import Histogram  # noqa: PLC0415 - see the module's docstring

        self.jobs = self._later(
            LabelledCounter, "penstock_jobs_total", "Jobs that reached a final state.", ("model", "state")
        )
        self.job_failures = self._counter(
            "penstock_job_failures_total",
            "Jobs that failed, by the code of their error; neither cancelled nor expired ones.",
            ("code",),
        )
        self.claims = self._later(
            LabelledCounter, "penstock_claims_total", "Jobs taken from a lane.", ("model", "priority")
        )
        self.attempts = self._later(
            LabelledCounter, "penstock_attempts_total", "Jobs begun, by number of the attempt.", ("model", "attempt")
        )
        self.preemptions = self._later(
            LabelledCounter,
            "penstock_preemptions_total",
            "Running batch jobs put back into the queue for jobs of lane interactive.",
            ("model",),
        )
        self.fallbacks = self._later(
            LabelledCounter,
            "penstock_fallbacks_total",
            "Jobs of a model that had an answer from another one (options.fallback).",
            ("model", "served_by"),
        )
        self.queue_time = self._later(
            LabelledHistogram,
            "penstock_queue_time_seconds",
            "Acceptance to claim.",
            ("model", "priority"),
            QUEUE_BUCKETS,
        )
        self.tokens = self._later(
            LabelledCounter, "penstock_tokens_total", "Tokens (prompt | completion | cached).", ("model", "kind")
        )
        self.cancel_to_abort = Histogram(
            "penstock_cancel_to_abort_seconds",
            "Cancel heard to engine slot free.",
            ("model",),
            buckets=ABORT_BUCKETS,
            registry=self._registry,
        )
        self.deadline_misses = self._counter(
            "penstock_deadline_misses_total", "Jobs expired (queue | running).", ("where",)
        )

    def _count_batches(self) -> None:
        """Batches, counted by the offline processes."""
        self.batches = self._counter_of_ends(
            "penstock_batches_total", "Batches that ended", "state", ("completed", "failed", "cancelled", "expired")
        )
        self.batch_lines = self._counter("penstock_batch_lines_total", "Lines of batches whose job has ended.")
        self.batch_turns = self._counter_of_ends(
            "penstock_batch_turns_total", "Turns at batches", "end", ("done", "taken", "failed")
        )
        self.batch_due_notices = self._counter_of_ends(
            "penstock_batch_due_notices_total",
            "Due notices of batches, by why; unanswered: the one before led to nothing; lapsed: its worker was lost",
            "reason",
            ("due", "unanswered", "lapsed"),
        )

    def _count_events(self) -> None:
        """Events, counted by the offline processes."""
        self.webhooks = self._counter_of_ends(
            "penstock_webhook_attempts_total",
            "Webhooks by what came of an attempt",
            "end",
            ("delivered", "retried", "failed"),
        )
        self.events = self._counter("penstock_events_published_total", "Events given to the broker.")
        self.taken = self._counter_of_ends(
            "penstock_events_taken_total", "Messages from the broker", "end", ("accepted", "rejected")
        )

    def _watch_workers(self) -> None:
        """Workers and the scheduler."""
        self.worker_slots = self._gauge(
            "penstock_worker_slots", "Texts the workers can generate at once.", ("model",), "livesum"
        )
        self.worker_reserved = self._gauge(
            "penstock_worker_reserved_slots", "Slots of them that lane batch may not fill.", ("model",), "livesum"
        )
        self.worker_running = self._gauge(
            "penstock_worker_running", "Texts being generated now.", ("model",), "livesum"
        )
        self.gate_refusals = self._counter(
            "penstock_gate_refusals_total",
            "Texts that waited at the gate before they began (slots | kv | ttft | itl).",
            ("model", "reason"),
        )
        self.gate_peak = self._gauge(
            "penstock_gate_peak_tokens",
            "KV cache that the running texts are predicted to hold at most.",
            ("model",),
            "livesum",
        )
        self.gate_reserve = self._gauge(
            "penstock_gate_reserve_ratio",
            "Share of the KV cache that the gate keeps free.",
            ("model",),
            "livemostrecent",
        )
        self.lapsed_workers = self._counter("penstock_lapsed_workers_total", "Workers whose lease ran out.")
        self.lease_reclaims = self._counter("penstock_lease_reclaims_total", "Jobs taken back from lapsed workers.")
        self.given_up = self._counter("penstock_jobs_given_up_total", "Jobs that lost too many workers.")
        self.workers_wanted = self._gauge(
            "penstock_workers_wanted", "The scheduler's plan.", ("model",), "livemostrecent"
        )
        self.decisions = self._counter(
            "penstock_scale_decisions_total", "Changes of plan (up | down).", ("model", "direction")
        )
        self.processes = self._gauge("penstock_processes", "Live processes.", ("role",), "livesum")

    def _count_records(self) -> None:
        """Records on the local disk, counted by the process that writes them."""
        self.records_written = self._counter("penstock_records_written_total", "Records written to the local disk.")
        self.records_dropped = self._counter_of_ends(
            "penstock_records_dropped_total",
            "Records lost: the buffer was full, or the disk refused them",
            "reason",
            ("full", "disk"),
        )

    def _counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        from prometheus_client import Counter  # noqa: PLC0415 - see the module's docstring

        return Counter(name, documentation, labels, registry=self._registry)

    def _counter_of_ends(self, name: str, documentation: str, label: str, ends: Sequence[str]) -> Counter:
        """All of these are shown from the start: what is first seen at 1 has not grown, and no alert would tell."""
        counter = self._counter(name, f"{documentation} ({' | '.join(ends)}).", (label,))
        for end in ends:
            counter.labels(end)
        return counter

    def _gauge(self, name: str, documentation: str, labels: Sequence[str], mode: GaugeMode) -> Gauge:
        from prometheus_client import Gauge  # noqa: PLC0415 - see the module's docstring

        return Gauge(name, documentation, labels, registry=self._registry, multiprocess_mode=mode)

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

    def _later(self, kind: type[BufferedMetric], *args: Any) -> BufferedMetric:
        each = kind(*args)
        self._buffered.append(each)
        return each

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
