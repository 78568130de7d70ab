"""What the queries of docker/ may ask for: every metric there is, by the names Prometheus gives it, and its labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import promql_parser

from streaming.fleet.process import Role
from streaming.order import Priority
from telemetry.catalogue import CATALOGUE, MetricSpec

TARGET = {"instance", "job"}
"""Labels Prometheus adds to everything it reads."""

VALUES = {"priority": set(map(str, Priority)), "role": set(get_args(Role))}
"""Labels whose values are a short fixed list."""

VARIABLES = {"$__rate_interval": "5m", "$model": "any"}
"""What Grafana puts in before it asks."""


def series_of(spec: MetricSpec) -> tuple[str, ...]:
    """The names of a metric's series in a query."""
    if spec.kind == "histogram":
        return tuple(f"{spec.name}{ending}" for ending in ("_bucket", "_sum", "_count"))
    return (spec.name,)


def known() -> dict[str, set[str]]:
    """The labels of every series of the catalogue, by its name."""
    return {
        name: {*spec.labels, *(("le",) if name.endswith("_bucket") else ())}
        for spec in CATALOGUE.values()
        for name in series_of(spec)
    }


def listed() -> dict[tuple[str, str], set[str]]:
    """The values of labels that are short fixed lists, by the metric's series and the label."""
    return {
        (name, spec.labels[-1]): set(spec.values)
        for spec in CATALOGUE.values()
        if spec.values
        for name in series_of(spec)
    }


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
