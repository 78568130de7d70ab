"""Anthropic's API with its own client, and its streams through the death of workers and API processes: every event can
be resumed after, and gives the same bytes at any process."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic import Anthropic
from batching import said
from house import House, eventually, free_port, key_rows, module_house, serving
from pydantic import BaseModel
from redis import Redis
from stream_reader import Event, StreamReader, events_in

from streaming.keys import partition_key

pytestmark = pytest.mark.slow

TOKENS = 300
ASKED = [{"role": "user", "content": "hello"}]
GOES_ON = {"queue": {"on_disconnect": "continue"}}

house = module_house("workers", PENSTOCK_REDIS_PARTITIONS="4", PENSTOCK_SIM_STEP_MS="1")


@pytest.fixture(scope="module")
def other_port(house: House) -> int:
    """Another API process."""
    port = free_port()
    house.start_api(port)
    return port


def client_of(house: House, **options: Any) -> Anthropic:
    settings = {"base_url": house.url, "api_key": "none", "max_retries": 0, **options}
    return house.closes(Anthropic(**settings))


@pytest.fixture
def client(house: House) -> Anthropic:
    return client_of(house)


class Reader(StreamReader):
    """Reads the events of a message."""

    @property
    def message(self) -> str:
        match = re.search(rb"msg_job_[0-9a-f]{32}", self.data)
        return match[0].decode() if match else ""

    @property
    def ids(self) -> list[int]:
        return [int(event.id) for event in events_in(self.data)]

    def whole(self) -> list[Event]:
        self.join(120)
        found = events_in(self.data)
        assert not self.is_alive() and not self.broken and found[-1].name == "message_stop", self.data[-300:]
        return found


def create(house: House, text: str, port: int | None = None, key: str = "", **fields: Any) -> Reader:
    body = {"model": "sim", "max_tokens": TOKENS, "stream": True, "messages": [{"role": "user", "content": text}]}
    return Reader(port or house.port, "/v1/messages", {**body, **fields}, Idempotency_Key=key)


def follow(
    house: House, message: str, after: int | None = None, port: int | None = None, *, accept: bool = True
) -> Reader:
    headers = ({"Accept": "text/event-stream"} if accept else {}) | (
        {} if after is None else {"Last_Event_ID": f"{after}"}
    )
    return Reader(port or house.port, f"/v1/messages/{message}", **headers)


def deltas(reader: Reader) -> int:
    return reader.data.count(b'"type":"content_block_delta"')


def has(reader: Reader, count: int) -> Callable[[], bool]:
    return lambda: deltas(reader) >= count


def text_of(found: list[Event]) -> str:
    return "".join(event.data["delta"]["text"] for event in found if event.name == "content_block_delta")


# --- its own client ---------------------------------------------------------------------------------------------------


def test_a_message_and_its_stream(client: Anthropic) -> None:
    asked: Any = {"model": "sim", "max_tokens": 12, "messages": ASKED, "system": "Be brief."}
    message = client.messages.create(**asked)
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 12
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in message.content if block.type == "text"] == [text]
    assert (final.stop_reason, final.usage) == (message.stop_reason, message.usage)
    counted = client.messages.count_tokens(model="sim", messages=ASKED, system="Be brief.")  # type: ignore[arg-type]
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_stop_sequence_is_named(client: Anthropic) -> None:
    """Whole and streamed, also if it spans tokens."""
    asked: Any = {"model": "sim", "max_tokens": 40, "messages": ASKED}
    words = client.messages.create(**asked).content[0].text.split(" ")  # type: ignore[union-attr]
    stop = f"{words[5]} {words[6][:2]}"
    message = client.messages.create(stop_sequences=["never", stop], **asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == " ".join(words[:5]) + " "  # type: ignore[union-attr]
    with client.messages.stream(stop_sequences=["never", stop], **asked) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence, final.usage) == ("stop_sequence", stop, message.usage)


WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def test_a_loop_of_tools(client: Anthropic) -> None:
    asked: Any = {"model": "sim", "max_tokens": 100, "tools": [WEATHER]}
    messages: list[Any] = [{"role": "user", "content": "Call get_weather."}]
    with client.messages.stream(messages=messages, **asked) as stream:
        kinds = {event.type for event in stream}
        called = stream.get_final_message()
    assert "input_json" in kinds and called.stop_reason == "tool_use"
    assert client.messages.create(messages=messages, **asked).content[-1].input == called.content[-1].input  # type: ignore[union-attr]
    messages += [called.to_param()]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": block.input["city"]}]}
        for block in called.content
        if block.type == "tool_use"
    ]
    messages += [{"role": "user", "content": results}]
    last = client.messages.create(messages=messages, **asked)
    assert [block.type for block in last.content] == ["text"]
    counted = client.messages.count_tokens(model="sim", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    assert counted.input_tokens == last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0)
    later: Any = {"extra_body": {"stream": True}, "extra_headers": {"Prefer": "respond-async"}}
    assert client.messages.count_tokens(model="sim", messages=messages, tools=[WEATHER], **later) == counted  # type: ignore[list-item]
    forced = client.messages.create(messages=ASKED, tool_choice={"type": "tool", "name": "get_weather"}, **asked)
    assert [block.type for block in forced.content] == ["tool_use"]


def test_thinking(client: Anthropic) -> None:
    asked: Any = {"model": "sim", "max_tokens": 100, "messages": ASKED, "output_config": {"effort": "low"}}
    shown = client.messages.create(thinking={"type": "adaptive"}, **asked)
    assert [block.type for block in shown.content] == ["thinking", "text"]
    with client.messages.stream(thinking={"type": "adaptive"}, **asked) as stream:
        assert {"thinking", "signature"} <= {event.type for event in stream}
        final = stream.get_final_message()
    assert [block.to_dict() | {"signature": ""} for block in final.content] == [
        block.to_dict() | {"signature": ""} for block in shown.content
    ]
    hidden = client.messages.create(**asked)
    assert [block.type for block in hidden.content] == ["text"]
    again = [*ASKED, shown.to_param(), {"role": "user", "content": "And?"}]
    assert client.messages.create(**asked | {"messages": again}).content
    off = client.messages.create(thinking={"type": "disabled"}, **asked)
    assert [block.type for block in off.content] == ["text"] and off.usage.output_tokens <= hidden.usage.output_tokens


def test_models_and_refusals(client: Anthropic, house: House) -> None:
    (model,) = client.models.list().data
    assert (model.id, client.models.retrieve("sim").id, model.type) == ("sim", "sim", "model")
    assert json.loads(house.get("/v1/models")[1])["object"] == "list"
    version = {"anthropic-version": "2023-06-01"}
    assert "request_id" not in json.loads(house.post("/v1/chat/completions", {}, version)[2])
    assert "request_id" in json.loads(house.request("GET", "/v1/models/gone", None, version)[2])
    ask: Any = client.messages.create
    good: dict[str, Any] = {"model": "sim", "max_tokens": 4, "messages": ASKED}
    with pytest.raises(anthropic.BadRequestError, match="at least 1"):
        ask(**good | {"max_tokens": 0})
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        ask(**good | {"model": "gone"})
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.post("/v1/messages/gone/away", cast_to=object)
    body: Any = unknown.value.body
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
    assert unknown.value.request_id == body["request_id"]


def test_keys_come_in_either_header(tmp_path: Any) -> None:
    (tmp_path / "penstock.toml").write_text(key_rows(first_key="limits = { requests_per_minute = 100 }", second_key=""))
    with serving(tmp_path, "workers") as house:
        asked: Any = {"model": "sim", "max_tokens": 4, "messages": ASKED}
        made = client_of(house, api_key="first_key").messages.with_raw_response.create(**asked)
        told, until = made.headers, datetime.fromisoformat(made.headers["anthropic-ratelimit-requests-reset"])
        assert told["request-id"] == told["x-request-id"] and until > datetime.now(UTC) - timedelta(minutes=1)
        rates = [told[f"anthropic-ratelimit-requests-{name}"] for name in ("limit", "remaining")]
        assert rates == ["100", told["x-ratelimit-remaining-requests"]]
        assert client_of(house, api_key=None, auth_token="first_key").messages.create(**asked).content
        with pytest.raises(anthropic.AuthenticationError) as error:
            client_of(house, api_key="wrong_key").messages.create(**asked)
        body: Any = error.value.body
        assert body["error"]["type"] == "authentication_error"
        path = f"/v1/messages/{made.parse().id}"
        answers = {key: house.request("GET", path, None, {"x-api-key": key}) for key in ("first_key", "second_key")}
        assert [status for status, _, _ in answers.values()] == [200, 404]
        assert json.loads(answers["second_key"][2])["type"] == "error"
        twice = house.request("GET", path, None, {"x-api-key": "wrong_key", "Authorization": "Bearer first_key"})
        assert twice[0] == 200
        for other in ("", "Bearer ", "Basic Zmlyc3Q6a2V5"):
            answer = house.request("GET", path, None, {"x-api-key": "first_key", "Authorization": other})
            assert (answer[0], answer[1]["request-id"]) == (200, answer[1]["x-request-id"])
        assert not any("wrong_key" in house.log(role) for role in ("api", "workers"))


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_a_message_is_a_job(house: House) -> None:
    asked = {"model": "sim", "max_tokens": 4, "messages": ASKED, "metadata": {"user_id": "u"}}
    status, headers, data = house.post("/v1/messages", asked, {"Prefer": "respond-async", "Idempotency-Key": "k"})
    made = json.loads(data)
    assert status == 202 and made["endpoint"] == "/v1/messages" and headers["location"].endswith(made["id"])
    assert headers["request-id"] == headers["x-request-id"]
    assert json.loads(house.post("/v1/messages", asked, {"Idempotency-Key": "k"})[2])["id"] == f"msg_{made['id']}"
    shown = json.loads(house.get(f"/v1/jobs/{made['id']}?wait=30&include=input")[1])
    message = shown["result"]
    assert message["type"] == "message" and shown["input"]["messages"] == ASKED
    for path in (f"/v1/jobs/{made['id']}/result", f"/v1/messages/msg_{made['id']}"):
        assert json.loads(house.get(path)[1]) == message
    for path in (f"/v1/messages/{made['id']}", "/v1/messages/msg_job_" + "0" * 32):
        assert house.get(path)[0] == 404
    chat = {"model": "sim", "max_tokens": 4, "messages": ASKED}
    other = json.loads(house.post("/v1/chat/completions", chat)[2])["id"].removeprefix("chatcmpl-")
    assert house.get(f"/v1/messages/msg_{other}")[0] == 404
    assert b"event: delta" in house.get(f"/v1/jobs/{made['id']}/events")[1]


def test_a_message_that_runs_is_not_there_yet(house: House) -> None:
    asked: Any = {"max_tokens": 4000, "key": "runs"}
    reader = create(house, "runs", **asked)
    eventually(has(reader, 1))
    status, data = house.get(f"/v1/messages/{reader.message}")
    assert status == 202 and json.loads(data)["object"] == "job"
    with closing(HTTPConnection("127.0.0.1", house.port, timeout=60)) as line:
        for method, query, expected in (("HEAD", "?stream=true", 200), ("GET", "", 202)):
            line.request(method, f"/v1/messages/{reader.message}{query}")
            answer = line.getresponse()
            assert (answer.status, bool(answer.read())) == (expected, method == "GET"), "its head waits for no end"
    assert house.request("POST", f"/v1/jobs/{reader.message.removeprefix('msg_')}/cancel")[0] == 200
    reader.join(60)
    last = events_in(reader.data)[-1]
    assert last.name == "error" and last.id == "" and last.data["error"]["code"] == "job_cancelled"
    again = create(house, "runs", **asked)
    again.join(60)
    assert house.get(f"/v1/messages/{reader.message}")[0] == again.status == 409


# --- events ----------------------------------------------------------------------------------------------------------


def resumes(house: House, port: int) -> int:
    """How many streams went on behind a cursor, by the process at this port."""
    match = re.search(rb"penstock_stream_resumes_total ([0-9]+)", house.get("/metrics", port)[1])
    return int(match[1]) if match else 0


def test_cut_after_every_event_and_resumed_through_another_process(house: House, other_port: int) -> None:
    """While it runs at first, then from the record; of text, calls and thinking."""
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 12},
        {"max_tokens": 60, "tools": [WEATHER], "messages": [{"role": "user", "content": "Call get_weather."}]},
        {"max_tokens": 30, "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
    ]
    for fields in kinds:
        first = create(house, "cut", **fields)
        count = len(first.whole())
        assert first.ids == list(range(count))
        before = resumes(house, other_port)
        blocks = first.data.split(b"\n\n")
        for cut in range(count):
            rest = follow(house, first.message, cut, other_port, accept=cut % 2 == 0)
            rest.join(60)
            assert rest.data == b"".join(block + b"\n\n" for block in blocks[cut + 1 : -1]), cut
        status, data = house.get(f"/v1/messages/{first.message}?stream=true&starting_after={count - 2}", other_port)
        assert (status, data) == (200, blocks[-2] + b"\n\n")
        assert resumes(house, other_port) == before + count + 1


def test_a_reader_who_left_in_the_middle_goes_on(house: House, other_port: int) -> None:
    client = client_of(house)
    for cut in range(0, 12, 3):
        asked: Any = {"model": "sim", "max_tokens": 200, "messages": ASKED, "extra_body": GOES_ON}
        stream = client.messages.create(stream=True, **asked)
        seen: list[Any] = []
        for event in stream:
            seen.append(event)
            if len(seen) == cut + 1:
                break
        stream.close()
        message = seen[0].message.id
        rest = follow(house, message, cut, other_port).whole()
        assert [int(event.id) for event in rest] == list(range(cut + 1, cut + 1 + len(rest)))
        whole = follow(house, message).whole()
        assert [event.data["type"] for event in whole[: cut + 1]] == [event.type for event in seen]
        assert whole[cut + 1 :] == rest and text_of(whole) == said("hello", 200)


def test_cursors_that_name_no_event_are_refused(house: House) -> None:
    message = create(house, "cursors", max_tokens=4)
    message.whole()
    path = f"/v1/messages/{message.message}"
    for query, headers in (("?starting_after=1", {}), ("?stream=true", {"Last-Event-ID": "x"}), ("?stream=yes", {})):
        status, _, data = house.request("GET", path + query, None, headers)
        assert (status, json.loads(data)["error"]["type"]) == (400, "invalid_request_error")
    assert house.get(f"{path}?stream=true&starting_after=1000000003")[0] == 409
    last, beyond = (follow(house, message.message, after) for after in (len(message.ids) - 1, 1000))
    last.join(60), beyond.join(60)
    (told,) = events_in(beyond.data)
    assert last.data == b""
    assert (told.name, told.data["error"]["code"]) == ("error", "stream_reset")
    with Redis.from_url(house.redis_url) as store:
        for partition in range(4):
            store.incr(partition_key(partition, "epoch"))
    status, data = house.get(f"{path}?stream=true&starting_after=2")
    assert (status, json.loads(data)["error"]["code"]) == (409, "stream_reset")
    assert len(follow(house, message.message).whole()) == len(message.ids)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_killed_workers_message_goes_on(empty_house: House) -> None:
    """On the open connection, for one who reads it at another process, and for one who comes back."""
    house, other = empty_house, free_port()
    first = house.start("workers", "--id", "worker-1", PENSTOCK_SIM_STEP_MS="50")
    house.start_api()
    house.start_api(other)
    house.wait_ready()
    reader = create(house, "kill")
    eventually(has(reader, 10))
    beside = follow(house, reader.message, port=other)
    eventually(has(beside, 10))
    house.start("workers", "--id", "worker-2")
    kill(first.pid)
    late = follow(house, reader.message, 7, other)
    found = reader.whole()
    assert text_of(found) == said("kill", TOKENS) and reader.ids == list(range(len(found)))
    assert beside.whole() == found and late.whole() == found[8:]
    assert json.loads(house.get(f"/v1/jobs/{reader.message.removeprefix('msg_')}")[1])["attempts"] == 2


def test_a_message_survives_the_api_process_that_streams_it(empty_house: House) -> None:
    house, doomed_port = empty_house, free_port()
    house.environ["PENSTOCK_SIM_STEP_MS"] = "10"
    house.start("workers")
    house.start_api()
    doomed = house.start_api(doomed_port)
    house.wait_ready()
    reader = create(house, "api", doomed_port)
    eventually(has(reader, 10))
    kill(doomed.pid)
    reader.join(60)
    had = events_in(reader.data)
    rest = follow(house, reader.message, int(had[-1].id)).whole()
    whole = follow(house, reader.message).whole()
    assert had + rest == whole and text_of(whole) == said("api", TOKENS)


def test_a_draining_api_process_breaks_the_connection(empty_house: House) -> None:
    house, leaving_port = empty_house, free_port()
    house.environ["PENSTOCK_SIM_STEP_MS"] = "20"
    house.start("workers")
    house.start_api()
    leaving = house.start_api(leaving_port, PENSTOCK_API_DRAIN_S="0.5")
    house.wait_ready()
    first = create(house, "drain", leaving_port)
    eventually(has(first, 5))
    second = follow(house, first.message, port=leaving_port)
    eventually(has(second, 5))
    leaving.terminate()
    leaving.wait(60)
    for reader in (first, second):
        reader.join(60)
        had = events_in(reader.data)
        assert "error" not in [event.name for event in had]
        assert text_of(had + follow(house, first.message, int(had[-1].id)).whole()) == said("drain", TOKENS)


FORMAT = {"format": {"type": "json_schema", "schema": {"type": "array", "items": {"type": "string"}}}}


def test_json_that_begins_again_is_told_and_never_joined(json_house: House) -> None:
    """The worker of a JSON answer is killed: its stream ends with an error, its numbers lead to no other text, and who
    reads it anew gets the whole of the new one."""
    house, other = json_house, free_port()
    house.start_api()
    house.start_api(other)
    doomed = house.start("workers", "--model", "m", "--id", "worker-0")
    house.wait_ready()
    asked: Any = {"model": "m", "output_config": FORMAT, "key": "again"}
    reader = create(house, "150", **asked)
    eventually(has(reader, 25))
    late = follow(house, reader.message, 20, other)
    eventually(has(late, 5))
    kill(doomed.pid)
    house.start("workers", "--model", "m", "--id", "worker-1")
    for each in (reader, late):
        each.join(120)
        last = events_in(each.data)[-1]
        assert (last.name, last.id) == ("error", "") and last.data["error"]["code"] in (
            "resume_impossible",
            "stream_reset",
        )
    status, data = house.get(f"/v1/messages/{reader.message}?stream=true&starting_after=20", other)
    assert (status, json.loads(data)["error"]["code"]) == (409, "stream_reset")
    new = follow(house, reader.message, port=other)
    found = new.whole()
    assert json.loads(text_of(found))[-1].endswith("end") and new.ids[0] == 1_000_000_000
    rest = follow(house, reader.message, new.ids[7])
    assert rest.whole() == found[8:]
    assert create(house, "150", other, **asked).whole() == found
    shown = json.loads(house.get(f"/v1/messages/{reader.message}")[1])
    assert shown["content"][0]["text"] == text_of(found)


def test_thinking_that_is_not_shown_is_no_silence(tmp_path: Any) -> None:
    with serving(tmp_path, "workers", PENSTOCK_SIM_STEP_MS="50", PENSTOCK_API_KEEP_ALIVE_S="0.1") as house:
        reader = create(house, "silence", max_tokens=40, output_config={"effort": "max"})
        found = reader.whole()
        before = reader.data.partition(b"content_block_start")[0]
        assert before.count(b"event: ping") >= 4 and reader.ids == list(range(len(found)))


def test_a_message_of_a_newer_version_is_left_to_it(empty_house: House) -> None:
    house = empty_house
    house.start_all("workers")
    made = json.loads(house.post("/v1/messages", {"model": "sim", "max_tokens": 2, "messages": ASKED})[2])
    key = f"penstock:{{0}}:job:{made['id'].removeprefix('msg_')}"
    with Redis.from_url(house.redis_url) as store:
        body = msgspec.msgpack.decode(store.hget(key, "body"))
        assert body["v"] == 7, "older versions would show it as a chat"
        store.hset(key, "body", msgspec.msgpack.encode(body | {"v": 99}))
    status, data = house.get(f"/v1/messages/{made['id']}")
    assert (status, json.loads(data)["error"]["code"]) == (503, "newer_version")


class River(BaseModel):
    name: str


def test_an_answer_of_the_real_model_is_parsed(real_house: House) -> None:
    house = real_house
    house.start_all("workers")
    client = client_of(house, timeout=120)
    asked: Any = {"model": "small", "max_tokens": 200, "messages": [{"role": "user", "content": "Name a river."}]}
    assert isinstance(client.messages.parse(output_format=River, **asked).parsed_output, River)
    counted = client.messages.count_tokens(model="small", messages=asked["messages"], system="Be brief.")
    message = client.messages.create(**asked | {"max_tokens": 4, "system": "Be brief."})
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
