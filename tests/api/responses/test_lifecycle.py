"""The Responses API with the official client: create, retrieve, cancel, delete, input items, chains, refusals."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from house import House, eventually, key_rows, module_house, serving
from openai import BadRequestError, NotFoundError, OpenAI
from redis import Redis

from api.conversations import MAX_REFERENCED

pytestmark = pytest.mark.slow


LONG = 4000
"""Tokens of a response that is still running when it is cancelled."""


house = module_house("workers", settings=key_rows(red="", blue=""), PENSTOCK_REDIS_PARTITIONS="4")
"""Four partitions, two tenants."""


@pytest.fixture
def client(house: House) -> OpenAI:
    return client_of(house, "red")


def client_of(house: House, key: str) -> OpenAI:
    return house.closes(OpenAI(base_url=f"{house.url}/v1", api_key=key, max_retries=0))


def raw(house: House, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
    status, headers, data = house.request(method, path, body, {"Authorization": "Bearer red"})
    return status, headers, json.loads(data)


def background(client: OpenAI, **fields: Any) -> Any:
    return client.responses.create(model="sim", input="wait", background=True, **fields)


def ended(client: OpenAI, response_id: str) -> Any:
    """The response once it is in a final state."""
    final = ("completed", "failed", "cancelled", "incomplete")
    return eventually(lambda: (found := client.responses.retrieve(response_id)).status in final and found)


def test_a_response_is_created_and_retrieved(client: OpenAI) -> None:
    made = client.responses.create(model="sim", input="hello", instructions="be short", metadata={"a": "b"})
    assert (made.status, made.instructions) == ("completed", "be short")
    assert (made.metadata, made.background) == ({"a": "b"}, False)
    assert made.output_text and made.usage is not None and made.usage.output_tokens == 128
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()


def test_a_response_in_the_background_is_a_job(house: House, client: OpenAI) -> None:
    made = background(
        client, metadata={"mine": "yes"}, max_output_tokens=4, extra_body={"queue": {"priority": "batch"}}
    )
    assert (made.status, made.output, made.background) == ("queued", [], True)
    whole = ended(client, made.id)
    job_id = made.id.removeprefix("resp_")
    job = raw(house, "GET", f"/v1/jobs/{job_id}?include=input")[2]
    assert (job["status"], job["priority"], job["metadata"]) == ("completed", "batch", {"mine": "yes"})
    assert job["result"] == raw(house, "GET", f"/v1/responses/{made.id}")[2]
    assert job["input"]["endpoint"] == "/v1/responses" and job["input"]["max_output_tokens"] == 4
    assert job["input"]["background"] is True
    assert whole.service_tier == "flex"


def test_cancel_is_idempotent_and_returns_the_final_object(client: OpenAI) -> None:
    made = background(client, max_output_tokens=LONG)
    eventually(lambda: client.responses.retrieve(made.id).status == "in_progress")
    first = client.responses.cancel(made.id)
    assert first.status == "cancelled" and first.error is None
    assert client.responses.cancel(made.id).to_dict() == first.to_dict()
    done = ended(client, background(client, max_output_tokens=1).id)
    assert client.responses.cancel(done.id).to_dict() == done.to_dict()
    made = client.responses.create(model="sim", input="hello", max_output_tokens=1)
    with pytest.raises(BadRequestError, match="background"):
        client.responses.cancel(made.id)


def test_a_deleted_response_is_gone(house: House, client: OpenAI) -> None:
    made = client.responses.create(model="sim", input="hello", max_output_tokens=1)
    assert raw(house, "DELETE", f"/v1/responses/{made.id}")[2] == {"id": made.id, "object": "response", "deleted": True}
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(NotFoundError, match="no such response"):
            call(made.id)
    assert raw(house, "GET", f"/v1/jobs/{made.id.removeprefix('resp_')}")[0] == 410
    running = background(client, max_output_tokens=LONG)
    client.responses.delete(running.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(running.id)


def test_a_response_that_is_not_stored_is_not_retrievable(client: OpenAI) -> None:
    made = client.responses.create(model="sim", input="hello", store=False, max_output_tokens=1)
    assert made.store is False and made.output_text
    for stream in (False, True):
        with pytest.raises(NotFoundError):
            client.responses.retrieve(made.id, stream=stream)
    with pytest.raises(BadRequestError, match="unknown, deleted, not stored"):
        client.responses.create(model="sim", input="more", previous_response_id=made.id)
    with pytest.raises(BadRequestError, match="store must be true with background"):
        background(client, store=False)


def test_what_is_no_response_is_not_found(house: House, client: OpenAI) -> None:
    """An id of another form, one of nothing, and that of a chat's job."""
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    chat = "resp_" + raw(house, "POST", "/v1/chat/completions", body)[1]["x-job-id"]
    for name in ("resp_x", "chatcmpl-1", "resp_job_ff" + "0" * 30, "resp_job_00" + "0" * 30, chat):
        with pytest.raises(NotFoundError, match="no such response"):
            client.responses.retrieve(name)


# --- conversations ---------------------------------------------------------------------------------------------------


def test_a_response_continues_another_without_its_instructions(house: House, client: OpenAI) -> None:
    """The sim's text depends on the whole conversation: a chain equals the conversation sent at once."""
    first = client.responses.create(model="sim", input="one", instructions="be A", max_output_tokens=3)
    second = client.responses.create(
        model="sim", input="two", instructions="be B", previous_response_id=first.id, max_output_tokens=3
    )
    assert second.previous_response_id == first.id
    whole: Any = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "two"},
    ]
    same = client.responses.create(model="sim", input=whole, instructions="be B", max_output_tokens=3)
    assert second.output_text == same.output_text != first.output_text
    assert second.usage == same.usage
    third = client.responses.create(model="sim", input="three", previous_response_id=second.id, max_output_tokens=3)
    turns: Any = [*whole, {"role": "assistant", "content": second.output_text}, {"role": "user", "content": "three"}]
    assert third.output_text == client.responses.create(model="sim", input=turns, max_output_tokens=3).output_text
    client.responses.delete(second.id)
    assert client.responses.retrieve(third.id).previous_response_id == second.id
    with pytest.raises(BadRequestError, match="unknown, deleted, not stored") as refused:
        client.responses.create(model="sim", input="again", previous_response_id=second.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_response_without_an_answer_is_not_continued(client: OpenAI) -> None:
    made = background(client, max_output_tokens=LONG)
    with pytest.raises(BadRequestError, match="not finished"):
        client.responses.create(model="sim", input="more", previous_response_id=made.id)
    client.responses.cancel(made.id)
    with pytest.raises(BadRequestError, match="cancelled"):
        client.responses.create(model="sim", input="more", previous_response_id=made.id)


def test_what_a_request_refers_to_counts_each_time(tmp_path: Path) -> None:
    """An item that is named often would make a small body a job of any size; so would the texts and calls of a chain,
    which count like those that are sent."""
    with serving(tmp_path, "workers", PENSTOCK_API_BODY_LIMIT="6000") as house:
        responses, brief = client_of(house, "none").responses, {"model": "sim", "max_output_tokens": 1}
        spoken = responses.create(model="sim", input="begin")
        with pytest.raises(BadRequestError, match="begin another"):
            for _ in range(20):
                spoken = responses.create(model="sim", input="more", previous_response_id=spoken.id)
        first = responses.create(input=[{"role": "user", "content": "x" * 1500}], **brief)  # type: ignore[call-overload]
        item: Any = {"type": "item_reference", "id": responses.input_items.list(first.id).data[0].id}
        assert responses.create(input=[item] * 3, **brief).status == "incomplete"  # type: ignore[call-overload]
        with pytest.raises(BadRequestError, match=r"6000 bytes \(\[api\] body_limit\). Refer to fewer") as refused:
            responses.create(input=[item] * 4, **brief)  # type: ignore[call-overload]
        assert refused.value.param == "input"
        calls: Any = [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": "x" * 1500})},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
        ]
        last = responses.create(**brief, input=calls)  # type: ignore[call-overload]
        with pytest.raises(BadRequestError, match="begin another") as refused:
            for _ in range(5):
                last = responses.create(**brief, input=calls, previous_response_id=last.id)  # type: ignore[call-overload]
        assert refused.value.param == "previous_response_id" and last.previous_response_id is not None


def test_input_items_are_listed_in_pages(client: OpenAI) -> None:
    first = client.responses.create(model="sim", input="zero", max_output_tokens=1)
    items: Any = [{"role": "user", "content": f"turn {number}"} for number in range(5)]
    made = client.responses.create(
        model="sim", input=items, instructions="be A", previous_response_id=first.id, max_output_tokens=1
    )
    texts = [item.content[0].text for item in client.responses.input_items.list(made.id, order="asc", limit=2)]  # type: ignore[union-attr]
    assert texts == [f"turn {number}" for number in range(5)]
    newest = client.responses.input_items.list(made.id, limit=2)
    assert [item.content[0].text for item in newest.data] == ["turn 4", "turn 3"]  # type: ignore[union-attr]
    assert newest.has_more and newest.last_id == newest.data[-1].id
    with pytest.raises(BadRequestError, match="after names no input item"):
        client.responses.input_items.list(made.id, after="msg_1")


def test_an_item_is_referred_to(client: OpenAI) -> None:
    first = client.responses.create(model="sim", input="one", max_output_tokens=3)
    asked = client.responses.input_items.list(first.id).data[0]
    references: Any = [{"type": "item_reference", "id": asked.id}, {"id": first.output[0].id}]
    turns: Any = [{"role": "user", "content": "one"}, {"role": "assistant", "content": first.output_text}]
    again = client.responses.create(model="sim", input=references, max_output_tokens=3)
    assert again.output_text == client.responses.create(model="sim", input=turns, max_output_tokens=3).output_text


def store_calls(house: House) -> int:
    with Redis.from_url(house.redis_url) as store:
        return sum(each["calls"] for name, each in store.info("commandstats").items() if "fcall" in name)


def references(*item_ids: str) -> Any:
    return [{"type": "item_reference", "id": each} for each in item_ids]


def test_a_response_is_read_once_however_many_of_its_items_are_referred_to(house: House, client: OpenAI) -> None:
    """Its input and its answer, in any order."""
    items: Any = [{"role": "user", "content": f"turn {number}"} for number in range(800)]
    first = client.responses.create(model="sim", input=items, max_output_tokens=3)
    oldest = client.responses.input_items.list(first.id, order="asc", limit=1).data[0].id
    assert oldest is not None
    named = [f"{oldest.removesuffix('0')}{number}" for number in reversed(range(800))]
    before = store_calls(house)
    asked = references(*named, first.output[0].id)
    again = client.responses.create(model="sim", input=asked, max_output_tokens=3)
    assert store_calls(house) - before < 400
    turns: Any = [*reversed(items), {"role": "assistant", "content": first.output_text}]
    assert again.output_text == client.responses.create(model="sim", input=turns, max_output_tokens=3).output_text


def test_items_of_a_bounded_number_of_responses_are_read(house: House) -> None:
    unknown = [f"msg_job_{number:032x}_out0" for number in range(MAX_REFERENCED + 1)]
    for named, said in ((unknown, f"at most {MAX_REFERENCED}"), (unknown[1:], "no stored response")):
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            status, _, answer = raw(house, "POST", path, {"model": "sim", "input": references(*named)})
            assert (status, answer["error"]["param"]) == (400, "input") and said in answer["error"]["message"]


def test_nothing_is_read_for_a_client_that_has_left(house: House, client: OpenAI) -> None:
    made = [client.responses.create(model="sim", input="x", max_output_tokens=1) for _ in range(MAX_REFERENCED)]
    body = json.dumps({"model": "sim", "input": references(*[each.output[0].id for each in made])}).encode()
    head = "POST /v1/responses HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer red\r\nContent-Type: application/json\r\n"
    before = store_calls(house)
    with socket.create_connection(("127.0.0.1", house.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    eventually(lambda: '"status":499' in house.log("api"))
    assert store_calls(house) - before < MAX_REFERENCED


def test_input_tokens_are_counted_without_a_step_of_the_engine(house: House) -> None:
    """By the tokenizer, once the API has the model's card; with tools, by the engine."""
    eventually(lambda: "capabilities" in raw(house, "GET", "/v1/models/sim")[2])
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}
    for tools, generated in (([], 0), ([tool], 1)):
        asked = {"model": "sim", "input": "are these counted?", "tools": tools}
        status, headers, body = raw(house, "POST", "/v1/responses/input_tokens", asked)
        assert status == 200 and body["input_tokens"] > 1
        job = raw(house, "GET", f"/v1/jobs/{headers['x-job-id']}")[2]
        assert (job["status"], job["usage"]["completion_tokens"]) == ("completed", generated)


# --- input and refusals ----------------------------------------------------------------------------------------------


def test_a_repeated_request_outlives_what_it_refers_to(client: OpenAI) -> None:
    """The first one was accepted: its retry gets that response. Without a response, it is refused."""
    first = client.responses.create(model="sim", input="once", max_output_tokens=1)
    asked: Any = {"model": "sim", "input": "more", "max_output_tokens": 1, "previous_response_id": first.id}
    made = client.responses.create(**asked, extra_headers={"Idempotency-Key": "k2"})
    client.responses.delete(first.id)
    again = client.responses.create(**asked, extra_headers={"Idempotency-Key": "k2"})
    assert (again.id, again.previous_response_id) == (made.id, first.id) and again.output_text == made.output_text
    for headers in ({}, {"Idempotency-Key": "k3"}):
        with pytest.raises(BadRequestError) as refused:
            client.responses.create(**asked, extra_headers=headers)
        assert refused.value.param == "previous_response_id"


def test_a_response_in_the_background_that_has_ended_is_shown_to_who_asks_again(house: House, client: OpenAI) -> None:
    asked = {"model": "sim", "input": "again", "background": True, "max_output_tokens": 3}
    headers = {"Authorization": "Bearer red", "Idempotency-Key": "ended"}
    _, _, data = house.request("POST", "/v1/responses", asked, headers)
    shown = ended(client, json.loads(data)["id"])
    status, _, data = house.request("POST", "/v1/responses", asked, headers)
    assert status == 200 and json.loads(data) == shown.to_dict()


def test_a_failed_response(house: House, client: OpenAI) -> None:
    """The sim refuses what does not fit into its context: while the client waits with a status, later as an error."""
    with pytest.raises(BadRequestError, match="context"):
        client.responses.create(model="sim", input="hello", max_output_tokens=100_000)
    found = ended(client, background(client, max_output_tokens=100_000).id)
    assert found.status == "failed" and found.error.code == "invalid_prompt" and "context" in found.error.message
    assert found.output == []
