"""`POST /v1/jobs?wait`: one request that puts a job and waits for its end. Whatever ends the wait, the job is kept."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from house import House, eventually
from redis import Redis

from streaming.keys import partition_key

pytestmark = pytest.mark.slow

BODY = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def job_of(answer: bytes) -> dict[str, Any]:
    job: dict[str, Any] = json.loads(answer)
    return job


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"queue": {"priority": "batch"}}])
def test_a_job_that_ends_in_time_comes_with_its_result(house: House, more: dict[str, Any]) -> None:
    """It is the same that a GET shows afterwards."""
    status, headers, body = house.post("/v1/jobs?wait=60", BODY | more)
    job = job_of(body)
    assert status == 200 and job["status"] == "completed" and headers["x-job-id"] == job["id"]
    assert len(job["result"]["choices"]) == more.get("n", 1)
    assert job == job_of(house.get(f"/v1/jobs/{job['id']}")[1])


def test_a_job_that_outlasts_the_wait_is_accepted(house: House) -> None:
    """It is shown as it is then."""
    status, headers, body = house.post("/v1/jobs?wait=5", BODY | {"max_tokens": 8000})
    assert status == 202 and headers["location"] == f"/v1/jobs/{job_of(body)['id']}"
    assert (job_of(body)["status"], job_of(body)["attempts"]) == ("in_progress", 1)
    house.post(f"{headers['location']}/cancel", {})


def test_a_job_that_expires_is_shown_as_it_ended(empty_house: House) -> None:
    """Without a worker, its time passes in the queue."""
    empty_house.start_api()
    status, _, body = empty_house.post("/v1/jobs?wait=60", BODY | {"queue": {"deadline_ms": 100}})
    assert status == 200 and job_of(body)["status"] == "expired"
    assert job_of(body)["error"]["code"] == "deadline_exceeded_in_queue"


def test_a_repeated_request_waits_for_the_same_job(house: House) -> None:
    key = {"Idempotency-Key": "waits"}
    first, again = (house.post("/v1/jobs?wait=60", BODY, key) for _ in range(2))
    assert first[0] == again[0] == 200 and job_of(first[2]) == job_of(again[2])


def test_a_process_that_ends_meanwhile_has_accepted_the_job(empty_house: House) -> None:
    """drain_s passes while no worker is there."""
    process = empty_house.start_api(PENSTOCK_API_DRAIN_S="1")
    with Redis.from_url(empty_house.redis_url) as redis, ThreadPoolExecutor() as pool:
        waits = pool.submit(empty_house.post, "/v1/jobs?wait=60", BODY)
        eventually(lambda: any(redis.hget(job, "reply") for job in redis.keys(partition_key(0, "job", "job_*"))))
        process.terminate()
        status, headers, body = waits.result(60)
    assert status == 202 and headers["location"] == f"/v1/jobs/{job_of(body)['id']}"
    assert process.wait(30) == 0 and "Traceback" not in empty_house.log("api")
