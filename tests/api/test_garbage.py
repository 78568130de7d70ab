"""A request leaves nothing to the garbage collector, which would stop the process for it, and all streams with it."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator

import pytest
from api_in_process import LocalApi, api_in_process, key_of
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from streaming.order import Priority
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "x"}]}
PATH = "/v1/chat/completions"
OWN = {"Authorization": "Bearer secret"}
TIMES = 20


@pytest.fixture
async def local(redis_url: str) -> AsyncIterator[LocalApi]:
    client = RedisClient.open(RedisSettings(url=redis_url, lane_limit=4))
    async with api_in_process(client, {"k": key_of("secret", "t")}) as local:
        yield local


@pytest.mark.parametrize(
    ("status", "method", "path", "body", "key"),
    [
        (400, "POST", PATH, {"model": "sim"}, "secret"),
        (401, "POST", PATH, CHAT, "wrong"),
        (404, "POST", PATH, CHAT | {"model": "none"}, "secret"),
        (404, "GET", "/v1/jobs/job_00", None, "secret"),
        (404, "GET", "/v1/nothing", None, "secret"),
        (405, "PUT", PATH, None, "secret"),
        (429, "POST", PATH, CHAT, "secret"),
        (429, "POST", "/v1/responses", {"model": "sim", "input": "x"}, "secret"),
        (200, "GET", "/v1/models", None, "secret"),
    ],
)
async def test_a_request_leaves_nothing_to_the_garbage_collector(
    local: LocalApi, status: int, method: str, path: str, body: dict[str, object] | None, key: str
) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    if status == 429:
        await fill(local)
    await leaves_nothing(local, status, method, path, body, headers)


async def test_a_job_that_would_start_too_late_leaves_nothing(local: LocalApi) -> None:
    for _ in range(3):
        body = CHAT | {"queue": {"priority": "standard", "deadline_ms": 40_000}}  # so that it goes first
        await local.client.post("/v1/jobs", json=body, headers=OWN)
    await local.plan(Priority.STANDARD, wait_s=30.0, each_s=10.0, waiting=3)
    late = CHAT | {"queue": {"priority": "standard", "max_queue_ms": 1_000}}
    refusal = await local.client.post("/v1/jobs", json=late, headers=OWN)
    assert refusal.json()["error"]["code"] == "deadline_unreachable"
    await leaves_nothing(local, 429, "POST", "/v1/jobs", late, OWN)


async def test_a_refusal_of_a_full_store_leaves_nothing(local: LocalApi) -> None:
    """With an idempotency key, whose job is looked for first."""
    local.services.headroom.reason = local.services.headroom.brief = "full"
    await leaves_nothing(local, 503, "POST", PATH, CHAT, OWN | {"Idempotency-Key": "k"})


async def fill(local: LocalApi) -> None:
    """Put jobs until the lane is full."""
    while (await local.client.post(PATH, json=CHAT, headers=OWN | {"Prefer": "respond-async"})).status_code == 202:
        pass


async def leaves_nothing(
    local: LocalApi, status: int, method: str, path: str, body: dict[str, object] | None, headers: dict[str, str]
) -> None:
    async def ask() -> None:
        assert (await local.client.request(method, path, json=body, headers=headers)).status_code == status

    await ask()
    gc.collect()
    gc.disable()
    try:
        for _ in range(TIMES):
            await ask()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = [each for each in gc.garbage if isinstance(each, RequestResponseCycle)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not found
