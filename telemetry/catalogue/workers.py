"""Metrics of workers, their engines and GPUs, and of the scheduler."""

from __future__ import annotations

from telemetry.catalogue.spec import MetricSpec

WORKERS = (
    MetricSpec(
        "penstock_worker_slots", "gauge", "{text}", "worker", "Texts the workers can generate at once.", ("model",)
    ),
    MetricSpec(
        "penstock_worker_reserved_slots",
        "gauge",
        "{text}",
        "worker",
        "Slots of them that lane batch may not fill.",
        ("model",),
    ),
    MetricSpec(
        "penstock_worker_running", "gauge", "{text}", "worker", "Slots in use: texts that the engines run.", ("model",)
    ),
    MetricSpec(
        "penstock_worker_kv_tokens",
        "gauge",
        "{token}",
        "worker",
        "Size of the KV caches; absent of engines that have no limit beyond their slots.",
        ("model",),
    ),
    MetricSpec(
        "penstock_worker_kv_used_tokens",
        "gauge",
        "{token}",
        "worker",
        "Tokens in the KV caches; absent as above.",
        ("model",),
    ),
    MetricSpec(
        "penstock_engine_evictions_total",
        "counter",
        "{text}",
        "worker",
        "Texts that an engine evicted or paused because its KV cache was full.",
        ("model",),
        watch="if it grows steadily: a larger cache, or fewer slots",
    ),
    MetricSpec(
        "penstock_engine_miscounted_total",
        "counter",
        "{text}",
        "worker",
        "Complete answers whose counts of tokens, as an upstream server gave them, could not be true. Their tokens are "
        "counted as those of a server that gives no counts.",
        ("model",),
        watch="whether bills by `usage` are exact: a server counts wrongly",
    ),
    MetricSpec(
        "penstock_gpu_energy_joules",
        "gauge",
        "J",
        "worker",
        "Energy that a GPU has used since its driver was loaded; grows. Absent where neither NVML nor a DCGM "
        "exporter tells, never 0, as the three below.",
        ("gpu",),
        combined="livemostrecent",
    ),
    MetricSpec(
        "penstock_gpu_busy_ratio",
        "gauge",
        "1",
        "worker",
        "Share of the driver's last sample period in which a GPU ran a kernel.",
        ("gpu",),
        combined="livemostrecent",
    ),
    MetricSpec(
        "penstock_gpu_power_watts", "gauge", "W", "worker", "Power of a GPU now.", ("gpu",), combined="livemostrecent"
    ),
    MetricSpec(
        "penstock_gpu_memory_used_bytes",
        "gauge",
        "By",
        "worker",
        "Memory of a GPU in use.",
        ("gpu",),
        combined="livemostrecent",
    ),
    MetricSpec(
        "penstock_gate_waits_total",
        "counter",
        "{text}",
        "worker",
        "Texts that waited at the gate before they began (slots | kv | ttft | itl).",
        ("model", "reason"),
        ("slots", "kv", "ttft", "itl"),
    ),
    MetricSpec(
        "penstock_gate_peak_tokens",
        "gauge",
        "{token}",
        "worker",
        "KV cache that the running texts are predicted to hold at most.",
        ("model",),
    ),
    MetricSpec(
        "penstock_gate_reserve_ratio",
        "gauge",
        "1",
        "worker",
        "Share of the KV cache that the gate keeps free.",
        ("model",),
        combined="livemostrecent",
    ),
    MetricSpec(
        "penstock_lapsed_workers_total",
        "counter",
        "{worker}",
        "worker, api, scheduler",
        "Workers whose lease ran out.",
        watch="whether workers die",
    ),
    MetricSpec(
        "penstock_lease_reclaims_total",
        "counter",
        "{job}",
        "worker, api, scheduler",
        "Jobs taken back from lapsed workers.",
        watch="what their deaths cost",
    ),
    MetricSpec(
        "penstock_jobs_given_up_total",
        "counter",
        "{job}",
        "worker, api, scheduler",
        "Jobs that lost too many workers.",
        watch="whether a request kills workers; it is in the dead letters (`GET /admin/dlq`)",
    ),
    MetricSpec(
        "penstock_workers_wanted",
        "gauge",
        "{worker}",
        "scheduler",
        "The scheduler's plan.",
        ("model",),
        combined="livemostrecent",
    ),
    MetricSpec(
        "penstock_scale_decisions_total",
        "counter",
        "{decision}",
        "scheduler",
        "Changes of plan (up | down).",
        ("model", "direction"),
        ("up", "down"),
    ),
    MetricSpec("penstock_processes", "gauge", "{process}", "all", "Live processes.", ("role",)),
)
