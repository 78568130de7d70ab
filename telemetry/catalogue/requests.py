"""Metrics of requests and of jobs and their lanes."""

from __future__ import annotations

from telemetry.catalogue.spec import GEN_AI, MetricSpec
from telemetry.latency import EGRESS_FIRST, PARTS

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 327.68)
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
PART_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30, 300)
ABORT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
USAGE_BUCKETS = tuple(4**power for power in range(11))
"""Upper bounds in seconds (tokens for the last); close to those the GenAI conventions advise."""

REQUESTS = (
    MetricSpec(
        "penstock_requests_total",
        "counter",
        "{request}",
        "api",
        "HTTP requests answered.",
        ("model", "endpoint", "code"),
        watch="the share of 5xx",
    ),
    MetricSpec(
        "penstock_errors_total",
        "counter",
        "{error}",
        "api",
        "Errors told to a client, in an answer or a stream.",
        ("code",),
        watch="which errors clients receive, one for each answer: a result that is asked for three times counts thrice",
    ),
    MetricSpec("penstock_open_streams", "gauge", "{stream}", "api", "Event streams open now."),
    MetricSpec("penstock_stream_resumes_total", "counter", "{stream}", "api", "Streams taken up again after a break."),
    MetricSpec(
        "penstock_stream_resets_total",
        "counter",
        "{stream}",
        "api",
        "Streams whose reader was told that what it had read is void.",
        watch="whether the store loses data, or answers to JSON schemas lose their workers",
    ),
    MetricSpec(
        "gen_ai_server_request_duration_seconds",
        "histogram",
        "s",
        "api",
        "From request to last byte.",
        GEN_AI,
        buckets=DURATION_BUCKETS,
    ),
    MetricSpec(
        "gen_ai_server_time_to_first_token_seconds",
        "histogram",
        "s",
        "api",
        "From request to the first token that the reader saw; of an answer in one piece, to its end.",
        GEN_AI,
        buckets=TTFT_BUCKETS,
        watch="how long users wait",
    ),
    MetricSpec(
        "gen_ai_server_time_per_output_token_seconds",
        "histogram",
        "s",
        "api",
        "Between tokens, after the first, with pauses after lost workers.",
        GEN_AI,
        buckets=TPOT_BUCKETS,
        watch="how fast users read",
    ),
    MetricSpec(
        "gen_ai_client_token_usage",
        "histogram",
        "{token}",
        "api",
        "Tokens of one request, by type (input | output).",
        (*GEN_AI, "gen_ai_token_type"),
        ("input", "output"),
        USAGE_BUCKETS,
    ),
)
JOBS = (
    MetricSpec(
        "penstock_jobs_total", "counter", "{job}", "worker", "Jobs that reached a final state.", ("model", "state")
    ),
    MetricSpec(
        "penstock_job_failures_total",
        "counter",
        "{job}",
        "worker, api, scheduler",
        "Jobs that failed, by the code of their error; neither cancelled nor expired ones.",
        ("code",),
        watch="why jobs fail: each failed job once, also one that is given up (`poison`, `attempts_exhausted`) or that "
        "a worker cannot read (`malformed_job`). One that the store itself cannot read is only in the dead letters",
    ),
    MetricSpec("penstock_claims_total", "counter", "{job}", "worker", "Jobs taken from a lane.", ("model", "priority")),
    MetricSpec(
        "penstock_attempts_total",
        "counter",
        "{job}",
        "worker",
        "Jobs begun, by number of the attempt.",
        ("model", "attempt"),
    ),
    MetricSpec(
        "penstock_continuations_total",
        "counter",
        "{job}",
        "worker",
        "Jobs begun with tokens that an earlier attempt had generated.",
        ("model",),
    ),
    MetricSpec(
        "penstock_preemptions_total",
        "counter",
        "{job}",
        "worker",
        "Running batch jobs put back into the queue for jobs of lane interactive.",
        ("model",),
    ),
    MetricSpec(
        "penstock_fallbacks_total",
        "counter",
        "{job}",
        "worker",
        "Jobs of a model that had an answer from another one (options.fallback).",
        ("model", "served_by"),
    ),
    MetricSpec(
        "penstock_queue_time_seconds",
        "histogram",
        "s",
        "worker",
        "Acceptance to claim.",
        ("model", "priority"),
        buckets=QUEUE_BUCKETS,
        watch="if TTFT is high: whether the queue or the engine causes it",
    ),
    MetricSpec(
        "penstock_part_seconds",
        "histogram",
        "s",
        "worker, api",
        "Time of completed jobs by part, as in the timing of one job; both egress parts to a millisecond.",
        ("model", "part"),
        tuple(each.name for each in (*PARTS, EGRESS_FIRST)),
        PART_BUCKETS,
        watch="which part of a request became slower",
    ),
    MetricSpec(
        "penstock_tokens_total",
        "counter",
        "{token}",
        "worker",
        "Tokens (prompt | completion | cached): of answers as they are written, also of a text that begins again; of "
        "prompts at the job's end.",
        ("model", "kind"),
        ("prompt", "completion", "cached"),
    ),
    MetricSpec(
        "penstock_cancel_to_abort_seconds",
        "histogram",
        "s",
        "worker",
        "Cancel heard to engine slot free.",
        ("model",),
        buckets=ABORT_BUCKETS,
    ),
    MetricSpec(
        "penstock_deadline_misses_total",
        "counter",
        "{job}",
        "worker, api, scheduler",
        "Jobs expired (queue | running).",
        ("where",),
        ("queue", "running"),
    ),
    MetricSpec(
        "penstock_lane_waiting",
        "gauge",
        "{job}",
        "api",
        "Jobs waiting in a lane.",
        ("model", "priority"),
        combined="computed",
        watch="if it grows, add workers or move some users to a lower lane",
    ),
    MetricSpec(
        "penstock_lane_running",
        "gauge",
        "{job}",
        "api",
        "Jobs of a lane that a worker has claimed and that have not ended.",
        ("model", "priority"),
        combined="computed",
    ),
    MetricSpec(
        "penstock_lane_oldest_seconds",
        "gauge",
        "s",
        "api",
        "Age of the oldest waiting job.",
        ("model", "priority"),
        combined="computed",
        watch="as the row above",
    ),
    MetricSpec(
        "penstock_lane_class_oldest_seconds",
        "gauge",
        "s",
        "api",
        "Longest wait of a job that is the next of its tenant, by class of tenants, of the 50 tenants that were served "
        "least; 0 if none of the class waits. "
        "A class without a configured tenant is absent (but for normal).",
        ("model", "priority", "tenant_class"),
        combined="computed",
        watch="whether one class waits while another is served: if all wait, add workers; if one does, see the weights",
    ),
)
