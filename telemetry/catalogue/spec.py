"""Metric specification: what the catalogue says of one metric, and where the values of its labels come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from telemetry.operations import OPERATIONS

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Combined: TypeAlias = Literal["livesum", "livemostrecent", "computed"]
"""How a gauge of several live processes is combined; "computed": by the API process that is asked, at each scrape."""

GEN_AI = ("gen_ai_operation_name", "gen_ai_request_model")

LABELS: Mapping[str, str] = {
    "attempt": "0 to 9, and 10+",
    "code": "an HTTP status, or a code of [the API's errors](api.md#errors)",
    "direction": "up, down",
    "end": "as the row says",
    "endpoint": "a route of [the API](api.md), or other",
    "gen_ai_operation_name": ", ".join(OPERATIONS),
    "gen_ai_request_model": "a configured model",
    "gen_ai_token_type": "input, output",
    "gpu": "the UUID of a GPU of this machine",
    "kind": "prompt, completion, cached",
    "model": "a configured model",
    "part": "a part of [a job's timing](operations.md#where-a-requests-time-went)",
    "priority": "the lane: interactive, standard, batch",
    "reason": "as the row says",
    "role": "api, worker, scheduler, offline",
    "served_by": "a configured model",
    "state": "a final state, as the row says",
    "tenant_class": "low, normal, high: the tenant's `weight` is below 1, 1, above 1",
    "where": "queue, running",
}
"""Every label, and where its values come from."""


class MetricSpec(NamedTuple):
    """One metric."""

    name: str
    """As Prometheus shows it; a histogram's without `_bucket`, `_sum` and `_count`."""
    kind: Kind
    unit: str
    """Of its value, in UCUM's words: s, J, {token}, 1 for a ratio, braces for what is counted."""
    role: str
    """The processes that count it."""
    meaning: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    """All values of the last label, if they are a short list: a counter shows them at 0 from the start."""
    buckets: tuple[float, ...] = ()
    combined: Combined = "livesum"
    watch: str = ""
    """What an operator looks for."""

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series in a query."""
        if self.kind == "histogram":
            return tuple(f"{self.name}{ending}" for ending in ("_bucket", "_sum", "_count"))
        return (self.name,)
