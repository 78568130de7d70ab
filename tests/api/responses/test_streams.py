"""Streams of responses: every event in its order, cut after each one and resumed through another API process."""

from __future__ import annotations

import io
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from api_in_process import api_in_process
from hand import Hand
from house import House, eventually, module_house, serving
from openai import OpenAI
from redis import Redis

from bench.ports import free_port
from streaming.errors import Unavailable, UnknownJob
from streaming.jobs.records import JobRecord
from streaming.keys import partition_key
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

TOKENS = 6
BEGIN = ["response.created", "response.in_progress"]
IN_BACKGROUND = ["response.created", "response.queued", "response.in_progress"]
ITEM = ["response.output_item.added", "response.content_part.added"]
DONE = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
DELTA = "response.output_text.delta"


house = module_house("workers", PENSTOCK_REDIS_PARTITIONS="4", PENSTOCK_SIM_STEP_MS="1")


@pytest.fixture(scope="module")
def other_port(house: House) -> int:
    """Another API process."""
    port = free_port()
    house.start_api(port)
    return port


@pytest.fixture
def client(house: House) -> OpenAI:
    return house.closes(OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0))


@pytest.fixture
def other(house: House, other_port: int) -> OpenAI:
    return house.closes(OpenAI(base_url=f"http://127.0.0.1:{other_port}/v1", api_key="none", max_retries=0))


def streamed(house: House, body: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    status, _, data = house.post("/v1/responses", {"model": "sim", "stream": True, **body}, headers)
    assert status == 200, data
    return data


def replay(house: House, response_id: str, after: int | None = None, port: int | None = None) -> bytes:
    cursor = "" if after is None else f"&starting_after={after}"
    status, data = house.get(f"/v1/responses/{response_id}?stream=true{cursor}", port)
    assert status == 200, data
    return data


def events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream, whose framing is checked."""
    *blocks, done, nothing = without_pings(data).split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    found = []
    for block in blocks:
        name, _, payload = block.partition(b"\ndata: ")
        event = json.loads(payload)
        assert name == b"event: " + event["type"].encode()
        found.append(event)
    return found


def without_pings(data: bytes) -> bytes:
    return re.sub(rb"(?m)^: ping\n", b"", data)


def names(found: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in found]


def test_the_events_of_a_stream_in_their_order(house: House) -> None:
    found = events(streamed(house, {"input": "hello"}))
    assert names(found) == [*BEGIN, *ITEM, *[DELTA] * 128, *DONE, "response.completed"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    text = "".join(event["delta"] for event in found if event["type"] == DELTA)
    last = found[-1]["response"]
    assert last["status"] == "completed" and last["output"][0]["content"][0]["text"] == text
    assert [event.get("text") for event in found if event["type"] == "response.output_text.done"] == [text]
    assert {event["item_id"] for event in found if "item_id" in event} == {last["output"][0]["id"]}
    assert json.loads(house.get(f"/v1/responses/{last['id']}")[1]) == last


def test_a_failure_ends_a_stream_alone(house: House) -> None:
    data = streamed(house, {"input": "hello", "max_output_tokens": 100_000, "background": True})
    found = events(data)
    assert names(found) == [*IN_BACKGROUND, "response.failed"]
    failed = found[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "invalid_prompt" and failed["output"] == []
    assert replay(house, failed["id"]) == data


def test_an_id_goes_out_before_the_first_token(empty_house: House) -> None:
    """No worker is there for the model."""
    house = empty_house
    house.start_api()
    with socket.create_connection(("127.0.0.1", house.port), 30) as connection:
        body = json.dumps({"model": "sim", "stream": True, "input": "x", "max_output_tokens": 4000}).encode()
        head = b"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        seen = b""
        while b"response.in_progress" not in seen:
            seen += connection.recv(4096)
    match = re.search(rb"resp_job_[0-9a-f]{32}", seen)
    assert match is not None
    # Its reader is gone: nothing is left running.
    path = f"/v1/responses/{match[0].decode()}"
    eventually(lambda: json.loads(house.get(path)[1])["status"] == "cancelled")


@pytest.mark.parametrize(
    ("failure", "last"), [(Unavailable("away"), "response.completed"), (UnknownJob("gone"), "response.failed")]
)
async def test_an_answer_to_a_schema_goes_on_once_the_store_answers(
    wire: RedisClient, monkeypatch: pytest.MonkeyPatch, failure: Exception, last: str
) -> None:
    """Its first read comes right behind the put. If the store has lost the job by then, it ends."""
    failures = iter([failure])
    async with api_in_process(RedisClient.open(wire.settings)) as api:
        outline = api.services.job_reader.outline

        async def fails_at_first(job_id: str) -> JobRecord:
            for each in failures:
                hand = await Hand.claiming(wire)
                await hand.write("{}")
                await hand.finish()
                raise each
            return await outline(job_id)

        monkeypatch.setattr(api.services.job_reader, "outline", fails_at_first)
        form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
        asked = {"model": "sim", "stream": True, "input": "x", "text": {"format": form}}
        found = events((await api.post("/v1/responses", asked)).content)
    assert names(found)[-1] == last and names(found).count(DELTA) == (2 if last == "response.completed" else 0)


@pytest.mark.parametrize("background", [False, True])
def test_replays_are_equal_to_the_byte(house: House, other_port: int, background: bool) -> None:
    """Those of two processes, and the stream that the first reader got."""
    first = streamed(
        house, {"input": f"hello \u2028 é {background}", "background": background, "max_output_tokens": 40}
    )
    response_id = events(first)[0]["response"]["id"]
    assert without_pings(first) == replay(house, response_id) == replay(house, response_id, port=other_port)


def test_cut_after_every_event_and_resumed_through_another_process(client: OpenAI, other: OpenAI) -> None:
    """With the official client: while it runs at first, then from the record."""
    count = len(IN_BACKGROUND) + len(ITEM) + TOKENS + len(DONE) + 1
    for cut in range(count):
        first = client.responses.create(
            model="sim", input=f"cut {cut}", background=True, stream=True, max_output_tokens=TOKENS
        )
        had = []
        for event in first:
            had.append(event)
            if event.sequence_number == cut:
                break
        first.close()
        response_id = had[0].response.id  # type: ignore[union-attr]
        rest = list(other.responses.retrieve(response_id, stream=True, starting_after=cut))
        whole = list(other.responses.retrieve(response_id, stream=True))
        assert [event.sequence_number for event in (*had, *rest)] == list(range(count)), cut
        assert [event.to_json() for event in (*had, *rest)] == [event.to_json() for event in whole]
        assert whole[-1].type == "response.incomplete"


def test_a_reader_of_a_cancelled_response(client: OpenAI, other: OpenAI) -> None:
    stream = client.responses.create(model="sim", input="x", background=True, stream=True, max_output_tokens=4000)
    found = []
    for event in stream:
        found.append(event)
        if event.type == DELTA and len(found) < 10:
            assert other.responses.cancel(found[0].response.id).status == "cancelled"  # type: ignore[union-attr]
    assert found[-1].type == "response.incomplete" and found[-1].response.status == "cancelled"
    again = other.responses.retrieve(found[0].response.id, stream=True)  # type: ignore[union-attr]
    assert [event.to_json() for event in again] == [event.to_json() for event in found]


def test_a_reader_who_leaves_a_response_in_the_background_leaves_it_alone(client: OpenAI) -> None:
    stream = client.responses.create(model="sim", input="x", background=True, stream=True, max_output_tokens=20)
    first = next(iter(stream))
    stream.close()
    response_id = first.response.id  # type: ignore[union-attr]
    eventually(lambda: client.responses.retrieve(response_id).status == "incomplete")


def test_a_wrong_query_is_refused(house: House) -> None:
    made = json.loads(house.post("/v1/responses", {"model": "sim", "input": "x", "max_output_tokens": 1})[2])
    for query in ("starting_after=1", "stream=yes"):
        assert house.get(f"/v1/responses/{made['id']}?{query}")[0] == 400


def test_a_cursor_of_before_a_loss_of_data_is_refused(house: House) -> None:
    """Its number may name another event since; a response that was accepted later is resumed."""
    body = {"model": "sim", "input": "x", "max_output_tokens": 2}
    made = json.loads(house.post("/v1/responses", body)[2])
    before = replay(house, made["id"], 2)
    (beyond,) = events(replay(house, made["id"], 1000))
    assert (beyond["type"], beyond["sequence_number"]) == ("response.failed", 1001)
    with Redis.from_url(house.redis_url) as store:
        for partition in range(4):
            store.incr(partition_key(partition, "epoch"))
    status, data = house.get(f"/v1/responses/{made['id']}?stream=true&starting_after=2")
    error = json.loads(data)["error"]
    assert (status, error["code"], error["param"]) == (409, "stream_reset", "starting_after")
    assert replay(house, made["id"]).endswith(before)
    later = json.loads(house.post("/v1/responses", body)[2])
    assert len(events(replay(house, later["id"], 2))) == len(events(before))


def test_a_slow_reader_gets_every_event(house: House) -> None:
    """One that takes nothing for a while, of a new response or of a stored one: the connection congests, and the rest
    comes from the log."""
    fields = {"model": "sim", "input": "slow", "max_output_tokens": 4000}
    made = json.loads(house.post("/v1/responses", {**fields, "background": True})[2])
    streams = (
        (b"POST /v1/responses", json.dumps({**fields, "stream": True}).encode()),
        (f"GET /v1/responses/{made['id']}?stream=true".encode(), b""),
    )
    with ExitStack() as stack:
        connections = [stack.enter_context(socket.socket()) for _ in streams]
        begun = [begin(connection, house.port, *asked) for connection, asked in zip(connections, streams, strict=True)]
        for response_id, _ in begun:
            shown = f"/v1/responses/{response_id}"
            eventually(lambda shown=shown: json.loads(house.get(shown)[1])["status"] == "incomplete", seconds=60)  # type: ignore[misc]
        for connection, (response_id, head) in zip(connections, begun, strict=True):
            data = head
            while chunk := connection.recv(65_536):
                data += chunk
            received = SimpleNamespace(makefile=lambda *_, data=data: io.BytesIO(data))
            answer = HTTPResponse(cast(Any, received))
            answer.begin()
            assert without_pings(answer.read()) == replay(house, response_id)


def begin(connection: socket.socket, port: int, line: bytes, body: bytes) -> tuple[str, bytes]:
    """Ask for a stream, and read no more of it than its response's id; both are returned."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    head = line + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    data = b""
    while (match := re.search(rb"resp_job_[0-9a-f]{32}", data)) is None:
        data += connection.recv(256)
    return match[0].decode(), data


def test_a_reader_of_a_stored_response_hears_of_a_silent_one(tmp_path: Path) -> None:
    """Comments while it waits for a worker, and while its tokens are far apart."""
    environ = {"PENSTOCK_SIM_STEP_MS": "300", "PENSTOCK_API_KEEP_ALIVE_S": "0.05"}
    with serving(tmp_path, **environ) as house:
        made = json.loads(house.post("/v1/responses", {"model": "sim", "input": "x", "background": True,
                                                       "max_output_tokens": 4})[2])  # fmt: skip
        with ThreadPoolExecutor() as pool:
            reader = pool.submit(house.get, f"/v1/responses/{made['id']}?stream=true")
            house.start("workers")
            status, data = reader.result(60)
        assert status == 200 and b": ping\n\n" not in data and not re.search(rb"(?m)^id:", data)
        waiting, *between = data.split(b"event: response.output_text.delta")
        assert b": ping\n" in waiting and any(b": ping\n" in part for part in between[:-1])
        assert without_pings(data) == replay(house, made["id"])
