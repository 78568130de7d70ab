"""/v1/jobs: lists and looks, which read no bodies and no logs; what is said of a job that is not there; and
`POST /v1/jobs?wait`, one request that puts a job and waits for its end. Whatever ends the wait, the job is kept."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from house import House, eventually
from msgspec.structs import replace
from redis import Redis
from starlette.requests import Request

from api.jobs import own_record
from api.openai.errors import ApiError
from streaming.jobs.codec import decode_job, encode
from streaming.jobs.job import Text
from streaming.jobs.reader import JobReader
from streaming.keys import partition_key
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

BODY = 400_000
JOBS = 12


def put(house: House, text: str, **more: Any) -> str:
    body = {"model": "sim", "messages": [{"role": "user", "content": text}], **more}
    status, _, answer = house.post("/v1/jobs", body)
    assert status == 202, answer
    return str(json.loads(answer)["id"])


def jobs(house: House, query: str = "") -> dict[str, Any]:
    status, data = house.get(f"/v1/jobs?{query}")
    assert status == 200, data
    found: dict[str, Any] = json.loads(data)
    return found


def enlarge(store: Redis, job_id: str) -> None:
    """As if its prompt were as long as one may be."""
    key = f"penstock:{{0}}:job:{job_id}"
    job = decode_job(store.hget(key, "body"))
    store.hset(key, "body", encode(replace(job, prompt=Text(("x" * BODY,)))))


def sent_by(store: Redis) -> int:
    """Bytes the server has sent to everybody."""
    return int(store.info("stats")["total_net_output_bytes"])


@pytest.fixture
def store(empty_house: House) -> Any:
    with Redis.from_url(empty_house.redis_url) as client:
        yield client


def test_a_list_reads_summaries(empty_house: House, store: Redis) -> None:
    """A page of jobs with large prompts costs the store a few kB, and shows what each job shows itself, but neither
    result nor attempts."""
    house = empty_house
    house.start_all("workers")
    done = put(house, "hello", max_tokens=4, metadata={"who": "me"}, queue={"priority": "batch"})
    assert json.loads(house.get(f"/v1/jobs/{done}?wait=30")[1])["status"] == "completed"
    refused = put(house, "hello", max_tokens=2000, queue={"deadline_ms": 50})
    assert json.loads(house.get(f"/v1/jobs/{refused}?wait=30")[1])["status"] == "expired"
    large = [put(house, "hello", max_tokens=1) for _ in range(JOBS)]
    for job in large:
        assert json.loads(house.get(f"/v1/jobs/{job}?wait=30")[1])["status"] == "completed"
    for job in large:
        enlarge(store, job)
    before = sent_by(store)
    listed = jobs(house, "limit=100")["data"]
    assert sent_by(store) - before < BODY / 2
    assert [each["id"] for each in listed] == [*reversed(large), refused, done]
    for job in (done, refused):
        shown = json.loads(house.get(f"/v1/jobs/{job}")[1])
        (row,) = [each for each in listed if each["id"] == job]
        assert row == shown | {"result": None, "attempt_log": None, "preview": "hello"}


@pytest.mark.parametrize(
    ("tenant", "job_id", "code"),
    [
        ("red", "job_00" + "1" * 30, "result_expired"),
        ("blue", "job_00" + "1" * 30, "job_not_found"),
        ("red", "job_00" + "2" * 30, "job_not_found"),
        ("red", "job_ff" + "1" * 30, "job_not_found"),
        ("red", "nonsense", "job_not_found"),
    ],
)
async def test_only_the_owner_is_told_that_a_job_was_kept_once(
    wire: RedisClient, tenant: str, job_id: str, code: str
) -> None:
    """Everybody else hears the same as of a job that never was."""
    await wire.redis.zadd(partition_key(0, "jobs", "red"), {"job_00" + "1" * 30: 1})
    app = SimpleNamespace(
        state=SimpleNamespace(services=SimpleNamespace(store_client=wire, job_reader=JobReader(wire)))
    )
    state = {"caller": SimpleNamespace(tenant=tenant)}
    with pytest.raises(ApiError) as refused:
        await own_record(Request({"type": "http", "app": app, "state": state, "path_params": {"job_id": job_id}}))
    assert refused.value.code == code


# --- the wait ---------------------------------------------------------------------------------------------------------


ASKED = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"queue": {"priority": "batch"}}])
def test_a_job_that_ends_in_time_comes_with_its_result(house: House, more: dict[str, Any]) -> None:
    """It is the same that a GET shows afterwards."""
    status, headers, body = house.post("/v1/jobs?wait=60", ASKED | more)
    job = json.loads(body)
    assert status == 200 and job["status"] == "completed" and headers["x-job-id"] == job["id"]
    assert len(job["result"]["choices"]) == more.get("n", 1)
    assert job == json.loads(house.get(f"/v1/jobs/{job['id']}")[1])


def test_a_job_that_outlasts_the_wait_is_accepted(house: House) -> None:
    """It is shown as it is then."""
    status, headers, body = house.post("/v1/jobs?wait=5", ASKED | {"max_tokens": 8000})
    assert status == 202 and headers["location"] == f"/v1/jobs/{json.loads(body)['id']}"
    assert (json.loads(body)["status"], json.loads(body)["attempts"]) == ("in_progress", 1)
    house.post(f"{headers['location']}/cancel", {})


def test_a_job_that_expires_is_shown_as_it_ended(empty_house: House) -> None:
    """Without a worker, its time passes in the queue."""
    empty_house.start_api()
    status, _, body = empty_house.post("/v1/jobs?wait=60", ASKED | {"queue": {"deadline_ms": 100}})
    assert status == 200 and json.loads(body)["status"] == "expired"
    assert json.loads(body)["error"]["code"] == "deadline_exceeded_in_queue"


def test_a_repeated_request_waits_for_the_same_job(house: House) -> None:
    key = {"Idempotency-Key": "waits"}
    first, again = (house.post("/v1/jobs?wait=60", ASKED, key) for _ in range(2))
    assert first[0] == again[0] == 200 and json.loads(first[2]) == json.loads(again[2])


def test_a_process_that_ends_meanwhile_has_accepted_the_job(empty_house: House) -> None:
    """drain_s passes while no worker is there."""
    process = empty_house.start_api(PENSTOCK_API_DRAIN_S="1")
    with Redis.from_url(empty_house.redis_url) as redis, ThreadPoolExecutor() as pool:
        waits = pool.submit(empty_house.post, "/v1/jobs?wait=60", ASKED)
        eventually(lambda: any(redis.hget(job, "reply") for job in redis.keys(partition_key(0, "job", "job_*"))))
        process.terminate()
        status, headers, body = waits.result(60)
    assert status == 202 and headers["location"] == f"/v1/jobs/{json.loads(body)['id']}"
    assert process.wait(30) == 0 and "Traceback" not in empty_house.log("api")
