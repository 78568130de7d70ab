"""The catalogue of metrics is complete and true: what processes export is in it, and what is in it they export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from docker_metrics import series_of
from house import House, eventually
from prometheus_client.parser import text_string_to_metric_families

from streaming.fleet.process import Role
from telemetry.catalogue import CATALOGUE, GROUPS, LABELS
from telemetry.metrics import Labelled, Metrics

DOCS = Path(__file__).parents[2] / "docs"
UNITS = {"s": "_seconds", "J": "_joules", "1": "_ratio"}
"""Units that Prometheus wants in a name."""


def exported() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Type and labels of what `Metrics` shows, by name."""
    found = {}
    for value in vars(Metrics.start("", "api")).values():
        metric = value.instrument if isinstance(value, Labelled) else value
        if kind := getattr(metric, "_type", ""):
            found[metric._name + ("_total" if kind == "counter" else "")] = (kind, tuple(metric._labelnames))
    return found


def test_every_metric_is_exported_by_its_name() -> None:
    """But for those that are computed at each scrape."""
    rows = [spec for spec in CATALOGUE.values() if spec.combined != "computed"]
    assert exported() == {spec.name: (spec.kind, spec.labels) for spec in rows}
    assert sum(map(len, GROUPS.values())) == len(CATALOGUE), "a name comes twice"


def test_a_row_says_what_it_must() -> None:
    """A name as Prometheus wants it, a unit, a sentence, processes that exist, labels that are known."""
    for name, spec in CATALOGUE.items():
        assert re.fullmatch(r"(penstock|gen_ai)_[a-z_]+", name) and spec.meaning.endswith(".") and spec.unit, name
        assert (spec.kind == "counter") == name.endswith("_total"), name
        assert name.endswith(UNITS.get(spec.unit, "")), name
        assert set(spec.role.split(", ")) <= {"all", *get_args(Role)}, name
        assert set(spec.labels) <= set(LABELS) and bool(spec.buckets) == (spec.kind == "histogram"), name
        assert not spec.values or spec.labels, name
        assert spec.combined == "livesum" or spec.kind == "gauge", name


@pytest.mark.slow
def test_real_processes_export_what_is_in_it(empty_house: House) -> None:
    """Under a request and with every role, by their own ports and by the API; no series has a label of another name."""
    house = empty_house
    house.environ |= {"PENSTOCK_TELEMETRY_METRICS_DIR": str(house.folder / "metrics")}
    house.environ |= {"PENSTOCK_FILES_DIR": str(house.folder / "files")}
    for role in ("workers", "scheduler", "offline"):
        house.start(role)
    house.start_api()
    house.wait_ready()
    body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    assert house.post("/v1/chat/completions", body)[0] == 200
    series = {name: spec for spec in CATALOGUE.values() for name in series_of(spec)}

    def page() -> dict[str, set[str]]:
        families = text_string_to_metric_families(house.get("/metrics")[1].decode())
        return {each.name: set(each.labels) - {"le"} for family in families for each in family.samples}

    wanted = {"penstock_tokens_total", "penstock_batches_total", "penstock_workers_wanted", "penstock_lane_waiting"}
    eventually(lambda: wanted <= set(page()))
    found = page()
    assert set(found) <= set(series)
    assert {name: labels for name, labels in found.items() if labels != set(series[name].labels)} == {}
    assert not [name for name in found if "gpu" in name], "a machine without NVML has no series, not one that is 0"
