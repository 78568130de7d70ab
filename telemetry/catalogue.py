"""Catalogue of metrics: name, type, unit, labels and meaning of every metric that Penstock exports.

Processes build their metrics from these rows (telemetry/metrics.py), docs/metrics.md has them as a table, and tests
compare the dashboards and alert rules of docker/ with them. Names follow Prometheus, and OpenTelemetry's GenAI
conventions where these have a metric. Every label has few values: from the settings, or from a short list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from telemetry.latency import EGRESS_FIRST, PARTS
from telemetry.tracing import OPERATIONS

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Combined: TypeAlias = Literal["livesum", "livemostrecent", "computed"]
"""How a gauge of several live processes is combined; "computed": by the API process that is asked, at each scrape."""

GEN_AI = ("gen_ai_operation_name", "gen_ai_request_model")

LABELS: Mapping[str, str] = {
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

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series in a query."""
        if self.kind == "histogram":
            return tuple(f"{self.name}{ending}" for ending in ("_bucket", "_sum", "_count"))
        return (self.name,)


OFFLINE = (
    MetricSpec("penstock_batches_total", "counter", "{batch}", "offline", "Batches that ended.", ("state",),
        ("completed", "failed", "cancelled", "expired"), watch="whether batches fail"),
    MetricSpec("penstock_batch_lines_total", "counter", "{line}", "offline", "Lines of batches whose job has ended.",
        watch="if batches are slow: the pace"),
    MetricSpec("penstock_batch_turns_total", "counter", "{turn}", "offline", "Turns at batches.", ("end",),
        ("done", "taken", "failed"), watch="whether turns fail (then read the log)"),
    MetricSpec("penstock_batch_due_notices_total", "counter", "{notice}", "offline", "Due notices of batches, by why.",
        ("reason",), ("due", "unanswered", "lapsed"),
        watch="`unanswered`: all offline processes are busy, or Celery lost messages; `lapsed`: one died"),
    MetricSpec("penstock_batches_unfinished", "gauge", "{batch}", "api", "Batches that have not ended.",
        combined="computed", watch="if batches are slow"),
    MetricSpec("penstock_batch_enqueued_tokens", "gauge", "{token}", "api",
        "Tokens that batches still have to compute.", combined="computed"),
    MetricSpec("penstock_webhook_attempts_total", "counter", "{attempt}", "offline",
        "Webhooks by what came of an attempt.", ("end",), ("delivered", "retried", "failed"),
        watch="`failed`: webhooks are given up; see `penstock webhooks ls`"),
    MetricSpec("penstock_events_published_total", "counter", "{event}", "offline", "Events given to the broker."),
    MetricSpec("penstock_events_taken_total", "counter", "{message}", "offline", "Messages from the broker.", ("end",),
        ("accepted", "rejected")),
)  # fmt: skip
RECORDS = (
    MetricSpec("penstock_records_written_total", "counter", "{record}", "all", "Records written to the local disk."),
    MetricSpec("penstock_records_dropped_total", "counter", "{record}", "all",
        "Records lost: the buffer was full, or the disk refused them.", ("reason",), ("full", "disk"),
        watch="why [records](records.md) are lost"),
)  # fmt: skip


TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 327.68)
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
PART_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30, 300)
ABORT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
USAGE_BUCKETS = tuple(4**power for power in range(11))
"""Upper bounds in seconds (tokens for the last); close to those the GenAI conventions advise."""

REQUESTS = (
    MetricSpec("penstock_requests_total", "counter", "{request}", "api", "HTTP requests answered.",
        ("model", "endpoint", "code"), watch="the share of 5xx"),
    MetricSpec("penstock_errors_total", "counter", "{error}", "api",
        "Errors told to a client, in an answer or a stream.", ("code",),
        watch="which errors clients receive; a result that is asked for three times counts thrice"),
    MetricSpec("penstock_open_streams", "gauge", "{stream}", "api", "Event streams open now."),
    MetricSpec("penstock_stream_resumes_total", "counter", "{stream}", "api", "Streams taken up again after a break."),
    MetricSpec("penstock_stream_resets_total", "counter", "{stream}", "api",
        "Streams whose reader was told that what it had read is void.",
        watch="whether the store loses data, or JSON answers lose their workers"),
    MetricSpec("gen_ai_server_request_duration_seconds", "histogram", "s", "api", "From request to last byte.", GEN_AI,
        buckets=DURATION_BUCKETS),
    MetricSpec("gen_ai_server_time_to_first_token_seconds", "histogram", "s", "api",
        "From request to the first token that the reader saw; of an answer in one piece, to its end.", GEN_AI,
        buckets=TTFT_BUCKETS, watch="how long users wait"),
    MetricSpec("gen_ai_server_time_per_output_token_seconds", "histogram", "s", "api",
        "Between tokens, after the first, with pauses after lost workers; tokens that come together are equal gaps.",
        GEN_AI, buckets=TPOT_BUCKETS, watch="how fast users read"),
    MetricSpec("gen_ai_client_token_usage", "histogram", "{token}", "api",
        "Tokens of one request, by type (input | output).", (*GEN_AI, "gen_ai_token_type"), ("input", "output"),
        USAGE_BUCKETS),
)  # fmt: skip
JOBS = (
    MetricSpec("penstock_jobs_total", "counter", "{job}", "worker", "Jobs that reached a final state.",
        ("model", "state")),
    MetricSpec("penstock_job_failures_total", "counter", "{job}", "worker, api, scheduler",
        "Jobs that failed, by the code of their error; neither cancelled nor expired ones.", ("code",),
        watch="why jobs fail: each failed job once. One that the store itself cannot read is only in the dead letters"),
    MetricSpec("penstock_claims_total", "counter", "{job}", "worker", "Jobs taken from a lane.", ("model", "priority")),
    MetricSpec("penstock_attempts_total", "counter", "{job}", "worker", "Jobs begun, by number of the attempt.",
        ("model", "attempt")),
    MetricSpec("penstock_continuations_total", "counter", "{job}", "worker",
        "Jobs begun with tokens that an earlier attempt had generated.", ("model",)),
    MetricSpec("penstock_preemptions_total", "counter", "{job}", "worker",
        "Running batch jobs put back into the queue for jobs of lane interactive.", ("model",)),
    MetricSpec("penstock_fallbacks_total", "counter", "{job}", "worker",
        "Jobs of a model that had an answer from another one (options.fallback).", ("model", "served_by")),
    MetricSpec("penstock_queue_time_seconds", "histogram", "s", "worker", "Acceptance to claim.", ("model", "priority"),
        buckets=QUEUE_BUCKETS, watch="if TTFT is high: is it the queue or the engine"),
    MetricSpec("penstock_part_seconds", "histogram", "s", "worker, api",
        "Time of completed jobs by part, as in the timing of one job; both egress parts to a millisecond.",
        ("model", "part"), tuple(each.name for each in (*PARTS, EGRESS_FIRST)), PART_BUCKETS,
        watch="which part of a request became slower"),
    MetricSpec("penstock_tokens_total", "counter", "{token}", "worker",
        "Tokens (prompt | completion | cached): of answers as they are written, also of a text that begins again; of "
        "prompts at the job's end.", ("model", "kind"), ("prompt", "completion", "cached")),
    MetricSpec("penstock_cancel_to_abort_seconds", "histogram", "s", "worker", "Cancel heard to engine slot free.",
        ("model",), buckets=ABORT_BUCKETS),
    MetricSpec("penstock_deadline_misses_total", "counter", "{job}", "worker, api, scheduler",
        "Jobs expired (queue | running).", ("where",), ("queue", "running")),
    MetricSpec("penstock_lane_waiting", "gauge", "{job}", "api", "Jobs waiting in a lane.", ("model", "priority"),
        combined="computed", watch="if it grows, add workers or use a lower lane"),
    MetricSpec("penstock_lane_running", "gauge", "{job}", "api",
        "Jobs of a lane that a worker has claimed and that have not ended.", ("model", "priority"),
        combined="computed"),
    MetricSpec("penstock_lane_oldest_seconds", "gauge", "s", "api", "Age of the oldest waiting job.",
        ("model", "priority"), combined="computed", watch="as the row above"),
    MetricSpec("penstock_lane_class_oldest_seconds", "gauge", "s", "api",
        "Longest wait of a job that is the next of its tenant, by class of tenants, of the 50 tenants that were served "
        "least; 0 if none of the class waits. A class without a configured tenant is absent (but for normal).",
        ("model", "priority", "tenant_class"), combined="computed",
        watch="if all classes wait, add workers; if one does, see the weights"),
)  # fmt: skip


WORKERS = (
    MetricSpec("penstock_worker_slots", "gauge", "{text}", "worker", "Texts the workers can generate at once.",
        ("model",)),
    MetricSpec("penstock_worker_reserved_slots", "gauge", "{text}", "worker",
        "Slots of them that lane batch may not fill.", ("model",)),
    MetricSpec("penstock_worker_running", "gauge", "{text}", "worker", "Slots in use: texts that the engines run.",
        ("model",)),
    MetricSpec("penstock_worker_kv_tokens", "gauge", "{token}", "worker",
        "Size of the KV caches; absent of engines that have no limit beyond their slots.", ("model",)),
    MetricSpec("penstock_worker_kv_used_tokens", "gauge", "{token}", "worker",
        "Tokens in the KV caches; absent as above.", ("model",)),
    MetricSpec("penstock_engine_evictions_total", "counter", "{text}", "worker",
        "Texts that an engine evicted or paused because its KV cache was full.", ("model",),
        watch="if it grows steadily: a larger cache, or fewer slots"),
    MetricSpec("penstock_engine_miscounted_total", "counter", "{text}", "worker",
        "Complete answers whose counts of tokens, as an upstream server gave them, could not be true. Their tokens are "
        "counted as those of a server that gives no counts.", ("model",),
        watch="a server counts wrongly, so `usage` is not exact"),
    MetricSpec("penstock_gpu_energy_joules", "gauge", "J", "worker",
        "Energy that a GPU has used since its driver was loaded; grows. Absent where neither NVML nor a DCGM exporter "
        "tells, never 0, as the three below.", ("gpu",), combined="livemostrecent"),
    MetricSpec("penstock_gpu_busy_ratio", "gauge", "1", "worker",
        "Share of the driver's last sample period in which a GPU ran a kernel.", ("gpu",), combined="livemostrecent"),
    MetricSpec("penstock_gpu_power_watts", "gauge", "W", "worker", "Power of a GPU now.", ("gpu",),
        combined="livemostrecent"),
    MetricSpec("penstock_gpu_memory_used_bytes", "gauge", "By", "worker", "Memory of a GPU in use.", ("gpu",),
        combined="livemostrecent"),
    MetricSpec("penstock_gate_waits_total", "counter", "{text}", "worker",
        "Texts that waited at the gate before they began (slots | kv | ttft | itl).", ("model", "reason"),
        ("slots", "kv", "ttft", "itl")),
    MetricSpec("penstock_gate_peak_tokens", "gauge", "{token}", "worker",
        "KV cache that the running texts are predicted to hold at most.", ("model",)),
    MetricSpec("penstock_gate_reserve_ratio", "gauge", "1", "worker", "Share of the KV cache that the gate keeps free.",
        ("model",), combined="livemostrecent"),
    MetricSpec("penstock_lapsed_workers_total", "counter", "{worker}", "worker, api, scheduler",
        "Workers whose lease ran out.", watch="whether workers die"),
    MetricSpec("penstock_lease_reclaims_total", "counter", "{job}", "worker, api, scheduler",
        "Jobs taken back from lapsed workers.", watch="what their deaths cost"),
    MetricSpec("penstock_jobs_given_up_total", "counter", "{job}", "worker, api, scheduler",
        "Jobs that lost too many workers.",
        watch="whether a request kills workers (see `penstock dlq ls`)"),
    MetricSpec("penstock_workers_wanted", "gauge", "{worker}", "scheduler", "The scheduler's plan.", ("model",),
        combined="livemostrecent"),
    MetricSpec("penstock_scale_decisions_total", "counter", "{decision}", "scheduler", "Changes of plan (up | down).",
        ("model", "direction"), ("up", "down")),
    MetricSpec("penstock_processes", "gauge", "{process}", "all", "Live processes.", ("role",)),
)  # fmt: skip


GROUPS: Mapping[str, tuple[MetricSpec, ...]] = {
    "Requests": REQUESTS,
    "Jobs and lanes": JOBS,
    "Workers and the scheduler": WORKERS,
    "Batches, webhooks and events": OFFLINE,
    "Records": RECORDS,
}
CATALOGUE: Mapping[str, MetricSpec] = {spec.name: spec for group in GROUPS.values() for spec in group}
"""Every metric, by its name."""
