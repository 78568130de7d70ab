"""Every metric there is, with its name, unit and labels on one page, and how one machine's processes count together.

A process alone keeps its numbers to itself. Given a folder, the processes of one machine write theirs to files there,
and any of them can show the sum, the dead ones included; whoever sees a process end calls `reap`.
This module does not know what a request or a lane is: callers count, it shows.

prometheus_client chooses between the two modes while it is imported, so it is imported by `Metrics.start`.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from telemetry.tallies import BufferedGauge, BufferedHistogram, Counts, Tallies

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Metric

Folding = TypeVar("Folding", Counts, BufferedGauge, Tallies)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `Metrics.expose` returns."""

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
    """What is counted of the answers of one operation and model: looked up together, for every answer needs them."""

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
        from prometheus_client import Counter, Gauge, Histogram  # noqa: PLC0415 - see the module's docstring

        count, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)

        def count_ends(name: str, documentation: str, label: str, ends: tuple[str, ...]) -> Counter:
            """All of these are shown from the start: what is first seen at 1 has not grown, and no alert would tell."""
            counter = count(name, documentation, (label,))
            for end in ends:
                counter.labels(end)
            return counter

        distribution = partial(Histogram, registry=registry)
        self._folding: list[Counts | BufferedGauge | Tallies] = []
        """What is counted per request or per token: cheaply here, and passed on by `fold`."""

        # --- requests, counted by the API -------------------------------------------------------------------------
        self.requests = self._later(
            Counts, "penstock_requests_total", "HTTP requests answered.", ("model", "endpoint", "code")
        )
        self.errors = count("penstock_errors_total", "Errors told to a client, by error code.", ("code",))
        self.open_streams = self._later(BufferedGauge, "penstock_open_streams", "Event streams open now.")
        self.stream_resumes = count("penstock_stream_resumes_total", "Streams taken up again after a break.")
        self.request_duration = self._later(
            Tallies, "gen_ai_server_request_duration_seconds", "From request to last byte.", GEN_AI, DURATION_BUCKETS
        )
        self.time_to_first_token = self._later(
            Tallies, "gen_ai_server_time_to_first_token_seconds", "From request to first token.", GEN_AI, TTFT_BUCKETS
        )
        self.time_per_output_token = self._later(
            Tallies,
            "gen_ai_server_time_per_output_token_seconds",
            "Between tokens, after the first.",
            GEN_AI,
            TPOT_BUCKETS,
        )
        self.token_usage = self._later(
            Tallies,
            "gen_ai_client_token_usage",
            "Tokens of one request, by type (input | output).",
            (*GEN_AI, "gen_ai_token_type"),
            USAGE_BUCKETS,
        )

        # --- jobs, counted by whoever does it ---------------------------------------------------------------------
        self.jobs = self._later(Counts, "penstock_jobs_total", "Jobs that reached a final state.", ("model", "state"))
        self.claims = self._later(Counts, "penstock_claims_total", "Jobs taken from a lane.", ("model", "priority"))
        self.attempts = self._later(
            Counts, "penstock_attempts_total", "Jobs begun, by number of the attempt.", ("model", "attempt")
        )
        self.queue_time = self._later(
            Tallies, "penstock_queue_time_seconds", "Acceptance to claim.", ("model", "priority"), QUEUE_BUCKETS
        )
        self.tokens = self._later(
            Counts, "penstock_tokens_total", "Tokens (prompt | completion | cached).", ("model", "kind")
        )
        self.cancel_to_abort = distribution(
            "penstock_cancel_to_abort_seconds", "Cancel heard to engine slot free.", ("model",), buckets=ABORT_BUCKETS
        )
        self.deadline_misses = count("penstock_deadline_misses_total", "Jobs expired (queue | running).", ("where",))

        # --- batches, counted by the offline processes --------------------------------------------------------------
        self.batches = count_ends(
            "penstock_batches_total",
            "Batches that ended (completed | failed | cancelled | expired).",
            "state",
            ("completed", "failed", "cancelled", "expired"),
        )
        self.batch_lines = count("penstock_batch_lines_total", "Lines of batches whose job has ended.")
        self.batch_turns = count_ends(
            "penstock_batch_turns_total",
            "Turns at batches (done | taken | failed).",
            "end",
            ("done", "taken", "failed"),
        )
        self.batch_tellings = count_ends(
            "penstock_batch_tellings_total",
            "Celery messages, by why (due | unanswered: the one before led to nothing | lapsed: its worker was lost).",
            "reason",
            ("due", "unanswered", "lapsed"),
        )

        # --- events, counted by the offline processes -----------------------------------------------------------------
        self.webhooks = count_ends(
            "penstock_webhook_attempts_total",
            "Webhooks by what came of an attempt (delivered | retried | failed).",
            "end",
            ("delivered", "retried", "failed"),
        )
        self.events = count("penstock_events_published_total", "Events given to the broker.")
        self.taken = count_ends(
            "penstock_events_taken_total",
            "Messages from the broker (accepted | rejected).",
            "end",
            ("accepted", "rejected"),
        )

        # --- workers and the gate ---------------------------------------------------------------------------------
        self.worker_slots = gauge(
            "penstock_worker_slots", "Texts the workers can generate at once.", ("model",), multiprocess_mode="livesum"
        )
        self.worker_reserved = gauge(
            "penstock_worker_reserved_slots", "Slots of them that lane batch may not fill.", ("model",),
            multiprocess_mode="livesum",
        )  # fmt: skip
        self.worker_running = gauge(
            "penstock_worker_running", "Texts being generated now.", ("model",), multiprocess_mode="livesum"
        )
        self.lapsed_workers = count("penstock_lapsed_workers_total", "Workers whose lease ran out.")
        self.lease_reclaims = count("penstock_lease_reclaims_total", "Jobs taken back from lapsed workers.")
        self.given_up = count("penstock_jobs_given_up_total", "Jobs that lost too many workers.")
        self.workers_wanted = gauge(
            "penstock_workers_wanted", "The scheduler's plan.", ("model",), multiprocess_mode="livemostrecent"
        )
        self.decisions = count("penstock_scale_decisions_total", "Changes of plan (up | down).", ("model", "direction"))
        self.processes = gauge("penstock_processes", "Live processes.", ("role",), multiprocess_mode="livesum")

        self._answers: dict[tuple[str, str], AnswerMetrics] = {}
        self._dir = Path(metrics_dir) if metrics_dir else None
        for each in self._folding:
            registry.register(each)
        self._registry = registry
        self._servers: list[tuple[WSGIServer, threading.Thread]] = []
        self.processes.labels(role).set(1)

    @classmethod
    def start(cls, metrics_dir: str, role: str) -> Metrics:
        """The instruments of this process, shared through `metrics_dir` if one is given.

        Raises RuntimeError when prometheus_client was imported before, in the other mode.
        """
        if metrics_dir:
            Path(metrics_dir).mkdir(parents=True, exist_ok=True)
            _drop_live_gauges(Path(metrics_dir), os.getpid())  # of an earlier process that had this pid
            os.environ[FOLDER_VARIABLE] = metrics_dir
        else:
            os.environ.pop(FOLDER_VARIABLE, None)
        from prometheus_client import CollectorRegistry, disable_created_metrics, values  # noqa: PLC0415

        if values.ValueClass._multiprocess != bool(metrics_dir):
            os.environ.pop(FOLDER_VARIABLE, None)
            raise RuntimeError(
                "prometheus_client was imported before Metrics.start, which fixed how it stores values: "
                "start the metrics first, once per process"
            )
        disable_created_metrics()  # type: ignore[no-untyped-call]
        return cls(metrics_dir, role, CollectorRegistry())

    def answers(self, operation: str, model: str) -> AnswerMetrics:
        """The tallies of the answers with these labels."""
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

    def _later(self, kind: type[Folding], *args: Any) -> Folding:
        each = kind(*args)
        self._folding.append(each)
        return each

    def fold(self) -> None:
        """Pass on what was counted since. Call once a second or so where a folder is shared (6 us a series)."""
        for each in self._folding:
            each.fold()

    def expose(self, extra: Iterable[GaugeSample] = ()) -> bytes:
        """The /metrics page: of all processes in the folder, or of this one. `extra` is shown as it is.

        Reads every process's file (about 2 ms each): call it in a thread where that would hold up an event loop.
        """
        from prometheus_client import generate_latest  # noqa: PLC0415 - see the module's docstring

        self.fold()
        shown = self._registry.collect() if self._dir is None else _merged(self._dir)
        return generate_latest(CollectedMetrics([*sorted(shown, key=lambda metric: metric.name), *_families(extra)]))

    def serve(self, port: int, host: str = "127.0.0.1", live: Callable[[], Iterable[GaugeSample]] = tuple) -> int:
        """Show this process's own numbers at http://host:port/metrics, from a thread; returns the port (for port 0).

        Args:
            live: gauges computed at each reading; called in that thread.

        Raises OSError, naming the address, when the port is taken.
        """
        from prometheus_client import start_http_server  # noqa: PLC0415 - see the module's docstring

        try:
            server, thread = start_http_server(port, addr=host, registry=LivePage(self._registry, live))
        except OSError as error:
            raise OSError(error.errno, f"metrics cannot be served on {host}:{port}: {error.strerror}") from error
        self._servers.append((server, thread))
        return int(server.server_port)

    def close(self) -> None:
        """Fold what is left, take this process's live gauges out of the folder, stop serving."""
        self.fold()
        if self._dir is not None:
            _drop_live_gauges(self._dir, os.getpid())
        while self._servers:
            server, thread = self._servers.pop()
            server.shutdown()
            server.server_close()
            thread.join()


# --- numbers read at the moment they are shown -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LiveGauge:
    """A gauge nobody keeps: its samples are computed when the page is asked for."""

    name: str
    help: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GaugeSample:
    """One value of a live gauge, with its label values in the gauge's order."""

    gauge: LiveGauge
    labels: tuple[str, ...]
    value: float


LANE_WAITING = LiveGauge("penstock_lane_waiting", "Jobs waiting in a lane.", ("model", "priority"))
LANE_RUNNING = LiveGauge("penstock_lane_running", "Jobs of a lane being generated.", ("model", "priority"))
LANE_OLDEST = LiveGauge("penstock_lane_oldest_seconds", "Age of the oldest waiting job.", ("model", "priority"))
BATCHES_UNFINISHED = LiveGauge("penstock_batches_unfinished", "Batches that have not ended.", ())
BATCH_TOKENS = LiveGauge("penstock_batch_enqueued_tokens", "Tokens that batches still have to compute.", ())


class CollectedMetrics:
    """Metrics already collected, in the shape the library wants a registry to have."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class LivePage:
    """A registry, and gauges that are computed when it is read."""

    def __init__(self, registry: CollectorRegistry, live: Callable[[], Iterable[GaugeSample]]) -> None:
        self._registry, self._live = registry, live

    def collect(self) -> Iterable[Metric]:
        yield from self._registry.collect()
        yield from _families(self._live())


def _families(samples: Iterable[GaugeSample]) -> Iterable[Metric]:
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415 - see the module's docstring

    families: dict[LiveGauge, GaugeMetricFamily] = {}
    for sample in samples:
        gauge = sample.gauge
        if gauge not in families:
            families[gauge] = GaugeMetricFamily(gauge.name, gauge.help, labels=gauge.labels)
        families[gauge].add_metric(sample.labels, sample.value)
    return families.values()


# --- the shared folder -------------------------------------------------------------------------------------------

DEAD = "dead"
"""Stands for a pid in the names of the files that hold what ended processes counted."""


def clear(metrics_dir: str) -> None:
    """Forget everything an earlier deployment counted. Call before the first process starts."""
    folder = Path(metrics_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.db*"):
        path.unlink()


def reap(metrics_dir: str, pid: int) -> None:
    """Take a process that has ended out of the folder: its gauges go, its counts are kept in the file of the dead.

    Idempotent. Without it each process ever started would leave its files there for good.
    """
    folder = Path(metrics_dir)
    with _locked(folder, fcntl.LOCK_EX):
        _drop_live_gauges(folder, pid)
        for kind in ("counter", "histogram"):
            _bury(folder / f"{kind}_{pid}.db", folder / f"{kind}_{DEAD}.db")


def _bury(source: Path, grave: Path) -> None:
    """Add the values of one file to those of another, and remove it. A reader, kept out by the lock, sees no half."""
    from prometheus_client import mmap_dict  # noqa: PLC0415 - see the module's docstring

    if not source.exists():
        return
    dict_of: Any = mmap_dict.MmapedDict  # not annotated by the library
    totals: dict[str, float] = {}
    for path in filter(_has_values, (grave, source)):
        for key, value, *_ in dict_of.read_all_values_from_file(str(path)):
            totals[key] = totals.get(key, 0.0) + value
    fresh = grave.with_suffix(".db.new")
    fresh.unlink(missing_ok=True)
    file = dict_of(str(fresh))
    for key, value in totals.items():
        file.write_value(key, value, 0.0)
    file.close()
    fresh.replace(grave)
    source.unlink()


def _merged(folder: Path) -> Iterable[Metric]:
    """The sum over all processes. Gauges of a process that is gone are left out even if nobody reaped it yet."""
    from prometheus_client.multiprocess import MultiProcessCollector  # noqa: PLC0415 - see the module's docstring

    with _locked(folder, fcntl.LOCK_SH):
        files = [str(path) for path in folder.glob("*.db") if _has_values(path) and not _is_stale(path)]
        merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        return list(merged)


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


def _drop_live_gauges(folder: Path, pid: int) -> None:
    for path in folder.glob(f"gauge_live*_{pid}.db"):
        path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """Between processes and between threads; the kernel lets go of it when a holder dies."""
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, how)
        yield
