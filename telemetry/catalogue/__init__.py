"""Catalogue of metrics: name, type, unit, labels and meaning of every metric that Penstock exports.

Processes build their metrics from these rows (telemetry/metrics.py), docs/metrics.md has them as a table, and tests
compare the dashboards and alert rules of docker/ with them. Names follow Prometheus, and OpenTelemetry's GenAI
conventions where these have a metric. Every label has few values: from the settings, or from a short list.
"""

from __future__ import annotations

from collections.abc import Mapping

from telemetry.catalogue.offline import OFFLINE, RECORDS
from telemetry.catalogue.requests import JOBS, REQUESTS
from telemetry.catalogue.spec import MetricSpec
from telemetry.catalogue.workers import WORKERS

GROUPS: Mapping[str, tuple[MetricSpec, ...]] = {
    "Requests": REQUESTS,
    "Jobs and lanes": JOBS,
    "Workers and the scheduler": WORKERS,
    "Batches, webhooks and events": OFFLINE,
    "Records": RECORDS,
}
CATALOGUE: Mapping[str, MetricSpec] = {spec.name: spec for group in GROUPS.values() for spec in group}
"""Every metric, by its name."""
