"""A request that cannot start in the time that it allows is refused at once: every shape, nothing queued, no guess."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process
from flow import until
from httpx2 import Response

from streaming.jobs.lease import Lease
from streaming.order import Priority
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

WAITING = 3
FIRST = {"priority": "standard", "deadline_ms": 40_000}
"""Of jobs whose longest answer leaves them no time to wait: they go before all others of their tenant."""
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"model": "sim", "prompt": "hello"}
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "chat": ("/v1/chat/completions", CHAT, {}),
    "streamed chat": ("/v1/chat/completions", CHAT | {"stream": True}, {}),
    "chat as a job": ("/v1/chat/completions", CHAT, {"Prefer": "respond-async"}),
    "choices": ("/v1/chat/completions", CHAT | {"n": 4}, {}),
    "completion": ("/v1/completions", PROMPT, {}),
    "streamed completion": ("/v1/completions", PROMPT | {"stream": True}, {}),
    "prompts": ("/v1/completions", {"model": "sim", "prompt": ["a", "b", "c"], "n": 2}, {}),
    "token prompts": ("/v1/completions", {"model": "sim", "prompt": [[1, 2], [3]]}, {}),
    "job": ("/v1/jobs", CHAT, {}),
    "completion job": ("/v1/jobs", PROMPT | {"endpoint": "/v1/completions"}, {}),
    "new key": ("/v1/jobs", CHAT, {"Idempotency-Key": "new"}),
}


@pytest.fixture
async def busy(redis_url: str, wire: RedisClient) -> AsyncIterator[LocalApi]:
    """A model whose lane has three waiting jobs and a wait of half a minute, told by a plan that held for past jobs."""
    client = RedisClient.open(wire.settings)
    async with api_in_process(client) as api:
        await fill(api, FIRST)
        await api.plan(Priority.STANDARD, wait_s=30.0, each_s=10.0, waiting=WAITING)
        for limited in (True, False):
            api.calibrate(Priority.STANDARD, 0.2, limited=limited)
        yield api


async def fill(api: LocalApi, queue: dict[str, Any]) -> None:
    for _ in range(WAITING):
        assert (await api.post("/v1/jobs", CHAT | {"queue": queue})).status_code == 202


async def queued(api: LocalApi) -> int:
    return sum(lane.waiting for lane in await api.services.backlog.lanes(["sim"]))


def limited(body: dict[str, Any], **queue: int) -> dict[str, Any]:
    return body | {"queue": {"priority": "standard", **queue}}


async def test_every_shape_is_refused_before_anything_is_queued(busy: LocalApi) -> None:
    """429 with the field, the estimate and the fix; the time to come back is what is left of the wait then: 21.5 s,
    rounded up."""
    for shape, (path, body, headers) in SHAPES.items():
        await busy.plan(Priority.STANDARD, wait_s=30.0, each_s=10.0, waiting=WAITING)
        answer = await busy.client.post(path, json=limited(body, max_queue_ms=8_500), headers=headers)
        error = answer.json()["error"]
        found = (answer.status_code, error["code"], error["param"])
        assert found == (429, "deadline_unreachable", "queue.max_queue_ms"), shape
        assert (error["eta_ms"], answer.headers["retry-after"]) == (30_000, "22"), shape
        assert all(words in error["message"] for words in ("8,500 ms", "30,000 ms", "higher lane")), shape
        assert "x-job-id" not in answer.headers and "x-should-retry" not in answer.headers, shape
        assert await queued(busy) == WAITING, shape
        assert len((await busy.client.get("/v1/jobs")).json()["data"]) == WAITING, shape


async def test_the_tighter_limit_is_named(busy: LocalApi) -> None:
    """deadline_ms ends with the last token, so the wait must fit into it as well."""
    for limits, field in (
        ({"deadline_ms": 5_000}, "queue.deadline_ms"),
        ({"deadline_ms": 5_000, "max_queue_ms": 4_000}, "queue.max_queue_ms"),
        ({"deadline_ms": 4_000, "max_queue_ms": 600_000}, "queue.deadline_ms"),
    ):
        answer = await busy.post("/v1/jobs", limited(CHAT, **limits))
        assert (answer.status_code, answer.json()["error"]["param"]) == (429, field)


async def test_a_request_without_a_limit_is_never_refused_for_its_wait(busy: LocalApi) -> None:
    for body in (CHAT, limited(CHAT)):
        answer = await busy.post("/v1/jobs", body)
        assert answer.status_code == 202
        assert answer.json()["eta_low_ms"] < answer.json()["eta_ms"] < answer.json()["eta_high_ms"]
    assert (await busy.post("/v1/jobs", limited(CHAT, max_queue_ms=60_000))).status_code == 202


async def test_no_guess_refuses(busy: LocalApi) -> None:
    """Another lane without an estimate, no scheduler's plan, a plan that nobody vouches for, a model that sleeps."""
    asked = limited(CHAT, max_queue_ms=1)
    other = CHAT | {"queue": {"priority": "batch", "max_queue_ms": 1}}
    assert (await busy.post("/v1/jobs", other)).status_code == 202
    now_ms = await busy.services.store_client.now_ms()
    for changed in ({"at_ms": now_ms - 5_000}, {"want": 0}):
        await busy.plan(Priority.STANDARD, wait_s=30.0, each_s=10.0, waiting=WAITING, **changed)
        assert (await busy.post("/v1/jobs", asked)).status_code == 202
    busy.services.waits.plans.learn({}, 0)
    assert (await busy.post("/v1/jobs", asked)).status_code == 202


async def test_hopeless_waits_are_refused_without_measured_ones(redis_url: str, wire: RedisClient) -> None:
    """A wait of ten times the limit, by the plan alone, unless more workers are on their way; a shorter one may be a
    mistake of the plan."""
    async with api_in_process(RedisClient.open(wire.settings)) as api:
        await fill(api, FIRST)
        standing = {"wait_s": 30.0, "each_s": 10.0, "waiting": WAITING}
        await api.plan(Priority.STANDARD, **standing)
        answer = await api.post("/v1/jobs", limited(CHAT, max_queue_ms=1_000))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["eta_ms"]) == (429, "deadline_unreachable", 30_000)
        assert "nine of ten" not in error["message"], "nobody has measured that"
        assert (await api.post("/v1/jobs", limited(CHAT, max_queue_ms=3_500))).status_code == 202
        await api.plan(Priority.STANDARD, want=2, **standing)
        assert (await api.post("/v1/jobs", limited(CHAT, max_queue_ms=1_000))).status_code == 202


async def test_a_short_wait_beyond_a_shorter_limit_is_refused_without_measured_ones(wire: RedisClient) -> None:
    """Three seconds for the next place to be free, and a millisecond: none is free now. Once one is, it is accepted,
    whatever the plan said."""
    async with api_in_process(RedisClient.open(wire.settings)) as api:
        await api.plan(Priority.STANDARD, wait_s=3.246, each_s=3.246)
        asked = limited(CHAT, deadline_ms=1)

        async def refused() -> Response | None:
            """The process may have just read, before this plan, that there is no worker."""
            answer = await api.post("/v1/jobs", asked)
            if answer.status_code == 202:
                await api.post(f"/v1/jobs/{answer.json()['id']}/cancel", {})
                return None
            return answer

        answer = await until(refused)
        assert answer is not None
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["eta_ms"]) == (429, "deadline_unreachable", 3_246)
        assert (await api.post("/v1/jobs", limited(CHAT, deadline_ms=325))).status_code == 202
        for row in (await api.client.get("/v1/jobs")).json()["data"]:
            await api.post(f"/v1/jobs/{row['id']}/cancel", {})
        lease = Lease(wire, "sim")
        await lease.register()
        await lease.claim(0, 1)
        assert (await api.post("/v1/jobs", asked)).status_code == 202


async def test_a_limit_that_brings_a_job_forward_is_accepted(redis_url: str, wire: RedisClient) -> None:
    """The tenant's jobs without a limit wait for it, however many there are; another tenant's take turns with it."""
    async with api_in_process(RedisClient.open(wire.settings)) as api:
        await fill(api, {})
        api.calibrate(Priority.STANDARD, 0.2, limited=True)
        await api.plan(Priority.STANDARD, wait_s=30.0, each_s=10.0, waiting=WAITING)
        answer = await api.post("/v1/jobs", limited(CHAT, max_queue_ms=8_500))
        assert answer.status_code == 202 and answer.json()["eta_ms"] == 0


async def test_a_lane_that_has_emptied_since_the_plan_refuses_nothing(busy: LocalApi) -> None:
    """The plan is a second old: the lane is counted at the request."""
    for row in (await busy.client.get("/v1/jobs")).json()["data"]:
        await busy.post(f"/v1/jobs/{row['id']}/cancel", {})
    answer = await busy.post("/v1/jobs", limited(CHAT, max_queue_ms=2_000))
    assert answer.status_code == 202 and answer.json()["eta_ms"] < 2_000


async def test_a_request_that_was_accepted_before_is_not_refused(busy: LocalApi) -> None:
    """Its key leads to its job, however long a new one would wait; another body with the key is told so."""
    asked = limited(CHAT, max_queue_ms=20_000)
    await busy.plan(Priority.STANDARD, wait_s=0.0, waiting=WAITING)
    first = await busy.post("/v1/jobs", asked, Idempotency_Key="k")
    assert first.status_code == 202
    await busy.plan(Priority.STANDARD, wait_s=30.0, each_s=10.0, waiting=WAITING)
    again = await busy.post("/v1/jobs", asked, Idempotency_Key="k")
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
    assert (await busy.post("/v1/jobs", asked, Idempotency_Key="other")).status_code == 429
    assert (await busy.post("/v1/jobs", asked)).status_code == 429
    assert (await busy.post("/v1/jobs", limited(CHAT, max_queue_ms=1), Idempotency_Key="k")).status_code == 422


# --- do_not_queue ----------------------------------------------------------------------------------------------------


async def test_every_shape_that_must_not_queue_is_refused_with_the_wait(busy: LocalApi) -> None:
    """503 with the estimate and, rounded up, when to come back; nothing is queued."""
    for shape, (path, body, headers) in SHAPES.items():
        await busy.plan(Priority.STANDARD, wait_s=30.4, each_s=10.0, waiting=WAITING)
        asked = body | {"queue": {"priority": "standard", "do_not_queue": True}}
        answer = await busy.client.post(path, json=asked, headers=headers)
        error = answer.json()["error"]
        found = (answer.status_code, error["code"], answer.headers["retry-after"])
        assert found == (503, "no_capacity", "31"), shape
        assert error["eta_ms"] == 30_400 and await queued(busy) == WAITING, shape


async def test_a_job_says_that_no_worker_is_ready(busy: LocalApi) -> None:
    """In place of a time that a plan of earlier workers gives; once one is ready, the plan counts again."""
    await busy.plan(Priority.STANDARD, wait_s=0.0, waiting=WAITING)
    await busy.work("starting")
    answer = await busy.post("/v1/jobs", {"model": "sim", "messages": [{"role": "user", "content": "hello"}]})
    job = answer.json()
    assert (job["status"], job["eta_ms"]) == ("queued", None) and "X-Queue-ETA-Ms" not in answer.headers
    assert job["queue_reason"] == "no worker is ready: one is starting"
    await busy.work("ready")
    job = (await busy.client.get(f"/v1/jobs/{job['id']}")).json()
    assert job["eta_ms"] is not None and job["queue_reason"].startswith("lane standard; ")
