"""Catalogue of metrics: name, type, unit, labels and meaning of every metric that Penstock exports.

A process makes its instruments of these rows (telemetry/metrics.py), docs/metrics.md has them as a table, and tests
compare the dashboards and alert rules of docker/ with them. Names follow Prometheus, and OpenTelemetry's GenAI
conventions where these have a metric. Every label has few values: from the settings, or from a short list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from telemetry.latency import EGRESS_FIRST, PARTS
from telemetry.tracing import OPERATIONS

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge

    from telemetry.metrics import BufferedCounter, BufferedHistogram, Labelled

    BufferedCounters: TypeAlias = Labelled[BufferedCounter]
    Histograms: TypeAlias = Labelled[BufferedHistogram]

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Combined: TypeAlias = Literal["livesum", "livemostrecent", "computed"]
"""How a gauge of several live processes is combined; "computed": by the API process that is asked, at each scrape."""

GEN_AI = ("gen_ai_operation_name", "gen_ai_request_model")

LABELS: Mapping[str, str] = {
    "action": "tag, redact, block",
    "attempt": "0 to 9, and 10+",
    "code": "an HTTP status, or a code of [the API's errors](api.md#errors)",
    "direction": "up, down",
    "end": "as the row says",
    "endpoint": "a route of [the API](api.md), or other",
    "gen_ai_operation_name": ", ".join(OPERATIONS),
    "gen_ai_request_model": "a configured model",
    "gen_ai_token_type": "input, output",
    "gpu": "the UUID of a GPU of this machine",
    "kind": "prompt, completion, cached",
    "model": "a configured model",
    "part": "a part of [a job's timing](operations.md#where-a-requests-time-went)",
    "priority": "the lane: interactive, standard, batch",
    "reason": "as the row says",
    "role": "api, worker, scheduler, offline",
    "rule": "a [content rule](content.md)",
    "served_by": "a configured model",
    "state": "a final state, as the row says",
    "tenant_class": "low, normal, high: the tenant's `weight` is below 1, 1, above 1",
    "where": "queue, running",
}
"""Every label, and where its values come from."""


class MetricSpec(NamedTuple):
    """One metric."""

    name: str
    """As Prometheus shows it; a histogram's without `_bucket`, `_sum` and `_count`."""
    kind: Kind
    unit: str
    """Of its value, in UCUM's words: s, J, {token}, 1 for a ratio, braces for what is counted."""
    role: str
    """The processes that count it."""
    meaning: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    """All values of the last label, if they are a short list: a counter shows them at 0 from the start."""
    buckets: tuple[float, ...] = ()
    combined: Combined = "livesum"
    watch: str = ""
    """What an operator looks for."""
    buffered: bool = False
    """Whether its counts are kept in the process until the next flush, because they come once a request or a token."""


# Each attribute of the classes below is a row of the catalogue; in the `Metrics` of a process it is the instrument that
# its annotation names. A gauge annotated as MetricSpec has none: the API process that is asked computes it.


def row(kind: Kind, name: str, unit: str, role: str, meaning: str, labels: tuple[str, ...] = (), **more: Any) -> Any:
    """One row; `more`: the other fields of MetricSpec."""
    return MetricSpec(name, kind, unit, role, meaning, labels, **more)


TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 327.68)
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
PART_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30, 300)
ABORT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
USAGE_BUCKETS = tuple(4**power for power in range(11))
"""Upper bounds in seconds (tokens for the last); close to those the GenAI conventions advise."""


# fmt: off
class RequestMetrics:
    """Requests, counted by the API."""

    requests: BufferedCounters = row("counter", "penstock_requests_total", "{request}", "api",
        "HTTP requests answered.", ("model", "endpoint", "code"), watch="the share of 5xx", buffered=True)
    errors: Counter = row("counter", "penstock_errors_total", "{error}", "api",
        "Errors told to a client, in an answer or a stream.", ("code",),
        watch="which errors clients receive; a result that is asked for three times counts thrice")
    open_streams: Gauge = row("gauge", "penstock_open_streams", "{stream}", "api", "Event streams open now.")
    stream_resumes: Counter = row("counter", "penstock_stream_resumes_total", "{stream}", "api",
        "Streams taken up again after a break.")
    stream_resets: Counter = row("counter", "penstock_stream_resets_total", "{stream}", "api",
        "Streams whose reader was told that what it had read is void.",
        watch="whether the store loses data, or JSON answers lose their workers")
    request_duration: Histograms = row("histogram", "gen_ai_server_request_duration_seconds", "s", "api",
        "From request to last byte.", GEN_AI, buckets=DURATION_BUCKETS)
    time_to_first_token: Histograms = row("histogram", "gen_ai_server_time_to_first_token_seconds", "s", "api",
        "From request to the first token that the reader saw; of an answer in one piece, to its end.", GEN_AI,
        buckets=TTFT_BUCKETS, watch="how long users wait")
    time_per_output_token: Histograms = row("histogram", "gen_ai_server_time_per_output_token_seconds", "s", "api",
        "Between tokens, after the first, with pauses after lost workers; tokens that come together are equal gaps.",
        GEN_AI, buckets=TPOT_BUCKETS, watch="how fast users read")
    token_usage: Histograms = row("histogram", "gen_ai_client_token_usage", "{token}", "api",
        "Tokens of one request, by type (input | output).", (*GEN_AI, "gen_ai_token_type"), values=("input", "output"),
        buckets=USAGE_BUCKETS)


class JobMetrics:
    """Jobs, counted by whichever process does it, and lanes."""

    jobs: BufferedCounters = row("counter", "penstock_jobs_total", "{job}", "worker",
        "Jobs that reached a final state.", ("model", "state"), buffered=True)
    job_failures: Counter = row("counter", "penstock_job_failures_total", "{job}", "worker, api, scheduler",
        "Jobs that failed, by the code of their error; neither cancelled nor expired ones.", ("code",),
        watch="why jobs fail: each failed job once. One that the store itself cannot read is only in the dead letters")
    claims: BufferedCounters = row("counter", "penstock_claims_total", "{job}", "worker", "Jobs taken from a lane.",
        ("model", "priority"), buffered=True)
    attempts: BufferedCounters = row("counter", "penstock_attempts_total", "{job}", "worker",
        "Jobs begun, by number of the attempt.", ("model", "attempt"), buffered=True)
    continuations: BufferedCounters = row("counter", "penstock_continuations_total", "{job}", "worker",
        "Jobs begun with tokens that an earlier attempt had generated.", ("model",), buffered=True)
    preemptions: BufferedCounters = row("counter", "penstock_preemptions_total", "{job}", "worker",
        "Running batch jobs put back into the queue for jobs of lane interactive.", ("model",), buffered=True)
    fallbacks: BufferedCounters = row("counter", "penstock_fallbacks_total", "{job}", "worker",
        "Jobs of a model that had an answer from another one (options.fallback).", ("model", "served_by"),
        buffered=True)
    content_matches: Counter = row("counter", "penstock_content_matches_total", "{match}", "api, worker, offline",
        "What content rules found in requests and answers.", ("rule", "action"),
        watch="which rules match; a rule that matches often may be a false alarm")
    queue_time: Histograms = row("histogram", "penstock_queue_time_seconds", "s", "worker", "Acceptance to claim.",
        ("model", "priority"), buckets=QUEUE_BUCKETS, watch="if TTFT is high: is it the queue or the engine",
        buffered=True)
    parts: Histograms = row("histogram", "penstock_part_seconds", "s", "worker, api",
        "Time of completed jobs by part, as in the timing of one job; both egress parts to a millisecond.",
        ("model", "part"), values=tuple(each.name for each in (*PARTS, EGRESS_FIRST)), buckets=PART_BUCKETS,
        watch="which part of a request became slower")
    tokens: BufferedCounters = row("counter", "penstock_tokens_total", "{token}", "worker",
        "Tokens (prompt | completion | cached): of answers as they are written, also of a text that begins again; of "
        "prompts at the job's end.",
        ("model", "kind"), values=("prompt", "completion", "cached"), buffered=True)
    cancel_to_abort: Histograms = row("histogram", "penstock_cancel_to_abort_seconds", "s", "worker",
        "Cancel heard to engine slot free.", ("model",), buckets=ABORT_BUCKETS)
    deadline_misses: Counter = row("counter", "penstock_deadline_misses_total", "{job}", "worker, api, scheduler",
        "Jobs expired (queue | running).", ("where",), values=("queue", "running"))
    lane_waiting: MetricSpec = row("gauge", "penstock_lane_waiting", "{job}", "api", "Jobs waiting in a lane.",
        ("model", "priority"), watch="if it grows, add workers or use a lower lane", combined="computed")
    lane_running: MetricSpec = row("gauge", "penstock_lane_running", "{job}", "api",
        "Jobs of a lane that a worker has claimed and that have not ended.", ("model", "priority"), combined="computed")
    lane_oldest: MetricSpec = row("gauge", "penstock_lane_oldest_seconds", "s", "api", "Age of the oldest waiting job.",
        ("model", "priority"), watch="as the row above", combined="computed")
    lane_class_oldest: MetricSpec = row("gauge", "penstock_lane_class_oldest_seconds", "s", "api",
        "Longest wait of a job that is the next of its tenant, by class of tenants, of the 50 tenants that were served "
        "least; 0 if none of the class waits. A class without a configured tenant is absent (but for normal).",
        ("model", "priority", "tenant_class"), watch="if all classes wait, add workers; if one does, see the weights",
        combined="computed")


class WorkerMetrics:
    """Workers and the scheduler."""

    worker_slots: Gauge = row("gauge", "penstock_worker_slots", "{text}", "worker",
        "Texts the workers can generate at once.", ("model",))
    worker_reserved: Gauge = row("gauge", "penstock_worker_reserved_slots", "{text}", "worker",
        "Slots of them that lane batch may not fill.", ("model",))
    worker_running: Gauge = row("gauge", "penstock_worker_running", "{text}", "worker",
        "Slots in use: texts that the engines run.", ("model",))
    worker_kv: Gauge = row("gauge", "penstock_worker_kv_tokens", "{token}", "worker",
        "Size of the KV caches; absent of engines that have no limit beyond their slots.", ("model",))
    worker_kv_used: Gauge = row("gauge", "penstock_worker_kv_used_tokens", "{token}", "worker",
        "Tokens in the KV caches; absent as above.", ("model",))
    evictions: Counter = row("counter", "penstock_engine_evictions_total", "{text}", "worker",
        "Texts that an engine evicted or paused because its KV cache was full.", ("model",),
        watch="if it grows steadily: a larger cache, or fewer slots")
    swaps: Counter = row("counter", "penstock_adapter_swaps_total", "{adapter}", "worker",
        "Adapters that engines loaded for a request, also in place of another one.", ("model",),
        watch="per request: if it is above a tenth, keep more adapters loaded")
    miscounted: Counter = row("counter", "penstock_engine_miscounted_total", "{text}", "worker",
        "Complete answers whose counts of tokens, as an upstream server gave them, could not be true. Their tokens are "
        "counted as those of a server that gives no counts.",
        ("model",), watch="a server counts wrongly, so `usage` is not exact")
    gpu_energy: Gauge = row("gauge", "penstock_gpu_energy_joules", "J", "worker",
        "Energy that a GPU has used since its driver was loaded; grows. Absent where neither NVML nor a DCGM exporter "
        "tells, never 0, as the three below.",
        ("gpu",), combined="livemostrecent")
    gpu_busy: Gauge = row("gauge", "penstock_gpu_busy_ratio", "1", "worker",
        "Share of the driver's last sample period in which a GPU ran a kernel.", ("gpu",), combined="livemostrecent")
    gpu_power: Gauge = row("gauge", "penstock_gpu_power_watts", "W", "worker", "Power of a GPU now.", ("gpu",),
        combined="livemostrecent")
    gpu_memory: Gauge = row("gauge", "penstock_gpu_memory_used_bytes", "By", "worker", "Memory of a GPU in use.",
        ("gpu",), combined="livemostrecent")
    gate_waits: Counter = row("counter", "penstock_gate_waits_total", "{text}", "worker",
        "Texts that waited at the gate before they began (slots | kv | ttft | itl).", ("model", "reason"),
        values=("slots", "kv", "ttft", "itl"))
    gate_peak: Gauge = row("gauge", "penstock_gate_peak_tokens", "{token}", "worker",
        "KV cache that the running texts are predicted to hold at most.", ("model",))
    gate_reserve: Gauge = row("gauge", "penstock_gate_reserve_ratio", "1", "worker",
        "Share of the KV cache that the gate keeps free.", ("model",), combined="livemostrecent")
    lapsed_workers: Counter = row("counter", "penstock_lapsed_workers_total", "{worker}", "worker, api, scheduler",
        "Workers whose lease ran out.", watch="whether workers die")
    lease_reclaims: Counter = row("counter", "penstock_lease_reclaims_total", "{job}", "worker, api, scheduler",
        "Jobs taken back from lapsed workers.", watch="what their deaths cost")
    given_up: Counter = row("counter", "penstock_jobs_given_up_total", "{job}", "worker, api, scheduler",
        "Jobs that lost too many workers.", watch="whether a request kills workers (see `penstock dlq ls`)")
    workers_wanted: Gauge = row("gauge", "penstock_workers_wanted", "{worker}", "scheduler", "The scheduler's plan.",
        ("model",), combined="livemostrecent")
    decisions: Counter = row("counter", "penstock_scale_decisions_total", "{decision}", "scheduler",
        "Changes of plan (up | down).", ("model", "direction"), values=("up", "down"))
    processes: Gauge = row("gauge", "penstock_processes", "{process}", "all", "Live processes.", ("role",))


class OfflineMetrics:
    """Batches, webhooks and events, counted by the offline processes."""

    batches: Counter = row("counter", "penstock_batches_total", "{batch}", "offline", "Batches that ended.", ("state",),
        values=("completed", "failed", "cancelled", "expired"), watch="whether batches fail")
    batch_lines: Counter = row("counter", "penstock_batch_lines_total", "{line}", "offline",
        "Lines of batches whose job has ended.", watch="if batches are slow: the pace")
    batch_turns: Counter = row("counter", "penstock_batch_turns_total", "{turn}", "offline", "Turns at batches.",
        ("end",), values=("done", "taken", "failed"), watch="whether turns fail (then read the log)")
    batch_due_notices: Counter = row("counter", "penstock_batch_due_notices_total", "{notice}", "offline",
        "Due notices of batches, by why.", ("reason",), values=("due", "unanswered", "lapsed"),
        watch="`unanswered`: all offline processes are busy, or Celery lost messages; `lapsed`: one died")
    batches_unfinished: MetricSpec = row("gauge", "penstock_batches_unfinished", "{batch}", "api",
        "Batches that have not ended.", watch="if batches are slow", combined="computed")
    batch_tokens: MetricSpec = row("gauge", "penstock_batch_enqueued_tokens", "{token}", "api",
        "Tokens that batches still have to compute.", combined="computed")
    webhooks: Counter = row("counter", "penstock_webhook_attempts_total", "{attempt}", "offline",
        "Webhooks by what came of an attempt.", ("end",), values=("delivered", "retried", "failed"),
        watch="`failed`: webhooks are given up; see `penstock webhooks ls`")
    events: Counter = row("counter", "penstock_events_published_total", "{event}", "offline",
        "Events given to the broker.")
    taken: Counter = row("counter", "penstock_events_taken_total", "{message}", "offline", "Messages from the broker.",
        ("end",), values=("accepted", "rejected"))


class RecordMetrics:
    """Records on the local disk, counted by the process that writes them."""

    records_written: Counter = row("counter", "penstock_records_written_total", "{record}", "all",
        "Records written to the local disk.")
    records_dropped: Counter = row("counter", "penstock_records_dropped_total", "{record}", "all",
        "Records lost: the buffer was full, or the disk refused them.", ("reason",), values=("full", "disk"),
        watch="why [records](records.md) are lost")
# fmt: on


def _rows(group: type) -> dict[str, MetricSpec]:
    return {attribute: row for attribute, row in vars(group).items() if isinstance(row, MetricSpec)}


GROUPS: Mapping[str, Mapping[str, MetricSpec]] = {
    "Requests": _rows(RequestMetrics),
    "Jobs and lanes": _rows(JobMetrics),
    "Workers and the scheduler": _rows(WorkerMetrics),
    "Batches, webhooks and events": _rows(OfflineMetrics),
    "Records": _rows(RecordMetrics),
}
"""The rows of each group, by their attribute."""
CATALOGUE: Mapping[str, MetricSpec] = {row.name: row for rows in GROUPS.values() for row in rows.values()}
"""Every metric, by its name."""
