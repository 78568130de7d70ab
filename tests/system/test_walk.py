"""One request through the whole house, as real clients send it: the official openai package and plain HTTP."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any

import openai
import pytest
from batching import said
from house import LONG_LEASE, House, eventually, module_house

pytestmark = pytest.mark.slow


house = module_house("workers", PENSTOCK_SIM_FAULTS="true", **LONG_LEASE)
"""Requests may ask for faults."""


def asked(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat_body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": asked(text), **more}


def begun(house: House, body: dict[str, Any], **headers: str) -> tuple[http.client.HTTPConnection, Any]:
    """A chat's connection and its answer, of which only the head is read."""
    connection = http.client.HTTPConnection("127.0.0.1", house.port, timeout=30)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json", **headers}
    )
    return connection, connection.getresponse()


# --- the official client -------------------------------------------------------------------------------------------


# --- the stream's traps --------------------------------------------------------------------------------------------


def test_keep_alives_do_not_disturb_the_official_client(empty_house: House) -> None:
    """A stream that waits is kept alive with comments, and the answer still arrives whole when a worker comes."""
    house = empty_house
    house.start_api(PENSTOCK_API_KEEP_ALIVE_S="0.1")
    raw: list[bytes] = []

    def read_raw() -> None:
        raw.append(house.post("/v1/chat/completions", chat_body("raw", max_tokens=5, stream=True))[2])

    reader = threading.Thread(target=read_raw)
    reader.start()
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        stream = client.chat.completions.create(model="sim", messages=asked("wait"), max_tokens=5, stream=True)
        house.start("workers")  # only now: the 200 above was committed by a keep-alive
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    reader.join(30)
    assert text == said("wait", 5)
    assert raw[0].startswith(b": ping\n") and b": ping\n\n" not in raw[0].replace(b": ping\n: ping", b"")
    assert b"\nid:" not in raw[0] and b"event:" not in raw[0] and raw[0].endswith(b"data: [DONE]\n\n")


# --- jobs ----------------------------------------------------------------------------------------------------------


def test_leaving_a_stream_cancels_its_job_unless_it_asks_to_go_on(house: House) -> None:
    """A chat whose client leaves frees its slot; with on_disconnect continue it completes."""
    for policy, end, by in (("cancel", "cancelled", "reader"), ("continue", "completed", None)):
        body = chat_body("leave", max_tokens=400, stream=True, queue={"on_disconnect": policy})
        connection, response = begun(house, body)
        job_id = response.headers["x-job-id"]
        response.read(10)
        response.close()
        connection.close()

        def job(job_id: str = job_id) -> dict[str, Any]:
            return dict(json.loads(house.get(f"/v1/jobs/{job_id}")[1]))

        eventually(lambda job=job, end=end: job()["status"] == end)
        assert job()["cancelled_by"] == by


def test_the_reader_of_a_chat_is_told_who_cancelled_it(house: House) -> None:
    """Its worker says so in the end that it sends, whoever reads the job's record later."""
    connection, response = begun(house, chat_body("told", max_tokens=5000, stream=True))
    response.read(10)
    house.post(f"/v1/jobs/{response.headers['x-job-id']}/cancel", b"")
    error = json.loads(response.read().rstrip().rpartition(b"data: ")[2])["error"]
    connection.close()
    assert (error["type"], error["code"], error["cancelled_by"]) == ("cancelled_error", "job_cancelled", "owner")


def test_one_of_two_readers_may_leave(house: House) -> None:
    """A job that two clients of one key listen to is not cancelled because one of them goes."""
    body = chat_body("two readers", max_tokens=400, stream=True, queue={"on_disconnect": "cancel"})
    (leaving, left), (staying, answer) = (begun(house, body, **{"Idempotency-Key": "two readers"}) for _ in range(2))
    left.close()
    leaving.close()
    assert answer.read().endswith(b"data: [DONE]\n\n")
    staying.close()
