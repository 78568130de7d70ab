"""What a client may rely on that sends an Idempotency-Key, or asks for a 202: real processes, lost connections, and a
store that is cut off just behind a put."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from flow import a_job
from house import House, eventually
from redis import Redis
from severing import StoreCut, store_cut

from api import admission
from api.stream.reply import KEYED_GRACE_S
from streaming.errors import Unavailable, UnknownBatch, UnknownFile, UnknownJob
from streaming.jobs.job import JobState
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

LONG = 4000
PATHS = ("/v1/jobs", "/v1/chat/completions")


@pytest.fixture
def cut(empty_house: House) -> Iterator[StoreCut]:
    """An API process that reaches the store by a way that can be cut; the worker's way is another."""
    with store_cut(empty_house.redis_url) as cut:
        empty_house.start("workers")
        empty_house.start_api(PENSTOCK_REDIS_URL=cut.url, PENSTOCK_REDIS_TIMEOUT_S="1")
        empty_house.wait_ready()
        yield cut


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 3, **more}


def keyed(key: str, **more: str) -> dict[str, str]:
    return {"Idempotency-Key": key, **more}


def job(house: House, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(house.get(f"/v1/jobs/{job_id}")[1])
    return found


def begun_and_left(house: House, asked: dict[str, Any], key: str) -> str:
    """A stream whose client's connection is lost after its first token; the id of its job."""
    connection = http.client.HTTPConnection("127.0.0.1", house.port, timeout=60)
    headers = {"Content-Type": "application/json", **keyed(key)}
    connection.request("POST", "/v1/chat/completions", json.dumps(asked), headers)
    response = connection.getresponse()
    job_id = response.headers["x-job-id"] or ""
    assert any(b'"content"' in response.readline() for _ in range(50))
    response.close()
    connection.close()
    return job_id


def test_a_request_that_lost_its_connection_is_computed_when_it_comes_again(house: House) -> None:
    """Its job was cancelled for that, at once, as it had asked for: only who says nothing about leaving is waited for.
    The next try with the same key is not told so, it gets an answer."""
    asked = body("lost", max_tokens=LONG, stream=True, queue={"on_disconnect": "cancel"})
    first = begun_and_left(house, asked, "lost")
    left = time.monotonic()
    eventually(lambda: job(house, first)["status"] == "cancelled")
    assert time.monotonic() - left < KEYED_GRACE_S
    assert begun_and_left(house, asked, "lost") not in ("", first)


WEATHER = {"name": "f", "input_schema": {}}


@pytest.mark.parametrize(
    ("first", "second", "asked"),
    [
        ("responses/input_tokens", "responses", {"input": "hello"}),
        ("responses/input_tokens", "responses", {"input": "hello", "tools": [{"type": "function", "name": "f"}]}),
        ("messages", "chat/completions", body("hello")),
        ("jobs", "messages", body("hello")),
        ("messages/count_tokens", "messages", body("hello", tools=[WEATHER])),
        ("chat/completions", "messages/count_tokens", body("hello", queue={})),
    ],
)
def test_a_key_of_one_endpoint_is_not_that_of_another_that_takes_the_same_body(
    house: House, first: str, second: str, asked: dict[str, Any]
) -> None:
    asked, key = {"model": "sim", **asked}, f"{first} {second} {len(asked)}"
    assert house.post(f"/v1/{first}", asked, keyed(key))[0] in (200, 202)
    status, _, data = house.post(f"/v1/{second}", asked, keyed(key))
    assert (status, json.loads(data)["error"]["code"]) == (422, "idempotency_key_reused")
    assert house.post(f"/v1/{first}", asked, keyed(key))[0] in (200, 202)


def test_a_lost_connection_ends_no_job_that_was_answered_with_202(house: House) -> None:
    """A stream and a job under one key are one job, and the 202 promised it."""
    asked = body("both", max_tokens=1500, stream=True, queue={"on_disconnect": "cancel"})
    accepted = house.post("/v1/chat/completions", asked, keyed("both", Prefer="respond-async"))
    assert accepted[0] == 202
    joined = begun_and_left(house, asked, "both")
    assert joined == accepted[1]["x-job-id"]
    eventually(lambda: job(house, joined)["completed_at"])
    assert job(house, joined)["status"] == "completed"


@pytest.mark.parametrize("path", PATHS)
def test_a_job_is_accepted_by_its_put_alone(empty_house: House, cut: StoreCut, path: str) -> None:
    """The store is gone when the put has been answered: 202 all the same, and the job is there."""
    house, prefer = empty_house, {"Prefer": "respond-async"}
    cut.cut_at(b"queued")
    status, headers, answer = house.post(path, body("only the put"), prefer)
    assert cut.severed.wait(10) and status == 202
    accepted = json.loads(answer)
    assert (accepted["status"], accepted["queue_position"], accepted["attempts"]) == ("queued", 0, 0)
    assert headers["location"] == f"/v1/jobs/{accepted['id']}" and accepted["created_at"] > 1e9
    cut.mend()
    eventually(lambda: job(house, accepted["id"]).get("status") == "completed")
    kept = job(house, accepted["id"])
    assert {name: kept[name] for name in ("id", "created_at", "model", "priority", "metadata")} == {
        name: accepted[name] for name in ("id", "created_at", "model", "priority", "metadata")
    }


@pytest.mark.parametrize("path", PATHS)
def test_a_joined_job_is_answered_though_its_record_cannot_be_read(
    empty_house: House, cut: StoreCut, path: str
) -> None:
    """What the put found is the answer."""
    house, headers = empty_house, keyed("again", Prefer="respond-async")
    first = json.loads(house.post(path, body("again"), headers)[2])["id"]
    eventually(lambda: job(house, first)["status"] == "completed")
    cut.cut_at(b"joined")
    status, _, answer = house.post(path, body("again"), headers)
    assert cut.severed.wait(10) and status == 202
    found = json.loads(answer)
    assert (found["id"], found["status"], found["attempts"]) == (first, "completed", 1)


def test_a_joined_stream_that_cannot_be_read_is_told_where_its_job_is(empty_house: House, cut: StoreCut) -> None:
    """It was accepted before: to say that nothing was would be untrue."""
    house = empty_house
    first = house.post("/v1/chat/completions", body("read me"), keyed("read me"))[1]["x-job-id"]
    cut.cut_at(b"joined")
    status, headers, answer = house.post("/v1/chat/completions", body("read me"), keyed("read me"))
    assert (status, headers["x-job-id"], int(headers["retry-after"])) == (503, first, 1)
    message = json.loads(answer)["error"]["message"]
    assert first in message and "nothing" not in message
    cut.mend()
    eventually(lambda: house.post("/v1/chat/completions", body("read me"), keyed("read me"))[0] == 200)


def test_a_put_whose_answer_is_lost_is_not_said_to_be_nothing(empty_house: House, cut: StoreCut) -> None:
    """With a key nobody can say whether it was accepted; the next try finds the job. Without one it is cancelled."""
    house = empty_house
    cut.cut_at(b"queued", lose=True)
    status, _, answer = house.post("/v1/jobs", body("perhaps"), keyed("perhaps"))
    message = json.loads(answer)["error"]["message"]
    assert status == 503 and "nothing" not in message and "same Idempotency-Key" in message
    cut.mend()
    eventually(lambda: house.get("/v1/jobs")[0] == 200)
    (there,) = json.loads(house.get("/v1/jobs")[1])["data"]
    assert house.post("/v1/jobs", body("perhaps"), keyed("perhaps"))[1]["x-job-id"] == there["id"]


@pytest.mark.parametrize("key", ["", "once"])
def test_a_batch_is_accepted_by_its_put_alone(empty_house: House, cut: StoreCut, key: str) -> None:
    """As a job is; one without a key whose answer was lost is cancelled, as nobody would ever find it."""
    house, headers = empty_house, keyed(key) if key else {}
    form = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; '
        b'name="file"; filename="f"\r\n\r\n{"body": {"messages": []}}\n\r\n--b--\r\n'
    )
    upload = house.request("POST", "/v1/files", form, {"Content-Type": "multipart/form-data; boundary=b"})
    asked = {
        "input_file_id": json.loads(upload[2])["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    cut.cut_at(b"validating")
    status, _, answer = house.post("/v1/batches", asked, headers)
    assert cut.severed.wait(10) and (status, json.loads(answer)["status"]) == (200, "validating")
    cut.mend()
    eventually(lambda: house.get("/v1/batches")[0] == 200)
    asked["metadata"] = {"second": "one"}
    cut.cut_at(b"validating", lose=True)
    status, _, answer = house.post("/v1/batches", asked, keyed("other") if key else {})
    assert cut.severed.wait(10) and status == 503
    cut.mend()
    eventually(lambda: house.get("/v1/batches")[0] == 200)

    def second() -> dict[str, Any]:
        listed: list[dict[str, Any]] = json.loads(house.get("/v1/batches")[1])["data"]
        (found,) = [batch for batch in listed if batch["metadata"]]
        return found

    if key:
        assert "same Idempotency-Key" in json.loads(answer)["error"]["message"]
        again = json.loads(house.post("/v1/batches", asked, keyed("other"))[2])
        assert (again["id"], second()["status"]) == (second()["id"], "validating")
    else:
        eventually(lambda: second()["status"] == "cancelling")


@pytest.mark.parametrize("path", PATHS)
def test_a_full_store_gives_whoever_comes_back_its_answer(empty_house: House, path: str) -> None:
    """Nothing new is accepted, but a retry of what was accepted only fetches its answer."""
    house = empty_house
    house.start_all("workers")
    status, headers, _ = house.post(path, body("once"), keyed("full"))
    first = {name.lower(): value for name, value in headers.items()}["x-job-id"]
    assert status in (200, 202)
    eventually(lambda: job(house, first)["status"] == "completed")
    with Redis.from_url(house.redis_url) as store:
        store.config_set("maxmemory", 1 << 20)
    eventually(lambda: b"no_capacity" in house.post("/v1/jobs", body("new"))[2])
    assert house.post(path, body("new"), keyed("new"))[0] == 503
    again, headers, _ = house.post(path, body("once"), keyed("full"))
    assert (again, {name.lower(): value for name, value in headers.items()}["x-job-id"]) == (status, first)


async def test_a_refused_put_is_withdrawn_however_long_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The put may have arrived, and nobody would ever find the job: its cancel is repeated until the store answers. A
    job that is not there may be on its way, and is looked for again, four times in all."""
    monkeypatch.setattr(admission, "WITHDRAW_RETRY_DELAY_S", 0)
    monkeypatch.setattr(admission, "WITHDRAW_PAUSES_S", [0] * len(admission.WITHDRAW_PAUSES_S))
    away, found = Unavailable("away"), JobState.CANCELLED
    for answers, unused in (
        ([away, away, JobState.QUEUED, found], 1),
        ([UnknownJob("j"), away, UnknownJob("j"), JobState.QUEUED, found], 1),
        ([UnknownBatch("b"), UnknownFile("f"), *[UnknownJob("j")] * 2, found], 1),
    ):
        rest: list[JobState | Exception] = list(answers)

        async def cancel(rest: list[JobState | Exception] = rest) -> JobState:
            answer = rest.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        async with asyncio.timeout(20):
            await admission.withdraw(cancel)
        assert len(rest) == unused


async def test_a_put_that_arrives_behind_its_withdrawal_is_cancelled(
    wire: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network may deliver it late: behind the cancel that found no job."""
    monkeypatch.setattr(admission, "WITHDRAW_PAUSES_S", [0] * len(admission.WITHDRAW_PAUSES_S))
    queue = Queue(wire)
    job = a_job(queue)

    async def cancel() -> JobState:
        try:
            return await queue.cancel(job.id)
        except UnknownJob:
            await queue.put(job)
            raise

    await admission.withdraw(cancel)
    assert (await JobReader(wire).record(job.id)).state is JobState.CANCELLED
