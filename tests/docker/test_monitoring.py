"""Dashboards, alerts and scaling queries ask only for what is counted, and the parts of the monitoring fit together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from docker_files import KUBERNETES, MONITORING, document
from docker_metrics import complaints, listed, parsed, selectors

from telemetry.metrics import Metrics

BOARDS = {path.name: json.loads(path.read_text("utf-8")) for path in (MONITORING / "grafana/dashboards").glob("*.json")}
RULES: list[dict[str, Any]] = [
    rule for group in document(MONITORING / "alerts.yml")["groups"] for rule in group["rules"]
]
SCALING = document(KUBERNETES / "keda/scaledobject.yaml")["spec"]["triggers"]

SHOWN = {
    "penstock_requests_total", "penstock_errors_total", "penstock_tokens_total", "penstock_queue_time_seconds_bucket",
    "gen_ai_server_time_to_first_token_seconds_bucket", "gen_ai_server_time_per_output_token_seconds_bucket",
    "gen_ai_server_request_duration_seconds_bucket", "penstock_lane_waiting", "penstock_lane_oldest_seconds",
    "penstock_workers_wanted", "penstock_processes", "penstock_worker_running", "penstock_worker_slots",
    "penstock_lease_reclaims_total", "penstock_jobs_given_up_total",
    "penstock_batches_unfinished", "penstock_batch_enqueued_tokens", "penstock_batches_total",
    "penstock_batch_lines_total", "penstock_batch_turns_total", "penstock_batch_due_notices_total",
    "penstock_worker_reserved_slots", "penstock_webhook_attempts_total", "penstock_events_published_total",
    "penstock_events_taken_total", "penstock_continuations_total", "penstock_preemptions_total",
    "penstock_stream_resets_total", "penstock_gate_waits_total", "penstock_worker_kv_tokens",
    "penstock_worker_kv_used_tokens", "penstock_engine_evictions_total", "penstock_gate_reserve_ratio",
    "penstock_gpu_energy_joules", "penstock_gpu_busy_ratio", "penstock_cancel_to_abort_seconds_bucket",
    "penstock_part_seconds_sum",
}  # fmt: skip
"""What an operator must be able to see without asking for it."""


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """(where, query) of everything that asks Prometheus."""
    for name, board in BOARDS.items():
        for panel in panels(board):
            yield from ((f"{name}: {panel['title']}", target["expr"]) for target in panel["targets"])
    yield from ((rule["alert"], rule["expr"]) for rule in RULES)
    yield from ((f"keda: trigger {at}", trigger["metadata"]["query"]) for at, trigger in enumerate(SCALING))


def test_what_is_asked_for_is_counted() -> None:
    """Metrics, labels and fixed label values are those of telemetry/catalogue."""
    assert [(where, found) for where, query in queries() if (found := complaints(query))] == []


def test_the_dashboards_show_what_matters() -> None:
    """All of it, on one board or another."""
    shown = {each.name for board in BOARDS.values() for panel in panels(board) for target in panel["targets"]
             for each in selectors(parsed(target["expr"]))}  # fmt: skip
    assert SHOWN - shown == set()


def test_what_an_alert_waits_for_is_shown_before_it_happens() -> None:
    """A counter that is first seen at 1 has not grown, for Prometheus; so those of fixed labels begin at 0."""
    page, lists = Metrics.start("", "offline").expose().decode(), listed()
    waited = {
        f'{each.name}{{{matcher.name}="{matcher.value}"}} 0.0'
        for rule in RULES
        for each in selectors(parsed(rule["expr"]))
        for matcher in each.matchers.matchers
        if (each.name, matcher.name) in lists and each.name.endswith("_total")
    }
    assert len(waited) >= 3 and {line for line in waited if line not in page} == set()
