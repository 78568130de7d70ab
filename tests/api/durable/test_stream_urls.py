"""The Stream-Url of streamed answers: where it stands, who may read it, and that a replay costs nothing."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest
from api_in_process import api_in_process
from house import House

from api.settings import KeySettings
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

pytestmark = pytest.mark.slow

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "sim", "prompt": "x", "max_tokens": 4}),
        ("/v1/responses", {"model": "sim", "input": "x", "max_output_tokens": 4}),
    ],
)
def test_a_streamed_answer_says_where_it_can_be_resumed(house: House, path: str, body: dict[str, Any]) -> None:
    status, headers, _ = house.post(path, body | {"stream": True})
    job_id = headers["x-job-id"]
    assert (status, headers["stream-url"]) == (200, f"/v1/jobs/{job_id}/stream")
    messages = json.loads(house.get(headers["stream-url"])[1])
    assert (len(messages), messages[-1]["event"]) == (5, "completed")
    assert "stream-url" not in house.post(path, body)[1]
    again = [f"/v1/jobs/{job_id}/events"]
    if path == "/v1/responses":
        again.append(f"/v1/responses/resp_{job_id}?stream=true")
    for replay in again:
        assert house.request("GET", replay)[1]["stream-url"] == headers["stream-url"]


def test_reading_a_stream_again_counts_no_tokens(house: House) -> None:
    """Neither as an answer's nor as a tenant's."""
    url = house.post("/v1/chat/completions", CHAT | {"stream": True})[1]["stream-url"]
    usage = "/admin/tenants"

    def metered() -> list[str]:
        lines = house.get("/metrics")[1].decode().splitlines()
        return [line for line in lines if re.match(r"\w*(token|stream_resumes)\w*[{ ]", line)]

    before, used = metered(), house.get(usage)[1]
    assert any("token" in line for line in before) and json.loads(used)["data"][0]["jobs"]
    for query in ("", "?offset=-1&live=long-poll", "?offset=-1&live=sse"):
        assert house.get(url + query)[0] == 200
    assert (metered(), house.get(usage)[1]) == (before, used)


async def test_a_stream_is_read_with_its_own_tenants_key_alone(redis_url: str) -> None:
    keys = {
        name: KeySettings(sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=tenant)
        for name, tenant in (("first", "a"), ("second", "a"), ("other", "b"))
    }
    client = RedisClient.open(RedisSettings(url=redis_url))
    async with api_in_process(client, keys=keys) as api:
        accepted = await api.post("/v1/jobs", CHAT, authorization="Bearer first")
        url = f"/v1/jobs/{accepted.json()['id']}/stream"
        for method in ("GET", "HEAD"):
            for key, status in (("first", 200), ("second", 200), ("other", 404), ("none", 401)):
                answer = await api.client.request(method, url, headers={"Authorization": f"Bearer {key}"})
                assert answer.status_code == status, (method, key)
