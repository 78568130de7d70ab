"""Jobs for later, as a client asks for them and sees them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process, key_of

from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.jobs.settings import QuotaSettings
from streaming.keys import partition_key
from streaming.redis.client import RedisClient

BODY = {"model": "sim", "messages": [{"role": "user", "content": "x"}]}


def later(**queue: Any) -> dict[str, Any]:
    return {**BODY, "queue": queue}


async def test_a_job_for_later_is_accepted_shown_listed_and_cancelled(wire: RedisClient) -> None:
    """Whoever sends it is told no position and no expected wait."""
    at = datetime.now(UTC) + timedelta(hours=1)
    async with api_in_process(wire) as api:
        for body in (later(not_before=at.isoformat()), later(delay_ms=3_600_000, max_queue_ms=1, deadline_ms=2)):
            answer = await api.post("/v1/jobs", body)
            assert answer.status_code == 202 and "x-queue-position" not in answer.headers
            job = answer.json()
            shown = (await api.client.get(f"/v1/jobs/{job['id']}")).json()
            listed = (await api.client.get("/v1/jobs?limit=1&status=queued")).json()["data"][0]
            for each in (job, shown, listed):
                assert (each["id"], each["status"], each["queue_position"]) == (job["id"], "queued", None)
                assert abs(each["not_before"] - at.timestamp()) < 60
            cancelled = await api.post(f"/v1/jobs/{job['id']}/cancel", {})
            assert cancelled.json()["status"] == "cancelled"
            assert not await wire.redis.exists(partition_key(0, "scheduled"))


async def test_a_chat_and_a_response_for_later(wire: RedisClient) -> None:
    """Only where their clients do not wait."""
    async with api_in_process(wire) as api:
        assert (
            await api.post("/v1/chat/completions", later(delay_ms=60_000), prefer="respond-async")
        ).status_code == 202
        response = {"model": "sim", "input": "x", "queue": {"delay_ms": 60_000}}
        assert (await api.post("/v1/responses", {**response, "background": True})).json()["status"] == "queued"
        assert await wire.redis.zcard(partition_key(0, "scheduled")) == 2
        for path, body in (
            ("/v1/chat/completions", later(delay_ms=60_000)),
            ("/v1/chat/completions", later(delay_ms=60_000) | {"stream": True}),
            ("/v1/responses", response),
        ):
            await refused(api, path, body, "queue.not_before")


async def refused(api: LocalApi, path: str, body: dict[str, Any], param: str) -> None:
    answer = await api.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("queue", "param"),
    [
        *(
            ({"not_before": each}, "queue.not_before")
            for each in ("soon", "", "2026-12-01", "2026-12-01T08:00:00", 5, "9")
        ),
        ({"not_before": "9999-12-31T23:59:59Z"}, "queue.not_before"),
        ({"not_before": (datetime.now(UTC) + timedelta(days=30, hours=12)).isoformat()}, "queue.not_before"),
        ({"delay_ms": 30 * 86_400_000 + 1}, "queue.delay_ms"),
        *(({"delay_ms": each}, "queue.delay_ms") for each in (0, -1, 31 * 86_400_000, "1")),
        ({"delay_ms": 5, "not_before": "2026-12-01T08:00:00Z"}, "queue.delay_ms"),
        ({"delay_ms": 5, "do_not_queue": True}, "queue.do_not_queue"),
    ],
)
async def test_what_is_no_time_is_refused(wire: RedisClient, queue: dict[str, Any], param: str) -> None:
    async with api_in_process(wire) as api:
        await refused(api, "/v1/jobs", later(**queue), param)
        assert not await wire.redis.keys("*job_*")


async def test_a_job_whose_time_is_over_is_as_any_other(wire: RedisClient) -> None:
    async with api_in_process(wire) as api:
        answer = await api.post("/v1/jobs", later(not_before="2020-01-01T00:00:00Z"))
        assert "x-queue-position" in answer.headers and answer.json()["not_before"] is None


async def test_a_repeated_request_leads_to_the_job_that_waits_for_its_time(wire: RedisClient) -> None:
    async with api_in_process(wire) as api:
        answers = [await api.post("/v1/jobs", later(delay_ms=60_000), idempotency_key="k") for _ in range(2)]
        first, second = (each.json() for each in answers)
        assert first["id"] == second["id"] and first["not_before"] == pytest.approx(second["not_before"], abs=0.01)


async def test_it_counts_in_the_quota_of_jobs(wire: RedisClient) -> None:
    async with api_in_process(wire) as api:
        api.services.general_quotas = QuotaSettings(jobs=1)
        assert (await api.post("/v1/jobs", later(delay_ms=60_000))).status_code == 202
        refused = await api.post("/v1/jobs", later(delay_ms=60_000))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")


async def test_nobody_sees_those_of_another_tenant(wire: RedisClient) -> None:
    keys = {"a": key_of("sk-a", "a"), "b": key_of("sk-b", "b")}
    async with api_in_process(wire, keys) as api:
        job = (await api.post("/v1/jobs", later(delay_ms=60_000), authorization="Bearer sk-a")).json()
        for_b = {"Authorization": "Bearer sk-b"}
        assert (await api.client.get("/v1/jobs", headers=for_b)).json()["data"] == []
        assert (await api.client.get(f"/v1/jobs/{job['id']}", headers=for_b)).status_code == 404


async def test_the_wait_for_its_time_is_not_counted_as_time_that_the_request_took(wire: RedisClient) -> None:
    async with api_in_process(wire) as api:
        later_job = (await api.post("/v1/jobs", later(delay_ms=3_600_000))).json()["id"]
        await wire.redis.hset(partition_key(0, "job", later_job), "created", await wire.now_ms() - 3_600_000)
        await wire.redis.zadd(partition_key(0, "scheduled"), {later_job: 1}, xx=True)
        await Reaper(wire).sweep()
        reader = JobReader(wire)
        record = await reader.record(later_job)
        assert record.job.received_us == 0 and not record.held
        assert await wire.now_ms() - record.created_ms < 10_000


async def test_a_schedule_keeps_its_tenants_quota_of_files(wire: RedisClient, tmp_path: Path) -> None:
    """Against which each batch that it begins is counted, when nobody asks for it."""
    async with api_in_process(wire, {"a": key_of("sk-a", "a")}, files=tmp_path) as api:
        api.client.headers["Authorization"] = "Bearer sk-a"
        api.services.general_quotas = QuotaSettings(file_bytes=50_000)
        form = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        file = (await api.client.post("/v1/files", **form)).json()["id"]  # type: ignore[arg-type]
        schedule = {"cron": "0 3 * * *", "timezone": "UTC"}
        asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await api.post("/v1/batches", asked | {"schedule": schedule})).json()
        record = await api.services.batches.get(batch["id"], "a")
        assert record.batch.file_limit == 50_000
