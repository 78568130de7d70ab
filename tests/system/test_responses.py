"""Responses through the death of workers, API processes and the store: no number missing, no text spliced."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from batching import said
from house import House, eventually, free_port, restartable
from openai import OpenAI
from pydantic import BaseModel
from redis import Redis
from stream_reader import StreamReader

pytestmark = pytest.mark.slow

TOKENS = 300
DELTA = "response.output_text.delta"


class Reader(StreamReader):
    """Reads a stream of the events of a response."""

    @property
    def response(self) -> str:
        match = re.search(rb"resp_job_[0-9a-f]{32}", self.data)
        return match[0].decode() if match else ""

    def whole(self) -> list[dict[str, Any]]:
        """The events of a stream that has ended as it should: their numbers rise by one."""
        self.join(120)
        assert not self.is_alive() and self.is_whole
        found = self.events
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        return found


def follow(house: House, response_id: str, after: int = -1, port: int | None = None) -> Reader:
    cursor = f"&starting_after={after}" if after >= 0 else ""
    return Reader(port or house.port, f"/v1/responses/{response_id}?stream=true{cursor}")


def create(house: House, text: str, port: int | None = None, **fields: Any) -> Reader:
    body = {"model": "sim", "input": text, "stream": True, "max_output_tokens": TOKENS, **fields}
    return Reader(port or house.port, "/v1/responses", body)


def deltas(reader: Reader) -> int:
    return reader.data.count(b'"type":"' + DELTA.encode())


def has(reader: Reader, count: int) -> Callable[[], bool]:
    return lambda: deltas(reader) >= count


def text_of(found: list[dict[str, Any]], output_index: int = 0) -> str:
    return "".join(
        event["delta"] for event in found if event["type"] == DELTA and event["output_index"] == output_index
    )


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_killed_workers_responses_go_on(empty_house: House) -> None:
    """On the open connection, for one who reads it at another process, and for one who comes back; in the background
    and not."""
    house, other = empty_house, free_port()
    first = house.start("workers", "--id", "worker-1", PENSTOCK_SIM_STEP_MS="50")  # so slow that both still run
    house.start_api()
    house.start_api(other)
    house.wait_ready()
    readers = [create(house, f"kill {background}", background=background) for background in (False, True)]
    eventually(lambda: all(deltas(reader) >= 10 for reader in readers))
    beside = [follow(house, reader.response, port=other) for reader in readers]
    eventually(lambda: all(deltas(reader) >= 10 for reader in beside))
    house.start("workers", "--id", "worker-2")
    kill(first.pid)
    late = [follow(house, reader.response, 7, other) for reader in readers]
    for reader, second, third, background in zip(readers, beside, late, (False, True), strict=True):
        found = reader.whole()
        assert text_of(found) == said(f"kill {background}", TOKENS)
        assert {event.get("output_index", 0) for event in found} == {0}
        second.join(60)
        third.join(60)
        assert second.data == reader.data
        assert third.data == reader.data[reader.data.index(b"\n\n", reader.data.index(b'"sequence_number":7}')) + 2 :]
        assert follow(house, reader.response, port=other).whole() == found
        job = json.loads(house.get(f"/v1/jobs/{reader.response.removeprefix('resp_')}")[1])
        assert job["attempts"] == 2


def test_responses_survive_the_api_process_that_streams_them(empty_house: House) -> None:
    """Their readers' connections break, and another process gives the rest: a lost process cancels nothing, in the
    background or not."""
    house, doomed_port = empty_house, free_port()
    house.environ["PENSTOCK_SIM_STEP_MS"] = "10"
    house.start("workers")
    house.start_api()
    doomed = house.start_api(doomed_port)
    house.wait_ready()
    readers = [create(house, "api", doomed_port, background=background) for background in (False, True)]
    eventually(lambda: all(deltas(reader) >= 10 for reader in readers))
    kill(doomed.pid)
    for reader in readers:
        reader.join(60)
        assert b"[DONE]" not in reader.data
        had = reader.events
        rest = follow(house, reader.response, had[-1]["sequence_number"])
        rest.join(60)
        whole = follow(house, reader.response).whole()
        assert had + rest.events == whole and text_of(whole) == said("api", TOKENS)


def test_a_draining_api_process_breaks_the_connection(empty_house: House) -> None:
    """It tells nobody that the response has failed, because it goes on."""
    house, leaving_port = empty_house, free_port()
    house.environ["PENSTOCK_SIM_STEP_MS"] = "20"
    house.start("workers")
    house.start_api()
    leaving = house.start_api(leaving_port, PENSTOCK_API_DRAIN_S="0.5")
    house.wait_ready()
    first = create(house, "drain", leaving_port, background=True)
    eventually(has(first, 5))
    second = follow(house, first.response, port=leaving_port)
    eventually(has(second, 5))
    leaving.terminate()
    leaving.wait(60)
    for reader in (first, second):
        reader.join(60)
        assert reader.broken or not reader.data.endswith(b"[DONE]\n\n")
        assert b"response.failed" not in reader.data and b'"error":{' not in reader.data
        rest = follow(house, first.response, reader.events[-1]["sequence_number"])
        rest.join(60)
        assert text_of(reader.events + rest.events) == said("drain", TOKENS)


FORMAT = {"format": {"type": "json_schema", "name": "texts", "schema": {"type": "array", "items": {"type": "string"}}}}


def test_an_answer_that_begins_again_is_a_new_item(json_house: House) -> None:
    """The worker of a JSON answer is killed. Every reader sees the same bytes: an item that was given up, and the one
    that counts."""
    house, other = json_house, free_port()
    house.start_api()
    house.start_api(other)
    doomed = house.start("workers", "--model", "m", "--id", "worker-0")
    house.wait_ready()
    reader = Reader(house.port, "/v1/responses", {"model": "m", "input": "150", "text": FORMAT, "stream": True})
    whole = house.closes(OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0, timeout=120))
    answers: list[Any] = []
    waiting = threading.Thread(
        target=lambda: answers.append(whole.responses.create(model="m", input="150", text=FORMAT))
    )  # type: ignore[call-overload]
    waiting.start()
    eventually(has(reader, 25))
    late = follow(house, reader.response, 20, other)
    eventually(has(late, 5))
    kill(doomed.pid)
    house.start("workers", "--model", "m", "--id", "worker-1")
    found = reader.whole()
    texts = [text_of(found, index) for index in range(2)]
    assert len({re.findall("[0-9a-f]{8}", text)[0] for text in texts}) == 2
    assert json.loads(texts[1])[-1].endswith("end")
    done = [event["item"]["status"] for event in found if event["type"] == "response.output_item.done"]
    assert done == ["incomplete", "completed"]
    last = found[-1]["response"]
    assert [item["content"][0]["text"] for item in last["output"]] == [texts[1]] and last["status"] == "completed"
    assert last["output"][0]["id"].endswith("_out1")
    late.join(60)
    assert late.events == found[21:]
    for port in (house.port, other):
        again = follow(house, reader.response, port=port)
        again.join(60)
        assert again.data == reader.data
    assert json.loads(house.get(f"/v1/responses/{reader.response}")[1]) == last
    waiting.join(120)
    (answer,) = answers
    assert json.loads(answer.output_text)[-1].endswith("end")
    assert answer.to_dict() == whole.responses.retrieve(answer.id).to_dict()
    with whole.responses.stream(response_id=reader.response) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == texts[1]


def test_a_response_whose_log_has_a_hole_begins_again(empty_house: House) -> None:
    """The reader who has events behind the hole is told; every later one gets the text before it, and the new one."""
    house = empty_house
    house.environ |= {"PENSTOCK_SIM_STEP_MS": "5", "PENSTOCK_SIM_AUTHORS": "true"}
    doomed = house.start("workers", "--id", "worker-1")
    house.start_api()
    house.wait_ready()
    reader = create(house, "hole", background=True)
    eventually(has(reader, 40))
    with Redis.from_url(house.redis_url) as store:
        (log,) = store.keys("penstock:*:log:*")
        entries = store.xrange(log, count=20)
        store.xdel(log, entries[-1][0])
    kill(doomed.pid)
    house.start("workers", "--id", "worker-2")
    found = reader.whole()
    assert found[-1]["type"] == "response.failed" and "lost part" in found[-1]["response"]["error"]["message"]
    path = f"/v1/responses/{reader.response}"
    eventually(lambda: json.loads(house.get(path)[1])["status"] == "incomplete", seconds=60)
    again = [follow(house, reader.response) for _ in range(2)]
    whole = again[0].whole()
    assert again[1].whole() == whole and again[0].data == again[1].data
    done = [event["item"] for event in whole if event["type"] == "response.output_item.done"]
    first, second = (item["content"][0]["text"] for item in done)
    assert text_of(found).startswith(first) and len(first) < len(text_of(found))
    assert len(re.findall("[A-Z]{4}", second)) == TOKENS and not second.startswith(first)
    assert [item["content"][0]["text"] for item in whole[-1]["response"]["output"]] == [second]


def test_an_answer_of_the_real_model_is_parsed(real_house: House) -> None:
    """With the official client: a schema; log-probabilities, whole and streamed."""
    house = real_house
    house.start_all("workers")
    responses = house.closes(OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0, timeout=120)).responses

    class River(BaseModel):
        name: Literal["Rhine", "Elbe"]
        long: bool

    parsed = responses.parse(model="small", input="Name a river.", text_format=River, max_output_tokens=200)
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, River)
    assert parsed.text is not None and parsed.text.format is not None and parsed.text.format.type == "json_schema"
    asked: Any = {"model": "small", "input": "Name a river.", "max_output_tokens": 5, "temperature": 0}
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (part,) = responses.create(**asked).output[0].content
    tokens = [
        each for event in responses.create(**asked, stream=True) if event.type == DELTA for each in event.logprobs
    ]
    assert len(part.logprobs) == len(tokens) == 5 and len(part.logprobs[0].top_logprobs) == 2
    assert [each.token for each in part.logprobs] == [each.token for each in tokens]


def test_a_response_outlives_a_restart_of_the_store(tmp_path: Path) -> None:
    """While it runs, and after its end: both readers get the whole."""
    with restartable(tmp_path) as (house, restart):
        house.environ["PENSTOCK_SIM_STEP_MS"] = "5"
        house.start_all("workers")
        before = create(house, "before", background=True, max_output_tokens=20)
        ended = before.whole()
        reader = create(house, "store", background=True)
        eventually(has(reader, 10))
        restart()
        found = reader.whole()
        assert text_of(found) == said("store", TOKENS)
        assert follow(house, reader.response).whole() == found
        assert follow(house, before.response).whole() == ended


def test_a_record_of_another_version(empty_house: House) -> None:
    """A newer one is left to a process of its version; an older one, without what newer ones add, is shown."""
    house = empty_house
    house.start_all("workers")
    made = json.loads(house.post("/v1/responses", {"model": "sim", "input": "x", "max_output_tokens": 2})[2])
    key = f"penstock:{{0}}:job:{made['id'].removeprefix('resp_')}"
    with Redis.from_url(house.redis_url) as store:
        body, record = store.hmget(key, "body", "record")
        store.hset(key, "body", msgspec.msgpack.encode(msgspec.msgpack.decode(body) | {"v": 99}))
        status, data = house.get(f"/v1/responses/{made['id']}")
        assert (status, json.loads(data)["error"]["code"]) == (503, "newer_version")
        older: list[Any] = msgspec.msgpack.decode(record)[:13]  # a terminal message, before there was `last_ms`
        store.hset(key, mapping={"body": body, "record": msgspec.msgpack.encode(older)})
        assert json.loads(house.get(f"/v1/responses/{made['id']}")[1]) == made | {"completed_at": None}
