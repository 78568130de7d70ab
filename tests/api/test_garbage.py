"""A request leaves nothing to the garbage collector, which would stop the process for it, and all streams with it."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator

import pytest
from api_in_process import LocalApi, api_in_process, key_of

from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "x"}]}
TIMES = 20


@pytest.fixture
async def local(redis_url: str) -> AsyncIterator[LocalApi]:
    client = RedisClient.open(RedisSettings(url=redis_url, lane_limit=1))
    async with api_in_process(client, {"k": key_of("secret", "t")}) as local:
        yield local


@pytest.mark.parametrize(
    ("status", "method", "path", "body", "key"),
    [
        (400, "POST", "/v1/chat/completions", {"model": "sim"}, "secret"),
        (401, "POST", "/v1/chat/completions", CHAT, "wrong"),
        (404, "POST", "/v1/chat/completions", CHAT | {"model": "none"}, "secret"),
        (404, "GET", "/v1/jobs/job_00", None, "secret"),
        (404, "GET", "/v1/nothing", None, "secret"),
        (405, "PUT", "/v1/chat/completions", None, "secret"),
        (429, "POST", "/v1/chat/completions", CHAT, "secret"),
        (429, "POST", "/v1/responses", {"model": "sim", "input": "x"}, "secret"),
        (200, "GET", "/v1/models", None, "secret"),
    ],
)
async def test_a_request_leaves_nothing_to_the_garbage_collector(
    local: LocalApi, status: int, method: str, path: str, body: dict[str, object] | None, key: str
) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    if status == 429:
        while (await local.post("/v1/chat/completions", CHAT, prefer="respond-async", **headers)).status_code == 202:
            pass

    async def ask() -> None:
        assert (await local.client.request(method, path, json=body, headers=headers)).status_code == status

    await ask()
    gc.collect()
    gc.disable()
    try:
        for _ in range(TIMES):
            await ask()
        found = gc.collect()
    finally:
        gc.enable()
    assert found < TIMES, f"{found / TIMES:.0f} objects of each request"
