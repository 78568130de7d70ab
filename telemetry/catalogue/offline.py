"""Metrics of batches, webhooks, events and records."""

from __future__ import annotations

from telemetry.catalogue.spec import MetricSpec

OFFLINE = (
    MetricSpec(
        "penstock_batches_total",
        "counter",
        "{batch}",
        "offline",
        "Batches that ended.",
        ("state",),
        ("completed", "failed", "cancelled", "expired"),
        watch="whether batches fail",
    ),
    MetricSpec(
        "penstock_batch_lines_total",
        "counter",
        "{line}",
        "offline",
        "Lines of batches whose job has ended.",
        watch="if batches are slow: the pace",
    ),
    MetricSpec(
        "penstock_batch_turns_total",
        "counter",
        "{turn}",
        "offline",
        "Turns at batches.",
        ("end",),
        ("done", "taken", "failed"),
        watch="whether turns fail (then read the log)",
    ),
    MetricSpec(
        "penstock_batch_due_notices_total",
        "counter",
        "{notice}",
        "offline",
        "Due notices of batches, by why.",
        ("reason",),
        ("due", "unanswered", "lapsed"),
        watch="`unanswered`: the one before led to nothing, because all offline processes are "
        "busy or Celery lost messages; `lapsed`: an offline process died",
    ),
    MetricSpec(
        "penstock_batches_unfinished",
        "gauge",
        "{batch}",
        "api",
        "Batches that have not ended.",
        combined="computed",
        watch="if batches are slow",
    ),
    MetricSpec(
        "penstock_batch_enqueued_tokens",
        "gauge",
        "{token}",
        "api",
        "Tokens that batches still have to compute.",
        combined="computed",
    ),
    MetricSpec(
        "penstock_webhook_attempts_total",
        "counter",
        "{attempt}",
        "offline",
        "Webhooks by what came of an attempt.",
        ("end",),
        ("delivered", "retried", "failed"),
        watch="`failed`: webhooks are given up; see `penstock webhooks ls`",
    ),
    MetricSpec("penstock_events_published_total", "counter", "{event}", "offline", "Events given to the broker."),
    MetricSpec(
        "penstock_events_taken_total",
        "counter",
        "{message}",
        "offline",
        "Messages from the broker.",
        ("end",),
        ("accepted", "rejected"),
    ),
)
RECORDS = (
    MetricSpec("penstock_records_written_total", "counter", "{record}", "all", "Records written to the local disk."),
    MetricSpec(
        "penstock_records_dropped_total",
        "counter",
        "{record}",
        "all",
        "Records lost: the buffer was full, or the disk refused them.",
        ("reason",),
        ("full", "disk"),
        watch="whether lines for the [records](records.md) are lost, and why",
    ),
)
