"""A client's standing is its key's: nothing that it sends makes it another tenant, gives it weight or a higher lane."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process, key_of
from batching import MODELS, batch_record

from api.openai.batch_lines import envelope, job_of, request_of
from streaming.fleet.aliases import NO_ALIASES
from streaming.order import Priority
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

LOW, HIGH = "sk-low-0123456789", "sk-high-0123456789"
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hello"}]}
HEADERS = {
    "X-Tenant": "high", "X-Tenant-Id": "high", "X-Penstock-Tenant": "high", "X-User-Id": "high",
    "X-Forwarded-User": "high",
    "OpenAI-Organization": "high", "OpenAI-Project": "high", "X-Priority": "interactive", "X-Lane": "interactive",
    "X-Weight": "1000", "X-SMG-Priority": "interactive", "X-Service-Tier": "priority", "Priority": "u=0", "Baggage":
    "tenant=high,priority=interactive", "X-Api-Key": HIGH, "Api-Key": HIGH, "Cookie": f"tenant=high; key={HIGH}",
}  # fmt: skip
FIELDS: tuple[dict[str, Any], ...] = (
    {"queue": {"priority": "interactive"}},
    {"service_tier": "priority"},
    {"service_tier": "scale", "queue": {"priority": "interactive"}},
    {"tenant": "high", "weight": 1000, "lane": "interactive", "ceiling": "interactive"},
    {"user": "high"},
    {"metadata": {"tenant": "high", "priority": "interactive", "weight": "1000", "batch": "batch_1", "line": "0"}},
    {"priority": 0, "nvext": {"priority": 1}, "extra_body": {"queue": {"priority": "interactive"}}},
)


@pytest.fixture
async def api(redis_url: str, wire: RedisClient, tmp_path: Path) -> AsyncIterator[LocalApi]:
    keys = {
        "low": key_of(LOW, "low", priority=Priority.BATCH),
        "high": key_of(HIGH, "high", priority=Priority.INTERACTIVE),
    }
    async with api_in_process(RedisClient.open(wire.settings), keys, files=tmp_path) as api:
        yield api


async def test_no_field_lifts_a_batch(api: LocalApi) -> None:
    """Its tenant and its highest lane are those of the key that created it."""
    authorized = {"Authorization": f"Bearer {LOW}"}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "sim", "prompt": "x"}}
    sent = await api.client.post(
        "/v1/files", files={"file": ("in.jsonl", json.dumps(row))}, data={"purpose": "batch"}, headers=authorized
    )
    body = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    lifted = {"tenant": "high", "ceiling": "interactive", "priority": "interactive", "lane": "interactive"}
    for more in ({}, lifted, {"metadata": {"tenant": "high", "lane": "interactive"}}):
        answer = await api.client.post("/v1/batches", json=body | more, headers=authorized | HEADERS)
        if answer.status_code == 400:
            assert more is lifted and answer.json()["error"]["param"] in lifted
            continue
        batch = (await api.services.batches.get(answer.json()["id"], "low")).batch
        assert (batch.tenant, batch.ceiling) == ("low", Priority.BATCH)


BATCH = batch_record(tenant="low")


@pytest.mark.parametrize("fields", FIELDS, ids="+".join)
def test_no_field_lifts_a_line(fields: dict[str, Any]) -> None:
    """Neither in the request nor in the envelope around it."""
    around = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    row = json.dumps(around | FIELDS[3] | {"body": CHAT | fields})
    request = request_of(envelope(row.encode(), "/v1/chat/completions"), "", NO_ALIASES, MODELS)
    job = job_of(request, BATCH, job_id="j", number=0, lane=Priority.BATCH, left_ms=None)
    assert (job.tenant, job.priority) == ("low", Priority.BATCH)
    assert job.metadata == {"batch": BATCH.id, "line": "0"}, "not what the line says"
