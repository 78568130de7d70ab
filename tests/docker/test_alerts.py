"""Alert rules, by promtool on series that are replayed: each is raised by what it is for, and by nothing usual."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from docker_files import MONITORING, document

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in document(MONITORING / "alerts.yml")["groups"] for rule in group["rules"]
}
PROMTOOL = shutil.which("promtool") or ""
needs_promtool = pytest.mark.skipif(not PROMTOOL, reason="no promtool: it is in Debian's package prometheus")

AT = "40m"
"""Of 50 minutes: 200 steps of 15 s."""

USUAL = {
    'penstock_processes{role="api",instance="a"}': "1x200",
    'penstock_processes{role="worker",instance="w"}': "1x200",
    'penstock_processes{role="offline",instance="o"}': "1x200",
    'penstock_lane_waiting{model="m",priority="interactive",instance="a"}': "5x200",
    'penstock_lane_oldest_seconds{model="m",priority="interactive",instance="a"}': "2x200",
    'penstock_lane_oldest_seconds{model="m",priority="batch",instance="a"}': "9000x200",
    'penstock_workers_wanted{model="m",instance="s"}': "1x200",
    'penstock_requests_total{code="200",instance="a"}': "0+60x200",
    'penstock_requests_total{code="503",instance="a"}': "0+1x200",
    'penstock_lapsed_workers_total{instance="a"}': "0x150 1x50",
    'penstock_jobs_given_up_total{instance="a"}': "1x200",
    'penstock_batch_due_notices_total{reason="due",instance="o"}': "0+50x200",
    'penstock_batch_due_notices_total{reason="unanswered",instance="o"}': "3x200",
    'penstock_batch_turns_total{end="failed",instance="o"}': "0x150 1x50",
    'penstock_webhook_attempts_total{end="failed",instance="o"}': "2x200",
    'penstock_webhook_attempts_total{end="retried",instance="o"}': "0+5x200",
    'penstock_stream_resets_total{instance="a"}': "0x150 1x50",
    'penstock_records_dropped_total{reason="disk",instance="a"}': "7x200",
    'penstock_engine_evictions_total{model="m",instance="w"}': "0+1x200",
    'penstock_claims_total{model="m",priority="standard",instance="w"}': "0+20x200",
}
"""Series of a deployment that is well: a worker was lost, a turn failed once, batches wait for hours."""

Wrong = tuple[str, str, dict[str, str]]
WRONG: dict[str, Wrong] = {
    "PenstockNoApi": ('penstock_processes{role="api",instance="a"}', "", {"role": "api"}),
    "PenstockStoreUnreachable": (
        'penstock_processes{role="api",instance="b"}', "1x200", {"role": "api", "instance": "b"},
    ),
    "PenstockInteractiveWaits": (
        'penstock_lane_oldest_seconds{model="m",priority="interactive",instance="a"}', "0+15x200", {"model": "m"},
    ),
    "PenstockLaneFillsUp": (
        'penstock_lane_waiting{model="m",priority="batch",instance="a"}', "9000x200",
        {"model": "m", "priority": "batch"},
    ),
    "PenstockWorkersMissing": ('penstock_workers_wanted{model="m",instance="s"}', "3x200", {}),
    "PenstockWorkersDie": ('penstock_lapsed_workers_total{instance="a"}', "0x120 0+1x80", {}),
    "PenstockJobsGivenUp": ('penstock_jobs_given_up_total{instance="a"}', "0x150 1x50", {}),
    "PenstockNoOffline": ('penstock_processes{role="offline",instance="o"}', "", {"role": "offline"}),
    "PenstockBatchesUnanswered": (
        'penstock_batch_due_notices_total{reason="unanswered",instance="o"}', "0+2x200", {},
    ),
    "PenstockBatchTurnsFail": ('penstock_batch_turns_total{end="failed",instance="o"}', "0x120 0+1x80", {}),
    "PenstockWebhooksGivenUp": ('penstock_webhook_attempts_total{end="failed",instance="o"}', "0x150 1x50", {}),
    "PenstockServerErrors": ('penstock_requests_total{code="503",instance="a"}', "0+20x200", {}),
    "PenstockStreamsReset": ('penstock_stream_resets_total{instance="a"}', "0x130 0+1x70", {}),
    "PenstockRecordsLost": ('penstock_records_dropped_total{reason="disk",instance="a"}', "0x150 3x50", {}),
    "PenstockEvictions": ('penstock_engine_evictions_total{model="m",instance="w"}', "0+5x200", {"model": "m"}),
}  # fmt: skip
"""By alert: the series that differs from USUAL, how ("": it is absent), and the labels of the alert beside its
severity."""


def promtool(*words: str) -> str:
    """Run it; its output. Fails with that if it does."""
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def replayed(folder: Path, series: dict[str, str], raised: dict[str, dict[str, str]]) -> str:
    """Replay these series on the rules; of all alerts, these and no others must be raised, with these labels."""
    rules = [{key: value for key, value in rule.items() if key != "annotations"} for rule in RULES.values()]
    (folder / "rules.yml").write_text(json.dumps({"groups": [{"name": "penstock", "rules": rules}]}))
    tests = [
        {"eval_time": AT, "alertname": name, "exp_alerts": [{"exp_labels": raised[name]}] if name in raised else []}
        for name in RULES
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items() if values]
    test = {"interval": "15s", "input_series": inputs, "alert_rule_test": tests}
    whole = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [test]}
    (folder / "test.yml").write_text(json.dumps(whole))
    return promtool("test", "rules", str(folder / "test.yml"))


@needs_promtool
def test_what_is_usual_raises_no_alert(tmp_path: Path) -> None:
    replayed(tmp_path, USUAL, {})


@needs_promtool
@pytest.mark.parametrize("name", WRONG)
def test_each_alert_is_raised_by_what_it_is_for(tmp_path: Path, name: str) -> None:
    """And no other one with it."""
    series, values, labels = WRONG[name]
    replayed(tmp_path, USUAL | {series: values}, {name: {**RULES[name]["labels"], **labels}})


@needs_promtool
def test_the_rules_and_their_texts_are_understood() -> None:
    """By the program that will read them, the templates of their annotations included."""
    promtool("check", "rules", str(MONITORING / "alerts.yml"))


def test_every_alert_is_tried_and_has_its_section() -> None:
    """Where its link leads; and no section is about an alert that is gone."""
    assert set(WRONG) == set(RULES)
    sections = re.findall(r"^## (\w+)$", (DOCS / "alerts.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sections == list(RULES)
    for name, rule in RULES.items():
        assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{name.lower()}"
