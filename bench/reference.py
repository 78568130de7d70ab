"""Tables of docs/metrics.md, made from the catalogue of metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from telemetry.catalogue import GROUPS, LABELS, MetricSpec


def _table(*rows: tuple[str, ...]) -> str:
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *body))


def _code(value: object) -> str:
    return f"`{value}`"


def metrics(group: str) -> str:
    """The metrics of a group of the catalogue ("requests" for "Requests"), or all of their labels ("labels")."""
    if group == "labels":
        return _table(("label", "values"), *((_code(name), said) for name, said in LABELS.items()))
    (specs,) = (specs for name, specs in GROUPS.items() if name.lower().replace(",", "").replace(" ", "-") == group)
    rows = []
    for spec in specs:
        labels = ", ".join(map(_code, spec.labels))
        said = _with_values(spec) + (f" **Watch**: {spec.watch}." if spec.watch else "")
        rows.append((_code(spec.name), spec.kind, _code(spec.unit), labels, spec.role, said.replace("|", r"\|")))
    return _table(("metric", "type", "unit", "labels", "from", ""), *rows)


def _with_values(spec: MetricSpec) -> str:
    """What a metric means; with the values of its last label, if its meaning does not name them."""
    if not spec.values or all(value in spec.meaning for value in spec.values):
        return spec.meaning
    return f"{spec.meaning} `{spec.labels[-1]}`: {', '.join(spec.values)}."


WRITERS: Mapping[str, Callable[[str], str]] = {"metrics": metrics}
"""By the kind of a mark; each takes the name behind it."""
