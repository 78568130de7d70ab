"""What the queries of docker/ may ask for: every metric there is, by the names Prometheus gives it, and its labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import promql_parser

from streaming.fleet.process import Role
from streaming.priority import Priority
from telemetry import live_gauges
from telemetry.buffered import BufferedGauge, LabelledCounter, LabelledHistogram
from telemetry.live_gauges import LiveGauge
from telemetry.metrics import Metrics

ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
TARGET = {"instance", "job"}
"""Labels Prometheus adds to everything it reads."""

VALUES = {"priority": set(map(str, Priority)), "role": set(get_args(Role))}
"""Labels whose values are a short fixed list."""

SAID = re.compile(r"\(([^()]*\|[^()]*)\)")
"""The values of a metric's last label, where its help lists them: "(done | failed: the log says why)"."""

VARIABLES = {"$__rate_interval": "5m", "$model": "any"}
"""What Grafana puts in before it asks."""


def known() -> dict[str, set[str]]:
    """The labels of every series of telemetry/metrics.py, by its name."""
    found: dict[str, set[str]] = {}
    for metric in instruments():
        for ending in ENDINGS.get(getattr(metric, "_type", ""), ()):
            found[metric._name + ending] = {*metric._labelnames, *(("le",) if ending == "_bucket" else ())}
    gauges = (value for value in vars(live_gauges).values() if isinstance(value, LiveGauge))
    return found | {gauge.name: set(gauge.labels) for gauge in gauges}


def instruments() -> Iterator[Any]:
    """Every metric that a process keeps."""
    for value in vars(Metrics.start("", "api")).values():
        yield value.instrument if isinstance(value, LabelledCounter | BufferedGauge | LabelledHistogram) else value


def listed() -> dict[tuple[str, str], set[str]]:
    """The values of labels that are short fixed lists, by the metric's series and the label."""
    found = {}
    for metric in instruments():
        for ending in ENDINGS.get(getattr(metric, "_type", ""), ()):
            if metric._labelnames and (values := SAID.search(metric._documentation)):
                words = {word.partition(":")[0].strip() for word in values[1].split("|")}
                found[metric._name + ending, metric._labelnames[-1]] = words
    return found


def parsed(query: str) -> Any:
    """The query's tree, dashboard variables filled in. Raises ValueError if it is none."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in re.sub(r"\{\{.*?\}\}", "", query), f"a variable nobody fills in: {query}"
    return promql_parser.parse(query)


def selectors(tree: Any) -> Iterator[Any]:
    """Every series the tree asks for."""
    if isinstance(tree, promql_parser.VectorSelector):
        yield tree
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        if getattr(tree, name, None) is not None:
            yield from selectors(getattr(tree, name))
    for argument in getattr(tree, "args", ()):
        yield from selectors(argument)


def groupings(tree: Any) -> Iterator[tuple[Any, list[str]]]:
    """Every part of the tree that names labels to group or match by, with these labels."""
    modifier = getattr(tree, "modifier", None)
    matching = getattr(modifier, "matching", modifier)
    if matching is not None and getattr(matching, "labels", None):
        yield tree, list(matching.labels)
    for name in ("lhs", "rhs", "expr"):
        if getattr(tree, name, None) is not None:
            yield from groupings(getattr(tree, name))
    for argument in getattr(tree, "args", ()):
        yield from groupings(argument)


def complaints(query: str) -> list[str]:
    """What is asked for that does not exist: metrics, labels, values of labels."""
    series, lists, tree = known(), listed(), parsed(query)
    found = [f"no metric {each.name}" for each in selectors(tree) if each.name not in series]
    for each in selectors(tree):
        for matcher in each.matchers.matchers:
            if matcher.name not in series.get(each.name, set()) | TARGET:
                found.append(f"{each.name} has no label {matcher.name}")
                continue
            values = VALUES.get(matcher.name) or lists.get((each.name, matcher.name))
            if values and not set(matcher.value.split("|")) <= values:
                found.append(f"{matcher.name} is never {matcher.value}")
    for part, labels in groupings(tree):
        for each in selectors(part):
            lacking = set(labels) - series.get(each.name, set()) - TARGET
            found += [f"{each.name} has no label {label}" for label in sorted(lacking)]
    return found
