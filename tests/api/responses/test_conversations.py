"""Conversations with the official client: create, label, list, delete; turns, refusals, quotas, bounds, lifetime."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from house import House, eventually, key_rows, module_house
from openai import BadRequestError, InternalServerError, NotFoundError, OpenAI
from redis import Redis

pytestmark = pytest.mark.slow

LONG = 4000
"""Tokens of a response that is still running when it is cancelled."""


house = module_house(
    "workers", settings=key_rows(red=""), PENSTOCK_REDIS_PARTITIONS="4", PENSTOCK_API_BODY_LIMIT="20000"
)
"""Four partitions."""


@pytest.fixture
def client(house: House) -> OpenAI:
    return house.closes(OpenAI(base_url=f"{house.url}/v1", api_key="red", max_retries=0))


def raw(house: House, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    sent = {"Authorization": "Bearer red"} | {name.replace("_", "-"): value for name, value in headers.items()}
    status, _, data = house.request(method, path, body, sent)
    return status, json.loads(data)


def ask(client: OpenAI, conversation: str, text: str, **fields: Any) -> Any:
    asked: Any = {"model": "sim", "max_output_tokens": 3} | fields
    return client.responses.create(input=text, conversation=conversation, **asked)


def texts(client: OpenAI, conversation: str) -> list[str]:
    """Every text of a conversation, oldest first, over all pages."""
    found = client.conversations.items.list(conversation, order="asc", limit=2)
    return [item.content[0].text for item in found]  # type: ignore[union-attr]


# --- the conversation ------------------------------------------------------------------------------------------------


def test_a_conversation_is_created_labelled_and_deleted(house: House, client: OpenAI) -> None:
    made = client.conversations.create(metadata={"topic": "rivers"})
    assert made.id.startswith("conv_") and made.object == "conversation" and made.metadata == {"topic": "rivers"}
    assert isinstance(raw(house, "GET", f"/v1/conversations/{made.id}")[1]["created_at"], int)
    assert client.conversations.update(made.id, metadata={"topic": "seas"}).metadata == {"topic": "seas"}
    assert client.conversations.retrieve(made.id).metadata == {"topic": "seas"}
    assert client.conversations.update(made.id, metadata=None).metadata == {}
    gone = client.conversations.delete(made.id)
    assert (gone.id, gone.object, gone.deleted) == (made.id, "conversation.deleted", True)
    for call in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(NotFoundError, match="no such conversation"):
            call(made.id)
    with pytest.raises(NotFoundError, match="no such conversation"):
        ask(client, made.id, "hi")


def test_items_are_added_listed_shown_and_deleted(client: OpenAI) -> None:
    first: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "one"}]
    made = client.conversations.create(items=first)
    said = [{"type": "output_text", "text": "two", "annotations": []}]
    more: Any = [
        {"type": "message", "role": "assistant", "content": said},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "three"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
    ]
    added = client.conversations.items.create(made.id, items=more)
    assert [item.type for item in added.data] == ["message", "function_call", "function_call_output"]
    assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[-1].id, False)
    page = client.conversations.items.list(made.id, limit=2)
    assert [item.id for item in page.data] == [added.data[2].id, added.data[1].id] and page.has_more
    every = list(client.conversations.items.list(made.id, limit=2, order="asc"))
    assert [getattr(item, "role", None) for item in every] == ["developer", "user", "assistant", None, None]
    assert len({item.id for item in every}) == 5
    shown = client.conversations.items.retrieve(every[1].id, conversation_id=made.id)
    assert shown == every[1]
    assert client.conversations.items.delete(every[1].id, conversation_id=made.id).id == made.id
    assert [item.id for item in client.conversations.items.list(made.id, order="asc")] == [
        item.id for item in every if item != every[1]
    ]
    with pytest.raises(NotFoundError, match="no such item"):
        client.conversations.items.retrieve(every[1].id, conversation_id=made.id)
    for order, rest in (("asc", every[2:]), ("desc", every[:1])):
        page = client.conversations.items.list(made.id, after=every[1].id, order=order)  # type: ignore[arg-type]
        assert [item.id for item in page.data] == [item.id for item in rest]
    other = client.conversations.create(items=[{"role": "user", "content": "x"}])
    with pytest.raises(BadRequestError, match="after names no item"):
        client.conversations.items.list(other.id, after=every[1].id)


def test_items_are_added_once_with_an_idempotency_key(house: House, client: OpenAI) -> None:
    """Others with the same key are refused: an answer 200 would say that they were added."""
    made, once = client.conversations.create(), {"role": "user", "content": "once"}
    path, body = f"/v1/conversations/{made.id}/items", {"items": [once]}
    answers = [raw(house, "POST", path, body, Idempotency_Key="k") for _ in range(2)]
    assert answers[0] == answers[1] and answers[0][0] == 200
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    for others in ([once | {"content": "other"}], [once, once], [call]):
        status, answer = raw(house, "POST", path, {"items": others}, Idempotency_Key="k")
        assert (status, answer["error"]["code"]) == (422, "idempotency_key_reused")
    raw(house, "POST", path, body)
    assert texts(client, made.id) == ["once", "once"]


def test_fields_that_are_ignored_are_named(house: House, client: OpenAI) -> None:
    """Those of a call are kept; a number that nothing here could write later is refused."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [call | {"kept": 1}, {"role": "user", "content": "a", "unread": 1}, {"type": "web_search_call", "id": "ws"}]
    made = client.conversations.with_raw_response.create(extra_body={"items": items, "queue": {}})
    assert made.headers["x-ignored-fields"] == "queue, items[].unread, items[].web_search_call"
    updated = client.conversations.with_raw_response.update(made.parse().id, metadata={}, extra_body={"unread": 1})
    assert updated.headers["x-ignored-fields"] == "unread"
    path = f"/v1/conversations/{made.parse().id}/items"
    status, answer = raw(house, "POST", path, {"items": [call | {"kept": 10**40}]})
    assert (status, answer["error"]["param"]) == (400, "items[0].kept")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"items": [{"role": "user", "content": "x"}] * 21}, "at most 20"),
        ({"items": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        ({"items": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "content[0].image_url"),
        ({"items": [{"role": "user", "content": "x" * 19_000}, {"role": "user", "content": "y" * 900}]}, "20000 bytes"),
    ],
)
def test_items_that_are_refused(house: House, client: OpenAI, body: Any, words: str) -> None:
    made = client.conversations.create()
    for path in (f"/v1/conversations/{made.id}/items", "/v1/conversations"):
        status, answer = raw(house, "POST", path, body)
        assert status == 400 and words in answer["error"]["message"], answer
    assert raw(house, "POST", f"/v1/conversations/{made.id}/items", {"items": []})[0] == 400
    assert texts(client, made.id) == []


# --- turns -----------------------------------------------------------------------------------------------------------


def test_responses_read_and_extend_their_conversation(client: OpenAI) -> None:
    """The sim's text depends on the whole conversation: turns equal the items sent at once."""
    made = client.conversations.create(items=[{"role": "user", "content": "zero"}])
    first = ask(client, made.id, "one", instructions="be A")
    assert first.conversation is not None and first.conversation.id == made.id
    assert client.responses.retrieve(first.id).conversation == first.conversation
    second = ask(client, made.id, "two", background=True)
    eventually(lambda: client.responses.retrieve(second.id).status == "incomplete")
    *_, last = ask(client, made.id, "three", stream=True)
    third = last.response
    answers = [first.output_text, client.responses.retrieve(second.id).output_text, third.output_text]
    spoken = ["zero", "one", answers[0], "two", answers[1], "three", answers[2]]
    assert texts(client, made.id) == spoken
    roles = ["user", "user", "assistant", "user", "assistant", "user"]
    turns: Any = [{"role": role, "content": text} for role, text in zip(roles, spoken, strict=False)]
    assert client.responses.create(model="sim", input=turns, max_output_tokens=3).output_text == third.output_text
    counted = client.responses.input_tokens.count(model="sim", input="four", conversation=made.id)
    fourth = ask(client, made.id, "four")
    assert counted.input_tokens == fourth.usage.input_tokens
    items = list(client.conversations.items.list(made.id, order="asc"))
    assert items[2].id == first.output[0].id, "an item has the same id in the response and in the conversation"
    assert [item.id for item in client.responses.input_items.list(fourth.id)] == [items[7].id]


def test_a_call_and_its_output_are_turns(client: OpenAI) -> None:
    made = client.conversations.create()
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True}]
    called = ask(client, made.id, "call", tools=tools, tool_choice="required", max_output_tokens=200)
    (call,) = [item for item in called.output if item.type == "function_call"]
    back: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
    answered = ask(client, made.id, back, tools=tools, tool_choice="none")
    chained = client.responses.create(
        model="sim", input=back, previous_response_id=called.id, tools=tools, tool_choice="none", max_output_tokens=3
    )
    assert answered.output_text == chained.output_text and answered.usage == chained.usage
    kinds = [item.type for item in client.conversations.items.list(made.id, order="asc")]
    assert kinds == ["message", *[item.type for item in called.output], "function_call_output", "message"]


def test_a_response_that_ends_without_an_answer_adds_nothing(client: OpenAI) -> None:
    """And while it runs, no other turn begins, and no items are added."""
    made = client.conversations.create(items=[{"role": "user", "content": "zero"}])
    running = ask(client, made.id, "never", background=True, max_output_tokens=LONG)
    for call in (
        lambda: ask(client, made.id, "too soon"),
        lambda: client.conversations.items.create(made.id, items=[{"role": "user", "content": "too soon"}]),
    ):
        with pytest.raises(BadRequestError, match="has not ended") as refused:
            call()
        assert (refused.value.code, refused.value.param) == ("conversation_locked", "conversation")
    assert client.conversations.update(made.id, metadata={"a": "b"}).metadata == {"a": "b"}
    assert texts(client, made.id) == ["zero"]
    client.responses.cancel(running.id)
    answer = ask(client, made.id, "now")
    assert texts(client, made.id) == ["zero", "now", answer.output_text]


def test_of_turns_that_begin_at_once_one_does(client: OpenAI) -> None:
    made = client.conversations.create()

    def turn(number: int) -> str:
        try:
            return str(ask(client, made.id, f"turn {number}", background=True, max_output_tokens=200).id)
        except BadRequestError as error:
            return str(error.code)

    with ThreadPoolExecutor(8) as pool:
        *others, begun = sorted(pool.map(turn, range(8)))
    assert others == ["conversation_locked"] * 7 and begun.startswith("resp_")
    eventually(lambda: client.responses.retrieve(begun).status == "incomplete")
    assert len(texts(client, made.id)) == 2


def test_a_retry_gets_its_response_and_begins_no_other_turn(house: House, client: OpenAI) -> None:
    made = client.conversations.create()
    body = {"model": "sim", "input": "once", "conversation": {"id": made.id}, "max_output_tokens": 3}
    first = raw(house, "POST", "/v1/responses", body, Idempotency_Key="turn")
    assert first[0] == 200 and raw(house, "POST", "/v1/responses", body, Idempotency_Key="turn") == first
    assert texts(client, made.id) == ["once", first[1]["output"][0]["content"][0]["text"]]
    client.conversations.delete(made.id)
    assert raw(house, "POST", "/v1/responses", body, Idempotency_Key="turn") == first
    assert raw(house, "POST", "/v1/responses", body, Idempotency_Key="another")[0] == 404


def test_a_deleted_or_unstored_response_stays_in_its_conversation(house: House, client: OpenAI) -> None:
    made = client.conversations.create()
    kept = ask(client, made.id, "one")
    client.responses.delete(kept.id)
    unstored = ask(client, made.id, "two", store=False)
    with Redis.from_url(house.redis_url) as store:
        (job,) = store.keys(f"penstock:*:job:{unstored.id.removeprefix('resp_')}")
        eventually(lambda: 0 < store.ttl(job) <= 60)
        store.delete(job)
    assert texts(client, made.id) == ["one", kept.output_text, "two", unstored.output_text]


def test_a_conversation_and_a_previous_response_exclude_each_other(client: OpenAI) -> None:
    made, other = client.conversations.create(), client.responses.create(model="sim", input="a", max_output_tokens=1)
    with pytest.raises(BadRequestError, match="not both") as refused:
        ask(client, made.id, "b", previous_response_id=other.id)
    assert refused.value.code == "mutually_exclusive_parameters"
    turn = ask(client, made.id, "c")
    assert client.responses.create(model="sim", input="d", previous_response_id=turn.id).conversation is None


def test_a_long_conversation_is_refused_with_what_to_do(client: OpenAI) -> None:
    made = client.conversations.create()
    with pytest.raises(BadRequestError, match="begin another") as refused:
        for _ in range(10):
            ask(client, made.id, "x" * 5000)
    assert refused.value.param == "conversation"
    items = list(client.conversations.items.list(made.id, order="asc"))
    for item in items[:2]:
        client.conversations.items.delete(item.id, conversation_id=made.id)
    assert ask(client, made.id, "x" * 100).status == "incomplete"


# --- what cannot be read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"{", b'["msg_1", {}]', b'["x", {"type": "song"}]'], ids=bytes.decode)
def test_a_malformed_conversation_is_refused_and_can_be_deleted(house: House, client: OpenAI, data: bytes) -> None:
    """Also one with an item of which no engine could make anything."""
    made = client.conversations.create(items=[{"role": "user", "content": "x"}])
    with Redis.from_url(house.redis_url) as store:
        (key,) = store.keys(f"penstock:*:conversation:{made.id}")
        store.hset(key, "i1", data)
    with pytest.raises(InternalServerError, match="Delete it") as refused:
        ask(client, made.id, "more")
    assert refused.value.code == "malformed_conversation"
    assert client.conversations.delete(made.id).deleted


@pytest.mark.parametrize("body", [b"\xc1", b"", b"\x80"])
def test_a_turn_whose_job_is_corrupt_is_no_newer_versions(house: House, client: OpenAI, body: bytes) -> None:
    """Asking again does not help, and the error says what does."""
    made = client.conversations.create(items=[{"role": "user", "content": "x"}])
    turn = ask(client, made.id, "one")
    with Redis.from_url(house.redis_url) as store:
        (key,) = store.keys(f"penstock:*:job:{turn.id.removeprefix('resp_')}")
        store.hset(key, "body", body)
    for call in (client.conversations.retrieve, client.conversations.items.list, lambda id_: ask(client, id_, "two")):
        with pytest.raises(InternalServerError, match="Delete it") as refused:
            call(made.id)
        assert refused.value.code == "malformed_conversation"
    with pytest.raises(InternalServerError) as refused:
        client.responses.retrieve(turn.id)
    assert refused.value.code == "malformed_job"
    assert client.conversations.delete(made.id).deleted


def test_a_full_store_shows_a_turn_that_nobody_has_read(house: House, client: OpenAI) -> None:
    """And keeps it: a response whose turn cannot be added yet is not deleted."""
    made = client.conversations.create()
    turn = ask(client, made.id, "one")
    with Redis.from_url(house.redis_url) as store:
        try:
            store.config_set("maxmemory", 1 << 20)
            for _ in range(2):
                assert texts(client, made.id) == ["one", turn.output_text]
            shown = client.conversations.items.list(made.id, order="asc").data[1]
            assert client.conversations.items.retrieve(shown.id or "", conversation_id=made.id) == shown
            assert client.conversations.retrieve(made.id).id == made.id
            with pytest.raises(InternalServerError) as refused:
                client.responses.delete(turn.id)
            assert refused.value.status_code == 503
        finally:
            store.config_set("maxmemory", 0)
    eventually(lambda: client.responses.delete(turn.id) is None, Exception)
    assert texts(client, made.id) == ["one", turn.output_text]
    assert client.conversations.items.list(made.id, order="asc").data[1] == shown
