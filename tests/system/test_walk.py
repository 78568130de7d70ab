"""One request through the whole house, as real clients send it: the official openai package and plain HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from batching import said
from house import House, eventually

from penstock.engine import ChatTurn
from workers.engines.sim.answers import prompt_text, token_text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(house: House) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def asked(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat_body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": asked(text), **more}


# --- the official client -------------------------------------------------------------------------------------------


def test_a_chat_whole_and_streamed_says_the_same(client: openai.OpenAI) -> None:
    """The same text both ways, with usage, finish reason and the job's id."""
    whole = client.chat.completions.create(model="sim", messages=asked("hello"), max_tokens=12)
    assert whole.choices[0].message.content == said("hello", 12)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    stream = client.chat.completions.create(
        model="sim", messages=asked("hello"), max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == said("hello", 12)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12


def test_choices_stops_and_raw_completions(client: openai.OpenAI) -> None:
    """`n`, a list of prompts and stop strings through both endpoints."""
    two = client.chat.completions.create(model="sim", messages=asked("twice"), max_completion_tokens=4, n=2)
    assert [choice.message.content for choice in two.choices] == [said("twice", 4)] * 2
    texts = client.completions.create(model="sim", prompt=["one", "two"], max_tokens=3)
    assert [choice.text for choice in texts.choices] == [
        "".join(token_text(prompt, index) for index in range(3)) for prompt in ("one", "two")
    ]
    word = token_text(prompt_text((ChatTurn("user", "until"),)), 3)
    cut = client.chat.completions.create(model="sim", messages=asked("until"), max_tokens=9, stop=[word])
    assert cut.choices[0].message.content == said("until", 3) and cut.choices[0].finish_reason == "stop"


def test_models_are_listed_and_described(client: openai.OpenAI) -> None:
    """The configured model, by name; another one is a NotFoundError."""
    assert [model.id for model in client.models.list()] == ["sim"]
    eventually(lambda: client.models.retrieve("sim").created > 0)  # API processes read workers' cards now and then
    known = client.models.retrieve("sim")
    assert (known.id, known.owned_by) == ("sim", "penstock")
    assert known.created > 0 and (known.model_extra or {})["context_length"] == 8192, "of the card that a worker gave"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    """Unknown model, bad value, too long a prompt (streamed too): the class and code the client's users know."""
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=asked("hi"))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="sim", messages=asked("hi"), temperature=9)
    assert bad.value.param == "temperature"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as long:
            client.chat.completions.create(model="sim", messages=asked("long " * 20_000), stream=stream)
        assert long.value.code == "context_length_exceeded" and "8192" in str(long.value)
    with pytest.raises(openai.BadRequestError) as beyond:
        client.chat.completions.create(model="sim", messages=asked("hi"), max_tokens=100_000)
    assert beyond.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as schema:
        client.chat.completions.create(model="sim", messages=asked("hi"), response_format={"type": "json_object"})
    assert schema.value.param == "response_format"


async def test_sixty_four_streams_at_once_are_exact_to_the_byte(house: House) -> None:
    """Every stream is its own text, whole, in order, once."""
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:

        async def one(number: int) -> str:
            stream = await client.chat.completions.create(
                model="sim", messages=asked(f"stream {number}"), max_tokens=128, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

        texts = await asyncio.gather(*(one(number) for number in range(64)))
    assert texts == [said(f"stream {number}", 128) for number in range(64)]


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


def test_a_failure_in_mid_stream_is_told_in_the_stream(empty_house: House) -> None:
    """After a committed 200 the client gets an error it raises, never a silent end."""
    house = empty_house
    house.start("workers", PENSTOCK_SIM_FAULTS="true")
    house.start_api()
    house.wait_ready()
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        seen = []
        with pytest.raises(openai.APIError, match="injected"):
            for chunk in client.chat.completions.create(
                model="sim", messages=asked("[[fail@3]]"), max_tokens=9, stream=True
            ):
                seen.append(chunk.choices[0].delta.content)
    assert "".join(text or "" for text in seen) == said("[[fail@3]]", 3)


def test_the_jobs_id_and_ignored_fields_are_in_the_headers(house: House) -> None:
    """Unknown fields change nothing and are named; every response names its request and its job."""
    status, headers, _ = house.post("/v1/chat/completions", chat_body("h", max_tokens=1, frobnicate=1))
    assert status == 200 and headers["x-ignored-fields"] == "frobnicate"
    assert headers["x-request-id"] and house.get(f"/v1/jobs/{headers['x-job-id']}")[0] == 200


# --- jobs ----------------------------------------------------------------------------------------------------------


def test_a_job_is_put_waited_for_and_read(house: House) -> None:
    """202 with its address; waiting, result and list agree."""
    status, headers, body = house.post("/v1/jobs", chat_body("job", max_tokens=6, metadata={"a": "b"}))
    job = json.loads(body)
    assert status == 202 and headers["location"] == f"/v1/jobs/{job['id']}" and job["object"] == "job"
    done = json.loads(house.get(f"/v1/jobs/{job['id']}?wait=20")[1])
    assert done["status"] == "completed" and done["metadata"] == {"a": "b"} and done["usage"]["completion_tokens"] == 6
    result = json.loads(house.get(f"/v1/jobs/{job['id']}/result")[1])
    assert (
        result["choices"][0]["message"]["content"]
        == said("job", 6)
        == done["result"]["choices"][0]["message"]["content"]
    )
    assert (
        done["created_at"] <= done["started_at"] <= done["first_token_at"] <= done["completed_at"] < done["expires_at"]
    )
    listed = json.loads(house.get("/v1/jobs?status=completed&limit=100")[1])
    assert job["id"] in [item["id"] for item in listed["data"]]


def events_of(data: bytes) -> list[tuple[str, str, Any]]:
    """(event, id, data) of each block, pings left out."""
    found = []
    for block in data.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if fields.get("event") not in (None, "ping"):
            found.append((fields["event"], fields.get("id", ""), json.loads(fields["data"])))
    return found


def test_events_can_be_taken_up_behind_any_of_them(house: House) -> None:
    """Resuming gives exactly what follows; a malformed cursor is a 400, one that the store does not know a reset."""
    job_id = json.loads(house.post("/v1/jobs", chat_body("events", max_tokens=8))[2])["id"]
    whole = events_of(house.get(f"/v1/jobs/{job_id}/events")[1])
    logged = [event for event in whole if event[1]]
    assert "".join(data["text"] for name, _, data in logged if name == "delta") == said("events", 8)
    assert [name for name, _, _ in logged] == ["queued", "started", *["delta"] * 8, "completed"]
    assert [event_id.rpartition(":")[0] for _, event_id, _ in logged] == [f"1:{number}" for number in range(1, 12)]
    again = events_of(house.get(f"/v1/jobs/{job_id}/events")[1])
    assert [event[:2] for event in again] == [event[:2] for event in logged] and again[1:] == logged[1:]
    for place, (_, cursor, _) in enumerate(logged, 1):
        assert events_of(house.get(f"/v1/jobs/{job_id}/events?after={cursor}")[1]) == logged[place:]
    assert house.get(f"/v1/jobs/{job_id}/events?after=-1")[0] == 400
    assert events_of(house.get(f"/v1/jobs/{job_id}/events?after=1:99")[1])[0][0] == "stream.reset"


def test_a_waiting_and_a_running_job_can_be_cancelled(empty_house: House) -> None:
    """Before a worker has it: at once. While it runs: within a step. Twice: the same answer."""
    house = empty_house
    house.start_api()
    waiting = json.loads(house.post("/v1/jobs", chat_body("w", max_tokens=5))[2])
    assert waiting["status"] == "queued" and waiting["queue_position"] == 0
    for _ in range(2):
        status, _, body = house.post(f"/v1/jobs/{waiting['id']}/cancel", b"")
        assert status == 200 and json.loads(body)["status"] == "cancelled"
    house.start("workers", PENSTOCK_SIM_STEP_MS="20")
    running = json.loads(house.post("/v1/jobs", chat_body("r", max_tokens=5000))[2])
    eventually(lambda: json.loads(house.get(f"/v1/jobs/{running['id']}")[1])["status"] == "in_progress")
    assert json.loads(house.post(f"/v1/jobs/{running['id']}/cancel", b"")[2])["status"] == "cancelled"


def test_leaving_a_stream_cancels_its_job_unless_it_asks_to_go_on(house: House) -> None:
    """A chat whose client leaves frees its slot; with on_disconnect continue it completes."""
    for policy, end in (("cancel", "cancelled"), ("continue", "completed")):
        connection = http.client.HTTPConnection("127.0.0.1", house.port, timeout=30)
        body = chat_body("leave", max_tokens=400, stream=True, queue={"on_disconnect": policy})
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        job_id = response.headers["x-job-id"]
        response.read(10)
        response.close()
        connection.close()

        def job(job_id: str = job_id) -> dict[str, Any]:
            return dict(json.loads(house.get(f"/v1/jobs/{job_id}")[1]))

        eventually(lambda job=job, end=end: job()["status"] == end)
        assert job()["cancelled_by"] == ("reader" if end == "cancelled" else None)


def test_the_reader_of_a_chat_is_told_who_cancelled_it(house: House) -> None:
    """Its worker says so in the end that it sends, whoever reads the job's record later."""
    connection = http.client.HTTPConnection("127.0.0.1", house.port, timeout=30)
    body = chat_body("told", max_tokens=5000, stream=True)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read(10)
    house.post(f"/v1/jobs/{response.headers['x-job-id']}/cancel", b"")
    error = json.loads(response.read().rstrip().rpartition(b"data: ")[2])["error"]
    connection.close()
    assert (error["type"], error["code"], error["cancelled_by"]) == ("cancelled_error", "job_cancelled", "owner")


def test_an_idempotency_key_joins_the_first_request(house: House) -> None:
    """A repeated call gets the first one's answer and job, streamed or not; another body is refused."""
    key = {"Idempotency-Key": "once"}
    first = house.post("/v1/chat/completions", chat_body("idem", max_tokens=3), key)
    again = house.post("/v1/chat/completions", chat_body("idem", max_tokens=3), key)
    assert first[1]["x-job-id"] == again[1]["x-job-id"]
    assert json.loads(first[2])["choices"] == json.loads(again[2])["choices"]
    status, _, body = house.post("/v1/chat/completions", chat_body("other", max_tokens=3), key)
    assert status == 422 and json.loads(body)["error"]["code"] == "idempotency_key_reused"


def test_who_lost_the_answer_asks_again_with_the_same_key(house: House) -> None:
    """The first client is gone before its answer is whole; the second try joins the same job and gets all of it."""
    body = chat_body("lost answer", max_tokens=300, stream=True)
    headers = {"Content-Type": "application/json", "Idempotency-Key": "lost answer"}
    connection = http.client.HTTPConnection("127.0.0.1", house.port, timeout=30)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    job_id = connection.getresponse().headers["x-job-id"]
    connection.close()
    status, again, data = house.post("/v1/chat/completions", body, headers)
    assert status == 200 and again["x-job-id"] == job_id and data.endswith(b"data: [DONE]\n\n")
    assert json.loads(house.get(f"/v1/jobs/{job_id}")[1])["usage"]["completion_tokens"] == 300


def test_one_of_two_readers_may_leave(house: House) -> None:
    """A job that two clients of one key listen to is not cancelled because one of them goes."""
    body = chat_body("two readers", max_tokens=400, stream=True, queue={"on_disconnect": "cancel"})
    headers = {"Content-Type": "application/json", "Idempotency-Key": "two readers"}
    leaving, staying = (http.client.HTTPConnection("127.0.0.1", house.port, timeout=30) for _ in range(2))
    answers = []
    for connection in (leaving, staying):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answers.append(connection.getresponse())
    answers[0].close()
    leaving.close()
    assert answers[1].read().endswith(b"data: [DONE]\n\n")
    staying.close()


# --- bad input -----------------------------------------------------------------------------------------------------


def test_addresses_and_methods_that_do_not_exist(house: House) -> None:
    """404 and 405 have the same error shape as everything else."""
    assert json.loads(house.get("/v1/nothing")[1])["error"]["code"] == "not_found"
    status, headers, body = house.post("/v1/models", {})
    assert status == 405 and "GET" in headers["allow"] and json.loads(body)["error"]["code"] == "method_not_allowed"
    assert house.get("/v1/jobs/job_" + "0" * 32)[0] == 404
    assert house.get("/v1/jobs/nonsense")[0] == 404
    status, body = house.get("/v1/jobs?status=odd")
    assert (status, json.loads(body)["error"]["param"]) == (400, "status")
