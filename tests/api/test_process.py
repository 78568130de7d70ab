"""An API process as a whole: how it ends."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

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
