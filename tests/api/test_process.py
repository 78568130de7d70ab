"""An API process as a whole: how it ends; and `POST /v1/jobs?wait`, which keeps the job whatever ends the wait."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from house import House, eventually, free_port
from redis import Redis

from streaming.fleet.processes import Fleet
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

pytestmark = pytest.mark.slow

BODY = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4000}


async def test_a_process_that_lets_its_streams_end_is_shown_as_draining(empty_house: House) -> None:
    """To whoever told it to end, and wonders why it is still there."""
    empty_house.start("workers", PENSTOCK_SIM_STEP_MS="50")
    process = empty_house.start_api()
    empty_house.wait_ready()
    body = BODY | {"stream": True}
    wire = RedisClient.open(RedisSettings(url=empty_house.redis_url))

    async def states() -> list[str]:
        return [each.state for each in await Fleet(wire).processes("api")]

    with closing(http.client.HTTPConnection("127.0.0.1", empty_house.port, timeout=60)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200
        assert await states() == ["ready"]
        process.terminate()
        async with asyncio.timeout(30):
            while await states() != ["draining"]:
                await asyncio.sleep(0.01)
    await wire.close()


def test_whoever_still_waits_when_a_process_ends_is_told_where_the_job_is(empty_house: House) -> None:
    """drain_s passes while no worker is there: whole answers, a stream without a first token, and a wait get a 503 that
    names the job. Nobody has left, so the jobs go on, and a retry is invited only where it leads to the same job."""
    house, other = empty_house, free_port()
    process = house.start_api(PENSTOCK_API_DRAIN_S="1")
    house.start_api(other)
    job_id = json.loads(house.post("/v1/jobs", BODY)[2])["id"]
    key = {"Idempotency-Key": "k"}
    with Redis.from_url(house.redis_url) as redis, ThreadPoolExecutor() as pool:

        def are_waited_for() -> bool:
            jobs = [key.decode() for key in redis.keys(partition_key(0, "job", "job_*"))]
            return len(jobs) == 4 and all(redis.hget(job, "reply") for job in jobs)

        chats = [
            pool.submit(house.post, "/v1/chat/completions", BODY | {"stream": streams}, headers)
            for streams, headers in ((False, {}), (False, key), (True, {}))
        ]
        wait = pool.submit(house.request, "GET", f"/v1/jobs/{job_id}?wait=60")
        eventually(are_waited_for)
        process.terminate()
        answers = [each.result(60) for each in (wait, *chats)]
    for status, headers, body in answers:
        assert status == 503 and json.loads(body)["error"]["code"] == "draining"
        path = headers["location"]
        assert path == f"/v1/jobs/{headers['x-job-id']}"
        shown, _, job = house.request("GET", path, port=other)
        assert shown == 200 and json.loads(job)["status"] == "queued"
    assert answers[0][1]["x-job-id"] == job_id
    assert ["x-should-retry" in headers for _, headers, _ in answers] == [False, True, False, True]
    assert process.wait(30) == 0 and "Traceback" not in house.log("api")


@pytest.mark.parametrize(("path", "key"), [("/v1/chat/completions", ""), ("/v1/jobs", "k")])
def test_a_process_that_ends_while_the_store_stands_still_says_so(empty_house: House, path: str, key: str) -> None:
    """drain_s passes while no job exists yet that an answer could name."""
    process = empty_house.start_api(PENSTOCK_API_DRAIN_S="1")
    body = json.dumps(BODY).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n" + (f"Idempotency-Key: {key}\r\n" if key else "")
    address = ("127.0.0.1", empty_house.port)
    with Redis.from_url(empty_house.redis_url) as redis, socket.create_connection(address, timeout=60) as client:
        redis.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        try:
            client.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
            assert client.recv(100).startswith(b"HTTP/1.1 100"), "its endpoint runs"
            client.sendall(body)
            process.terminate()
            answer = b"".join(iter(lambda: client.recv(65_536), b""))
        finally:
            redis.execute_command("CLIENT", "UNPAUSE")
    top, _, content = answer.partition(b"\r\n\r\n")
    error = json.loads(content)["error"]
    assert top.startswith(b"HTTP/1.1 503") and error["code"] == "draining"
    assert "not known whether the request was accepted" in error["message"]
    assert process.wait(30) == 0 and "Traceback" not in empty_house.log("api")


SHORT = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def job_of(answer: bytes) -> dict[str, Any]:
    job: dict[str, Any] = json.loads(answer)
    return job


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"queue": {"priority": "batch"}}])
def test_a_job_that_ends_in_time_comes_with_its_result(house: House, more: dict[str, Any]) -> None:
    """It is the same that a GET shows afterwards."""
    status, headers, body = house.post("/v1/jobs?wait=60", SHORT | more)
    job = job_of(body)
    assert status == 200 and job["status"] == "completed" and headers["x-job-id"] == job["id"]
    assert len(job["result"]["choices"]) == more.get("n", 1)
    assert job == job_of(house.get(f"/v1/jobs/{job['id']}")[1])


def test_a_job_that_outlasts_the_wait_is_accepted(house: House) -> None:
    """It is shown as it is then."""
    status, headers, body = house.post("/v1/jobs?wait=5", SHORT | {"max_tokens": 8000})
    assert status == 202 and headers["location"] == f"/v1/jobs/{job_of(body)['id']}"
    assert (job_of(body)["status"], job_of(body)["attempts"]) == ("in_progress", 1)
    house.post(f"{headers['location']}/cancel", {})


def test_a_job_that_expires_is_shown_as_it_ended(empty_house: House) -> None:
    """Without a worker, its time passes in the queue."""
    empty_house.start_api()
    status, _, body = empty_house.post("/v1/jobs?wait=60", SHORT | {"queue": {"deadline_ms": 100}})
    assert status == 200 and job_of(body)["status"] == "expired"
    assert job_of(body)["error"]["code"] == "deadline_exceeded_in_queue"


def test_a_repeated_request_waits_for_the_same_job(house: House) -> None:
    key = {"Idempotency-Key": "waits"}
    first, again = (house.post("/v1/jobs?wait=60", SHORT, key) for _ in range(2))
    assert first[0] == again[0] == 200 and job_of(first[2]) == job_of(again[2])


def test_a_process_that_ends_meanwhile_has_accepted_the_job(empty_house: House) -> None:
    """drain_s passes while no worker is there."""
    process = empty_house.start_api(PENSTOCK_API_DRAIN_S="1")
    with Redis.from_url(empty_house.redis_url) as redis, ThreadPoolExecutor() as pool:
        waits = pool.submit(empty_house.post, "/v1/jobs?wait=60", SHORT)
        eventually(lambda: any(redis.hget(job, "reply") for job in redis.keys(partition_key(0, "job", "job_*"))))
        process.terminate()
        status, headers, body = waits.result(60)
    assert status == 202 and headers["location"] == f"/v1/jobs/{job_of(body)['id']}"
    assert process.wait(30) == 0 and "Traceback" not in empty_house.log("api")
