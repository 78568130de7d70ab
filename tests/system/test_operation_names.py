"""Operation names: spans and metrics of every endpoint have the same one, and it is one that the catalogue lists."""

from __future__ import annotations

from typing import Any

import pytest
from house import House, eventually
from otlp_collector import Collector, attributes_of, collector
from prometheus_client.parser import text_string_to_metric_families

from streaming.jobs.job import Endpoint
from telemetry.catalogue import LABELS

__all__ = ["collector"]  # a fixture

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "x"}]
REQUESTS: dict[Endpoint, list[tuple[dict[str, Any], str]]] = {
    Endpoint.CHAT: [({"messages": HELLO, "max_tokens": 2}, "chat")],
    Endpoint.COMPLETIONS: [
        ({"prompt": "x", "max_tokens": 2}, "text_completion"),
        ({"prompt": [1, 2], "max_tokens": 2}, "text_completion"),
    ],
    Endpoint.RESPONSES: [({"input": "x", "max_output_tokens": 2}, "chat")],
    Endpoint.EMBEDDINGS: [({"input": "x"}, "embeddings")],
    Endpoint.RERANK: [({"query": "x", "documents": ["x"]}, "rerank")],
    Endpoint.TOKENIZE: [({"prompt": "x"}, "tokenize")],
    Endpoint.DETOKENIZE: [({"tokens": [1]}, "detokenize")],
}
"""Bodies and operations."""


def counted(house: House) -> dict[str, float]:
    """Requests by operation, as the metrics page has them."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(house.get("/metrics")[1].decode()):
        for sample in family.samples:
            if sample.name == "gen_ai_server_request_duration_seconds_count":
                found[sample.labels["gen_ai_operation_name"]] = sample.value
    return found


def test_every_endpoint_has_one_operation(empty_house: House, collector: Collector) -> None:
    """In the attempt's span, its name, and the metrics; the catalogue lists all of them, and no other."""
    house = empty_house
    house.environ["PENSTOCK_TELEMETRY_OTLP_ENDPOINT"] = collector.url
    house.environ["OTEL_BSP_SCHEDULE_DELAY"] = "100"
    house.start_all("workers")
    for endpoint in Endpoint:
        for body, operation in REQUESTS[endpoint]:
            before = counted(house).get(operation, 0.0)
            status, headers, _ = house.post(endpoint.path, {"model": "sim", **body})
            assert status == 200, endpoint
            (name, found) = _attempt(collector, headers["x-job-id"])
            assert (name, found["gen_ai.operation.name"]) == (f"{operation} sim", operation), endpoint
            eventually(lambda name=operation, past=before: counted(house).get(name) == past + 1)
    assert set(counted(house)) == set(LABELS["gen_ai_operation_name"].split(", "))


def _attempt(collector: Collector, job_id: str) -> tuple[str, dict[str, Any]]:
    """The name and the attributes of the span of a job's attempt."""

    def sent() -> tuple[str, dict[str, Any]] | None:
        for span in collector.sent:
            found = attributes_of(span)
            if found.get("penstock.job.id") == job_id and "gen_ai.operation.name" in found:
                return span.name, found
        return None

    span = eventually(sent)
    assert isinstance(span, tuple)
    return span
