"""What clients get of an upstream server's reply beside its text: endings, refusals, and fields that nobody here reads.

In every form: a chat whole and streamed, a job with its events, a batch's line, a response and its later turns.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process
from fake_upstream import ANSWER, MODEL, FakeUpstream, Fault, serving
from sim_worker import Running, has_deltas, recorder, until
from upstream_bench import FAST
from upstream_worker import StartUpstream, start_upstream

from penstock.content import ContentSettings, marker, rules_of
from penstock.extras import joined_fields
from streaming.fleet.settings import ModelSettings
from streaming.redis.client import RedisClient
from workers.engines.upstream.settings import UpstreamSettings
from workers.record import Recorder

__all__ = ["recorder", "start_upstream"]  # fixtures

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


class Scripted(FakeUpstream):
    """Replies with the same bytes each time."""

    def __init__(self, kind: str = "other") -> None:
        super().__init__(kind)
        self.script: list[bytes] = []

    async def _events(self, path: str, body: dict[str, Any], fault: Fault) -> AsyncIterator[bytes]:
        for data in self.script:
            yield data
            await asyncio.sleep(0)

    def says(self, *choices: dict[str, Any], **chunk: Any) -> None:
        self.script = [event({"choices": [{"index": 0, **choice}], **chunk}) for choice in choices]
        self.script.append(b"data: [DONE]\n\n")


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


class Place:
    def __init__(self, api: LocalApi, start: StartUpstream, upstream: Scripted) -> None:
        self.api, self._start, self.upstream = api, start, upstream

    async def work(self, model: str, **more: Any) -> None:
        """Start a worker of this model, whose card the API knows then."""
        settings = UpstreamSettings(**FAST, urls=(self.upstream.url,), name=MODEL, **more)  # type: ignore[arg-type]
        running, services = await self._start(settings, model=model), self.api.services
        self.worker = running.worker
        services.models = {**services.models, model: ModelSettings(engine="upstream")}
        await services.fleet.publish_card(running.worker._card)
        services.cards = await services.fleet.cards()

    async def whole(self, **more: Any) -> Any:
        reply = await self.api.post("/v1/chat/completions", {"model": "sim", "messages": HELLO} | more)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def chunks(self, path: str = "/v1/chat/completions", **more: Any) -> list[dict[str, Any]]:
        asked = {"model": "sim", "stream": True} | ({} if "input" in more else {"messages": HELLO}) | more
        text = (await self.api.post(path, asked)).text
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]

    async def job(self, **more: Any) -> tuple[Any, str]:
        made = (await self.api.post("/v1/jobs", {"model": "sim", "messages": HELLO} | more)).json()
        ended = (await self.api.client.get(f"/v1/jobs/{made['id']}?wait=20")).json()
        return ended, (await self.api.client.get(f"/v1/jobs/{made['id']}/events")).text


@pytest.fixture
async def place(wire: RedisClient, start_upstream: StartUpstream) -> AsyncIterator[Place]:
    upstream = Scripted()
    async with serving(upstream), api_in_process(RedisClient.open(wire.settings)) as api:
        place = Place(api, start_upstream, upstream)
        await place.work("sim")
        yield place


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"}])
async def test_a_filtered_answer_keeps_its_text(place: Place, more: dict[str, Any]) -> None:
    """And its finish reason, in every form."""
    place.upstream.says({"delta": {"content": "So far"}}, {"delta": {}, "finish_reason": "content_filter"})
    (choice,) = (await place.whole(**more))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("So far", "content_filter")
    streamed = await place.chunks(**more)
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in streamed) == "So far"
    assert streamed[-1]["choices"][0]["finish_reason"] == "content_filter"
    job, _ = await place.job(**more)
    assert job["status"] == "completed" and job["result"]["choices"][0]["finish_reason"] == "content_filter"
    response = (await place.api.post("/v1/responses", {"model": "sim", "input": "hi"})).json()
    last = (await place.chunks("/v1/responses", input="hi"))[-1]
    assert last["type"] == "response.incomplete"
    for each in (response, last["response"]):
        assert (each["status"], each["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})


FALCON = ["The pro", "ject fal", "con is red"]
"""A text in chunks."""


async def everything(place: Place, **more: Any) -> list[tuple[Any, str]]:
    """The answer in every form: its choice or output, and how it ended."""
    whole = await place.whole(**more)
    found = [(each["message"], each["finish_reason"]) for each in whole["choices"]]
    streamed = [each["choices"][0] for each in await place.chunks(**more)]
    for index in {each["index"] for each in streamed}:
        message, finish = dict[str, Any](), ""
        for each in (each for each in streamed if each["index"] == index):
            message, finish = joined_fields(message, each["delta"]), each["finish_reason"] or finish
        found.append((message, finish))
    job, events = await place.job(**more)
    assert "falcon" not in events
    found += [(each["message"], each["finish_reason"]) for each in job["result"]["choices"]]
    return found


@pytest.mark.parametrize(("action", "shown"), [("block", "The "), ("redact", f"The {marker('r')} is red")])
async def test_content_rules_hold_in_every_form(place: Place, action: Any, shown: str) -> None:
    """Text, reasoning and arguments of a tool, of one choice and of several, whole, streamed and as a job; a completion
    and a response. A blocked one ends with content_filter; the counts are those of what came until then."""
    rules = {"r": ContentSettings(deny=("project falcon",), action=action, default=True)}
    place.worker._content = rules_of(rules, {}, ["output"])
    finish = "content_filter" if action == "block" else "stop"
    place.upstream.says(*[{"delta": {"content": each}} for each in FALCON], {"delta": {}, "finish_reason": "stop"})
    for more in ({}, {"n": 2}):
        for message, ended in await everything(place, **more):
            assert (message["content"], ended) == (shown, finish)
    usage = (await place.whole())["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > usage["prompt_tokens"]
    reply = (await place.api.post("/v1/responses", {"model": "sim", "input": "hi"})).json()
    assert reply["output"][0]["content"][0]["text"] == shown
    assert reply["status"] == ("incomplete" if action == "block" else "completed")
    for field in ("reasoning_content", "refusal"):  # not told apart, as the model's settings say
        place.upstream.says(*[{"delta": {field: each}} for each in FALCON], {"delta": {}, "finish_reason": "stop"})
        for message, ended in await everything(place):
            assert (message[field], ended) == (shown, finish)
    reply = (await place.api.post("/v1/responses", {"model": "sim", "input": "hi"})).json()
    assert reply["output"][0]["content"][0]["refusal"] == shown
    arguments = ['{"of": "a pro', "ject falcon", ', or none"}']
    place.upstream.says(
        {"delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "get_time", "arguments": ""}}]}},
        *[{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": each}}]}} for each in arguments],
        {"delta": {}, "finish_reason": "tool_calls"},
    )
    said = '{"of": "a ' + ("" if action == "block" else f'{marker("r")}, or none"}}')
    for message, ended in await everything(place, tools=[TOOL]):
        assert message["tool_calls"][0]["function"]["arguments"] == said
        assert ended == ("content_filter" if action == "block" else "tool_calls")
    await place.work("thinker", reasoning=True)
    place.worker._content = rules_of(rules, {}, ["output"])
    place.upstream.says(
        *[{"delta": {"reasoning_content": each}} for each in FALCON],
        {"delta": {"content": "So."}, "finish_reason": "stop"},
    )
    for message, ended in await everything(place, model="thinker"):
        assert (message["reasoning_content"], ended) == (shown, finish)
        assert (message.get("content") or "") == ("" if action == "block" else "So.")


HARMLESS = [
    b": comment\r\n\r\n", b"data:\n\n", b"event: ping\ndata: {\"type\": \"ping\"}\n\n", b"id: 3\nretry: 5\n\n",
    b"data: null\n\n", b"data: \"x\"\n\n", b"data: []\n\n", b"data: {}\n\n", b"data: ping\n\n",
    b"data: {\"choices\": null}\n\n",
    b"data: {\"type\": \"ping\"}\n\n", b"data: {\"choices\": [], \"usage\": null}\n\n", b"data: {\"error\": null}\n\n",
    b"data: {\"choices\": [{\"index\": 0, \"delta\": null}]}\n\n", b"data: {\"choices\": [{}]}\n\n",
    b"data: {\"choices\": [{\"index\": 0, \"delta\": {\"content\": []}, \"finish_reason\": \"\"}]}\n\n",
    b"data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 3, \"completion_tokens\": 1}}\n\n",
    b"data: {\"choices\": [], \"prompt_filter_results\": []}\n\n",
    b"data: {\"choices\": [], \"x\": NaN, \"y\": -Infinity}\n\n", b"data: {\"choices\": {}}\n\n",
    b"data: {\"choices\": [{\"index\": 1, \"delta\": {\"content\": \"another answer\"}}]}\n\n",
    b"data: {\"choices\": [{\"index\": 0, \"delta\": \"\", \"finish_reason\": false}]}\n\n",
    b"data: {\"choices\": [{\"index\": 0, \"delta\": {\"content\": {}, \"reasoning\": {}}}]}\n\n",
    b"data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 3.0, \"completion_tokens\": 1.0}}\n\n",
]  # fmt: skip


async def test_harmless_events_end_no_reply(place: Place) -> None:
    """In front of a stream, in it, and behind its finish reason; nor do strange line ends and marks."""
    parts = [{"type": "text", "text": "A"}, {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]
    texts = [event({"choices": [{"index": 0, "delta": {"content": each}}]}) for each in (parts, "B", ["C"])]
    last = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    noise = b"".join(HARMLESS)
    stream = (
        b"\xef\xbb\xbf" + noise + noise.join(texts).replace(b"\n", b"\r") + noise + last + noise + b"data: [DONE] \n"
    )
    for size in (7, 61, len(stream)):
        before = len(place.upstream.sent)
        place.upstream.script = [stream[at : at + size] for at in range(0, len(stream), size)]
        (choice,) = (await place.whole())["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("ABC", "stop")
        assert choice["message"]["reasoning_content"] == "hm" and len(place.upstream.sent) == before + 1


ODD_TEXTS = {
    b'{"content": "A\xff"}': "A\ufffd",
    b'{"content": "A\\ud83d"}': "A\ufffd",
    b'{"content": "A\\ud83d\\ude00", "x": NaN}': "A\U0001f600",
}


async def test_text_that_is_no_text_is_replaced(place: Place) -> None:
    """As browsers decode event streams."""
    for number, (delta, text) in enumerate(ODD_TEXTS.items(), 1):
        chunk = b'data: {"choices": [{"index": 0, "delta": ' + delta + b"}]}\n\n"
        place.upstream.script = [chunk, event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})]
        assert (await place.whole())["choices"][0]["message"]["content"] == text
        assert len(place.upstream.sent) == number


@pytest.mark.parametrize(("finish", "done", "more"), [
    ({}, b"", {}), ({}, b"data: [DONE]\n\n", {"temperature": 0}), ({"finish_reason": None}, b"", {"temperature": 0}),
])  # fmt: skip
async def test_a_server_that_gives_no_finish_reason_loses_no_text(
    place: Place, finish: dict[str, Any], done: bytes, more: dict[str, Any]
) -> None:
    place.upstream.script = [event({"choices": [{"index": 0, "delta": {"content": "All"}, **finish}]}), done]
    (choice,) = (await place.whole(**more))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("All", "stop")


async def test_a_whole_reply_is_taken_in_place_of_a_stream(place: Place) -> None:
    message = {"role": "assistant", "content": "All", "refusal": None}
    page = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "object": "chat.completion",
            "usage": {"prompt_tokens": 3, "completion_tokens": 5}}  # fmt: skip
    place.upstream.script = [json.dumps(page, indent=1).encode()]
    answer = await place.whole()
    assert answer["choices"][0]["message"]["content"] == "All"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 5)


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"}])
async def test_a_refusal_passes_on(place: Place, more: dict[str, Any]) -> None:
    place.upstream.says({"delta": {"refusal": "I ca"}}, {"delta": {"refusal": "nnot"}},
                        {"delta": {}, "finish_reason": "stop"})  # fmt: skip
    (choice,) = (await place.whole(**more))["choices"]
    assert (choice["message"]["content"], choice["message"]["refusal"]) == (None, "I cannot")
    streamed = await place.chunks(**more)
    assert "".join(each["choices"][0]["delta"].get("refusal", "") for each in streamed) == "I cannot"
    job, events = await place.job(**more)
    assert job["result"]["choices"][0]["message"]["refusal"] == "I cannot" and '"refusal":"I ca"' in events


@pytest.mark.parametrize("flat", [[], [{"type": "function", "name": "get_time", "parameters": {"type": "object"}}]])
async def test_a_refusal_is_a_part_of_a_response(place: Place, flat: list[Any]) -> None:
    """Whose events say the same as the whole."""
    place.upstream.says({"delta": {"refusal": "I ca"}}, {"delta": {"refusal": "nnot"}},
                        {"delta": {}, "finish_reason": "stop"})  # fmt: skip
    asked = {"model": "sim", "input": "hi", "tools": flat}
    response = (await place.api.post("/v1/responses", asked)).json()
    found = await place.chunks("/v1/responses", **asked)
    part = {"type": "refusal", "refusal": "I cannot"}
    assert [each["content"] for each in response["output"]] == [[part]]
    assert [each["content"] for each in found[-1]["response"]["output"]] == [[part]]
    assert "".join(each["delta"] for each in found if each["type"] == "response.refusal.delta") == "I cannot"
    (done,) = [each for each in found if each["type"] == "response.refusal.done"]
    assert done["refusal"] == "I cannot"
    again = (await place.api.client.get(f"/v1/responses/{response['id']}")).json()
    assert again["output"] == response["output"]


async def test_extra_fields_of_an_answer_come_back(place: Place) -> None:
    """Of the chunk, the choice and the delta; in a stream as they came, and in a whole answer joined."""
    place.upstream.says(
        {"delta": {"role": "assistant", "content": "", "reasoning_content": "Hm"}},
        {"delta": {"reasoning_content": "m.", "reasoning_details": [{"index": 0, "type": "text", "text": "Hm"}]}},
        {"delta": {"reasoning_details": [{"index": 0, "type": "text", "text": "m."}]}},
        {"delta": {"content": "Yes", "annotations": [{"type": "url"}]}},
        {"delta": {}, "finish_reason": "stop", "native_finish_reason": "STOP"},
        provider="P",
    )
    answer = await place.whole()
    (choice,) = answer["choices"]
    assert answer["provider"] == "P" and choice["native_finish_reason"] == "STOP"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes", "Hmm.")
    assert message["reasoning_details"] == [{"index": 0, "type": "text", "text": "Hmm."}]
    assert message["annotations"] == [{"type": "url"}]
    streamed = await place.chunks()
    assert [each["provider"] for each in streamed if "provider" in each] == ["P"]
    said = [each["choices"][0]["delta"] for each in streamed]
    assert "".join(each.get("reasoning_content", "") for each in said) == "Hmm."
    assert "".join(each.get("content") or "" for each in said) == "Yes"
    job, _ = await place.job()
    assert job["result"]["choices"][0]["message"] == message


CALL = {"index": 0, "id": "call_of_theirs", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}


async def test_a_call_keeps_its_id_and_its_extra_content(place: Place) -> None:
    """Such as a signature, which later turns must bring back."""
    signed = {"google": {"thought_signature": "c2ln"}}
    place.upstream.says(
        {"delta": {"tool_calls": [CALL | {"extra_content": signed}]}}, {"delta": {}, "finish_reason": "tool_calls"}
    )
    message = (await place.whole(tools=[TOOL]))["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["id"], call["extra_content"]) == ("call_of_theirs", signed)
    streamed = [each["choices"][0]["delta"].get("tool_calls") for each in await place.chunks(tools=[TOOL])]
    (delta,) = [call for calls in streamed for call in calls or ()]
    assert (delta["id"], delta["extra_content"], delta["function"]["arguments"]) == ("call_of_theirs", signed, "{}")
    flat = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}
    response = (await place.api.post("/v1/responses", {"model": "sim", "input": "hi", "tools": [flat]})).json()
    (item,) = response["output"]
    assert (item["call_id"], item["extra_content"]) == ("call_of_theirs", signed)
    last = (await place.chunks("/v1/responses", input="hi", tools=[flat]))[-1]["response"]["output"]
    assert [(each["call_id"], each["extra_content"]) for each in last] == [("call_of_theirs", signed)]


# --- what the server is sent ------------------------------------------------------------------------------------------

SIGNED = {"google": {"thought_signature": "c2ln"}}
KNOWN_TO_SERVERS: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": False}, "prompt_cache_key": "k", "verbosity": "low",
    "safety_identifier": "s", "user": "u", "metadata": {"a": "b"}, "service_tier": "flex",
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"}, "prediction": {"type": "content", "content": "x"}, "web_search_options": {}, "top_a": 0.5,
    "stop_token_ids": [3], "reasoning_effort": "none",
}  # fmt: skip
OURS = {
    "cache_salt": "x", "rid": "x", "api_base": "http://127.0.0.1:1", "priority": 0,
    "Stream": False, "N": 3, "API_KEY": "x", "\u017ftream": False, "extra_body": {"n": 3}, "aws_session_token": "x",
    "truncate_prompt_tokens": 5, "disaggregated_params": {"x": 1},
}  # fmt: skip
"""What Penstock decides, and what leads a server elsewhere; also in letters that some servers read as the same."""


async def test_fields_reach_a_server_that_may_know_them(place: Place) -> None:
    """By their own names; what Penstock manages does not, and is named as ignored."""
    place.upstream.says({"delta": {"content": "x"}, "finish_reason": "stop"})
    asked = {"model": "sim", "messages": HELLO, "max_completion_tokens": 9} | KNOWN_TO_SERVERS | OURS
    reply = await place.api.post("/v1/chat/completions", asked)
    body = place.upstream.sent[-1].body
    assert {name: body.get(name) for name in KNOWN_TO_SERVERS} == KNOWN_TO_SERVERS
    assert body["max_completion_tokens"] == 9 and "max_tokens" not in body
    assert OURS.keys().isdisjoint(body)
    assert set(reply.headers["x-ignored-fields"].split(", ")) >= {name for name in OURS if name.isascii()}
    job = (await place.api.client.get(f"/v1/jobs/{reply.headers['x-job-id']}?include=input")).json()["input"]
    assert job["max_completion_tokens"] == 9 and job["chat_template_kwargs"] == {"enable_thinking": False}


async def test_further_fields_of_messages_calls_and_tools_reach_a_server(place: Place) -> None:
    place.upstream.says({"delta": {"content": "x"}, "finish_reason": "stop"})
    call = CALL | {"id": "c1", "extra_content": SIGNED}
    del call["index"]
    messages = [
        {"role": "user", "name": "Bob", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "x"}}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    tool = TOOL | {"cache_control": {"type": "x"}, "function": TOOL["function"] | {"defer": True}}  # type: ignore[operator]
    reply = await place.api.post("/v1/chat/completions", {"model": "sim", "messages": messages, "tools": [tool]})
    body = place.upstream.sent[-1].body
    assert body["messages"] == messages and body["tools"] == [tool] and "x-ignored-fields" not in reply.headers


async def test_a_number_that_is_beyond_all_numbers_reaches_no_server(place: Place) -> None:
    """JSON can write 1e999, which no server could be sent again."""
    body = '{"model": "sim", "messages": [{"role": "user", "content": "hi"}], "options_of_mine": {"a": [0, 1e999]}}'
    reply = await place.api.client.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "options_of_mine.a[1]"
    assert not place.upstream.sent


async def test_a_schema_keeps_its_name(place: Place) -> None:
    place.upstream.says({"delta": {"content": "{}"}, "finish_reason": "stop"})
    await place.work("v", kind="vllm")
    named = {"name": "city", "description": "A city.", "strict": True, "schema": {"type": "object"}}
    form = {"type": "json_schema", "json_schema": named}
    reply = await place.api.post("/v1/chat/completions", {"model": "v", "messages": HELLO, "response_format": form})
    assert reply.status_code == 200, reply.text
    assert place.upstream.sent[-1].body["response_format"] == form
    text = {"format": {"type": "json_schema", **named}}
    await place.api.post("/v1/responses", {"model": "v", "input": "hi", "text": text, "prompt_cache_key": "k"})
    body = place.upstream.sent[-1].body
    assert (body["response_format"], body["prompt_cache_key"]) == (form, "k")


async def test_a_stored_response_gives_its_calls_back_to_the_server(place: Place) -> None:
    """With their own ids and signatures; so does one that is sent as items."""
    flat = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}
    place.upstream.says(
        {"delta": {"reasoning_content": "Hm"}},
        {"delta": {"tool_calls": [CALL | {"extra_content": SIGNED}]}},
        {"delta": {}, "finish_reason": "tool_calls"},
    )
    talk = (await place.api.post("/v1/conversations", {})).json()["id"]
    asked = {"model": "sim", "input": "hi", "tools": [flat], "reasoning": {"effort": "low"}}
    first = (await place.api.post("/v1/responses", asked)).json()
    await place.api.post("/v1/responses", asked | {"conversation": talk})
    output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "noon"}
    later = [
        {"previous_response_id": first["id"], "input": [output]},
        {"conversation": talk, "input": [output]},
        {"input": [{"role": "user", "content": "hi"}, *first["output"], output]},
    ]
    for more in later:
        await place.api.post("/v1/responses", {"model": "sim", "tools": [flat]} | more)
        message = place.upstream.sent[-1].body["messages"][-2]
        (called,) = message["tool_calls"]
        assert (called["id"], called["extra_content"]) == ("call_of_theirs", SIGNED)
        assert message.get("reasoning_content") == ("Hm" if len(more["input"]) == 1 else None)


CALLS: list[dict[str, Any]] = [
    {"tool_calls": [{"index": 0, "id": "x", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]}
]


class Pair:
    """An API and a worker of model `sim`, whose server is `own`; `other` is that of its fallback `spare`."""

    def __init__(self, api: LocalApi, start: StartUpstream, own: FakeUpstream, other: FakeUpstream) -> None:
        self.api, self._start, self.own, self.other = api, start, own, other
        self.workers: list[Running] = []

    async def work(self) -> None:
        settings = UpstreamSettings(**FAST, urls=(self.own.url,), fallback=("spare",), name=MODEL)  # type: ignore[arg-type]
        spare = UpstreamSettings(**FAST, urls=(self.other.url,), name=MODEL)  # type: ignore[arg-type]
        running = await self._start(settings, model="sim", others={"spare": spare})
        self.workers.append(running)
        pools: Any = running.engine._pools  # type: ignore[attr-defined]
        await until(lambda: all(pool.ready for pool in pools))

    async def chat(self, **more: Any) -> Any:
        body = {"model": "sim", "messages": HELLO, "max_tokens": 10} | more
        return await self.api.post("/v1/chat/completions", body)


@pytest.fixture
async def pair(wire: RedisClient, start_upstream: StartUpstream) -> AsyncIterator[Pair]:
    own, other = FakeUpstream("vllm", step_s=0.005), FakeUpstream("vllm", step_s=0.005)
    async with serving(own, other), api_in_process(RedisClient.open(wire.settings)) as api:
        yield Pair(api, start_upstream, own, other)


def chunks_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def test_an_answer_of_the_model_itself_names_it_in_the_header_alone(pair: Pair) -> None:
    await pair.work()
    whole, stream = await pair.chat(), await pair.chat(stream=True)
    assert whole.headers["x-served-by"] == stream.headers["x-served-by"] == "sim"
    assert "served_by" not in whole.json() and "served_by" not in stream.text
    job = (await pair.api.client.get(f"/v1/jobs/{whole.headers['x-job-id']}")).json()
    assert job["served_by"] == "sim"


async def test_every_form_of_an_answer_says_who_gave_it(pair: Pair, recorder: Recorder) -> None:
    """Whole and streamed, one choice and several, with usage and without."""
    await pair.work()
    await pair.own.stop()
    before = tokens_of(recorder)
    whole = await pair.chat()
    assert whole.headers["x-served-by"] == whole.json()["served_by"] == "spare"
    assert whole.json()["model"] == "sim" and whole.json()["choices"][0]["message"]["content"] == "".join(ANSWER[:10])
    for usage in (False, True):
        options = {"stream_options": {"include_usage": True}} if usage else {}
        stream = await pair.chat(stream=True, n=2, **options)
        assert stream.headers["x-served-by"] == "spare"
        said = [chunk for chunk in chunks_of(stream.text) if "served_by" in chunk]
        assert [chunk["choices"][0]["index"] for chunk in said if chunk["choices"]] in ([0, 1], [1, 0])
        assert [chunk["usage"]["completion_tokens"] for chunk in said if not chunk["choices"]] == (
            [20] if usage else []
        )
        assert {chunk["served_by"] for chunk in said} == {"spare"}
    job = (await pair.api.client.get(f"/v1/jobs/{whole.headers['x-job-id']}")).json()
    assert job["served_by"] == job["result"]["served_by"] == "spare"
    listed = (await pair.api.client.get("/v1/jobs")).json()["data"]
    assert {each["served_by"] for each in listed} == {"spare"}
    events = (await pair.api.client.get(f"/v1/jobs/{whole.headers['x-job-id']}/events")).text
    assert '"served_by":"spare"' in events
    after = tokens_of(recorder)
    grown = {key: after[key] - before.get(key, 0) for key in after}
    assert {key: count for key, count in grown.items() if count} == {
        ("spare", "prompt"): 9.0, ("spare", "completion"): 50.0, ("spare", "cached"): 6.0,
    }  # fmt: skip


async def test_calls_and_responses_say_who_gave_them(pair: Pair) -> None:
    await pair.work()
    await pair.own.stop()
    pair.other.deltas = CALLS
    called = await pair.chat(tools=[TOOL], stream=True)
    assert [chunk["served_by"] for chunk in chunks_of(called.text) if "served_by" in chunk] == ["spare"]
    pair.other.deltas = []
    asked = {"model": "sim", "input": "hi", "max_output_tokens": 10}
    response = await pair.api.post("/v1/responses", asked)
    assert response.headers["x-served-by"] == response.json()["served_by"] == "spare"
    streamed = chunks_of((await pair.api.post("/v1/responses", asked | {"stream": True})).text)
    assert streamed[-1]["response"]["served_by"] == "spare" and "served_by" not in streamed[0]["response"]
    again = (await pair.api.client.get(f"/v1/responses/{response.json()['id']}")).json()
    assert again["served_by"] == "spare"


@pytest.mark.slow
async def test_a_lost_workers_answer_is_continued_by_the_model_that_began_it(pair: Pair, wire: RedisClient) -> None:
    """Although its own model is back."""
    pair.own.step_s = pair.other.step_s = 0.05
    await pair.work()
    await pair.own.stop()
    asking = asyncio.create_task(pair.chat(max_tokens=60))

    async def begun() -> bool:
        return bool(pair.other.sent) and pair.other.running == 1

    await until(begun)
    (job,) = (await pair.api.client.get("/v1/jobs")).json()["data"]
    await until(lambda: has_deltas(wire, job["id"], 3))
    first = pair.workers[0]
    first.task.cancel()
    await asyncio.gather(first.task, return_exceptions=True)
    await first.engine.stop()
    await pair.own.start()
    await pair.work()
    answer = (await asking).json()
    assert answer["choices"][0]["message"]["content"] == "".join(ANSWER[:60])
    assert (answer["served_by"], answer["usage"]["completion_tokens"]) == ("spare", 60)
    assert not pair.own.sent and pair.other.sent[-1].continues


def tokens_of(recorder: Recorder) -> dict[tuple[str, str], float]:
    """Tokens by model and kind, as the metrics count them; none that are 0."""
    recorder.metrics.flush()
    page = recorder.metrics.expose().decode()
    found = {}
    for line in page.splitlines():
        if line.startswith("penstock_tokens_total{"):
            labels, value = line.rsplit(" ", 1)
            parts = dict(part.split("=") for part in labels[labels.index("{") + 1 : -1].split(","))
            if float(value):
                found[parts["model"].strip('"'), parts["kind"].strip('"')] = float(value)
    return found
