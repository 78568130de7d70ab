"""Content rules on requests: refused or redacted before anything is queued, whichever way a request came."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process, key_of
from batching import batch_record, jsonl, line, tools_of
from brokering import body, intake_of
from openai import AsyncOpenAI
from openapi_document import SCHEMAS, conforms

from api.openai.content import InputRules, input_rules
from offline.batch.lines import Lines
from offline.broker import Rejected
from penstock.content import ContentSettings, Hit, Scanner, marker
from penstock.engine import ChatTurn
from streaming.batches.ledger import InputPlan
from streaming.batches.store import BatchLease, BatchProgress, BatchState
from streaming.jobs.job import Chat, Inputs, Job, Text
from streaming.redis.client import RedisClient
from telemetry.metrics import Metrics

CARD = "4111 1111 1111 1111"
RULES = {
    "falcon": ContentSettings(deny=("project falcon",), on=("input",), default=True),
    "cards": ContentSettings(detect=("card",), action="redact", default=True),
    "seen": ContentSettings(deny=("hello",), action="tag", default=True),
    "said": ContentSettings(detect=("email",), on=("output",)),
}
KEYS = {"red": key_of("sk-red", "red"), "blue": key_of("sk-blue", "blue"), "green": key_of("sk-green", "green")}
RED, BLUE, GREEN = ({"Authorization": f"Bearer sk-{name}"} for name in ("red", "blue", "green"))


def rules() -> InputRules:
    found = input_rules(RULES, {"blue": (), "green": ("said",)}, Metrics.start("", "api"))
    assert found is not None
    return found


@pytest.fixture
async def api(wire: RedisClient) -> AsyncIterator[LocalApi]:
    async with api_in_process(RedisClient.open(wire.settings), KEYS) as api:
        api.services.content = rules()
        yield api


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text} for text in texts], **more}


TOOL = {"type": "function", "function": {"name": "f", "description": "Of Project Falcon.", "parameters": {}}}
SCHEMA = {"type": "object", "properties": {"Project Falcon": {"type": "string"}}}
KEYED = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"of": "project falcon"}'}}


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/v1/chat/completions", chat("hi", "About Project  Falcon."), "messages"),
        ("/v1/chat/completions", chat("hi", stream=True, tools=[TOOL]), "messages"),
        ("/v1/chat/completions", chat("hi", tools=[KEYED]), "messages"),
        ("/v1/chat/completions", {"model": "sim", "messages": [
            {"role": "user", "content": [{"type": "text", "text": "project falcon"}]}]}, "messages"),
        ("/v1/chat/completions", {"model": "sim", "messages": [
            {"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "x", "tool_call_id": "c"}]}, "messages"),
        ("/v1/completions", {"model": "sim", "prompt": ["a", "project falcon"]}, "prompt"),
        ("/v1/completions", {"model": "sim", "prompt": [1, 2, 3]}, "prompt"),
        ("/v1/responses", {"model": "sim", "input": "project falcon", "background": True}, "input"),
        ("/v1/responses", {"model": "sim", "input": "x", "instructions": "project falcon"}, "input"),
        ("/v1/embeddings", {"model": "sim", "input": ["project falcon"]}, "input"),
        ("/v1/jobs", chat("project falcon"), "messages"),
        ("/v1/messages", chat("project falcon", max_tokens=4), "messages"),
        ("/v1/messages", chat("x", max_tokens=4, system=[{"type": "text", "text": "project falcon"}]), "messages"),
    ],
)  # fmt: skip
async def test_a_request_is_refused(api: LocalApi, path: str, asked: dict[str, Any], param: str) -> None:
    """With the rule, never with the text; nothing is queued. Token ids, which no rule can read, are refused as well."""
    reply = await api.client.post(path, json=asked, headers=RED)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    if asked.get("prompt") != [1, 2, 3]:
        assert error["code"] == "content_filter" and '"falcon"' in error["message"]
    assert "project" not in reply.text.lower()
    assert (await api.client.get("/v1/jobs", headers=RED)).json()["data"] == []


async def job_of(api: LocalApi, asked: dict[str, Any], headers: dict[str, str]) -> Job:
    """The job of a request as the store has it."""
    reply = await api.client.post("/v1/jobs", json=asked, headers=headers)
    assert reply.status_code == 202, reply.text
    return (await api.services.job_reader.record(reply.json()["id"])).job


async def test_a_request_is_redacted_before_it_is_queued(api: LocalApi) -> None:
    """In all of its texts, and nothing else of it changes; rules that tag change nothing."""
    asked = chat(f"hello, my card is {CARD}.", "Again", metadata={"a": "b"})
    job = await job_of(api, asked, RED)
    assert isinstance(job.prompt, Chat) and job.metadata == {"a": "b"}
    assert [turn.content for turn in job.prompt.turns] == [f"hello, my card is {marker('cards')}.", "Again"]
    properties = {"x": {"type": "string"}, CARD: {"type": "string"}}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    job = await job_of(api, chat("hi", tools=[{"type": "function", "function": tool}]), RED)
    assert job.tools is not None
    properties[marker("cards")] = properties.pop(CARD)
    assert job.tools.offered[0].parameters == {"type": "object", "properties": properties}
    job = await job_of(api, {"endpoint": "/v1/completions", "model": "sim", "prompt": [CARD, "x"]}, RED)
    assert job.prompt == Text((marker("cards"), "x"))
    job = await job_of(api, {"endpoint": "/v1/embeddings", "model": "sim", "input": ["x", CARD]}, RED)
    assert isinstance(job.prompt, Inputs) and [each for group in job.prompt.groups for each in group][1] == marker(
        "cards"
    )


async def test_other_tenants_have_other_rules(api: LocalApi) -> None:
    """A tenant without rules, and one whose rule is for answers, send what they like, token ids too."""
    for headers in (BLUE, GREEN):
        job = await job_of(api, chat(f"project falcon {CARD}"), headers)
        assert job.prompt == Chat((ChatTurn("user", f"project falcon {CARD}"),))
        await job_of(api, {"endpoint": "/v1/completions", "model": "sim", "prompt": [1, 2, 3]}, headers)


async def test_what_takes_long_holds_up_no_other_work(api: LocalApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was written to take long, however small, is looked at neither on the event loop nor in the threads
    that others use, and by one thread at a time."""
    threads, search, most = set[str](), Scanner.feed, Counter[str]()

    def noted(scanner: Scanner, text: str, **more: Any) -> list[Hit]:
        name = threading.current_thread().name
        try:
            return search(scanner, text, **more)
        finally:
            threads.add(name)
            most[name] = max(most[name], scanner.looks)

    monkeypatch.setattr(Scanner, "feed", noted)
    asked = [chat("4111 " * 200), chat("words " * 10_000), {"input": "AA00 " * 200}]
    for _ in range(3):
        replies = await asyncio.gather(*[
            api.client.post(f"/v1/{'jobs' if 'model' in each else 'moderations'}", json=each, headers=RED)
            for each in asked
        ])  # fmt: skip
        assert [reply.status_code for reply in replies] == [202, 202, 200]
    main = threading.current_thread().name
    assert len(threads) == 2 and main in threads and most.pop(main) <= 51 and max(most.values()) > 100
    for path, field, sent in (
        ("jobs", "messages", chat("4111 " * 1500)),
        ("moderations", "input", {"input": "4111 " * 1500}),
    ):
        reply = await api.client.post(f"/v1/{path}", json=sent, headers=RED)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


async def test_moderations_answer_by_the_same_rules(api: LocalApi) -> None:
    """By the rules of the caller's tenant in both directions, as OpenAI's client reads it; nothing is queued."""
    url = f"{api.client.base_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="sk-red") as client:
        found = await client.moderations.create(
            input=["Project Falcon", f"hello {CARD}", "a@b.co"], model="content-rules"
        )
    assert [each.flagged for each in found.results] == [True, True, False]
    categories = [each.categories.model_dump(exclude_none=True) for each in found.results]
    assert [[name for name in RULES if each.get(name)] for each in categories] == [["falcon"], ["cards", "seen"], []]
    for headers, names in ((RED, {"falcon", "cards", "seen"}), (BLUE, set()), (GREEN, {"said"})):
        parts = [{"type": "text", "text": "Project"}, {"type": "text", "text": "falcon, a@b.co"}]
        reply = await api.client.post("/v1/moderations", json={"input": parts}, headers=headers)
        assert conforms(reply.json(), SCHEMAS["Moderation"])
        (result,) = reply.json()["results"]
        assert result["categories"].keys() == names and result["flagged"] == bool(names)
        assert result["category_scores"] == {name: float(hit) for name, hit in result["categories"].items()}
    for wrong, status in (({"input": []}, 400), ({"input": "x", "model": "omni-moderation-latest"}, 404), ({}, 400)):
        assert (await api.client.post("/v1/moderations", json=wrong, headers=RED)).status_code == status
    api.services.content = None
    reply = await api.client.post("/v1/moderations", json={"input": "project falcon"}, headers=RED)
    assert reply.json()["results"][0]["flagged"] is False


async def test_batch_lines_and_broker_messages_have_the_rules_of_their_tenant(
    wire: RedisClient, tmp_path: Path
) -> None:
    """A line that a rule refuses is answered with the error, and the others run; a message is rejected."""
    tools = tools_of(wire, content=rules())
    data = [jsonl([line(number, text)]) for number, text in enumerate(("project falcon", CARD))]
    (tmp_path / "input").write_bytes(b"".join(data))
    plan = InputPlan()
    for number, at in enumerate((0, len(data[0]))):
        plan.order.append(plan.add(number + 1, at, len(data[number])))
    plan.save(tmp_path)
    now_ms = await wire.now_ms()
    lease = BatchLease(batch=batch_record(), epoch=1, state=BatchState.IN_PROGRESS, progress=BatchProgress(),
                       now_ms=now_ms, created_ms=now_ms)  # fmt: skip
    lines = await Lines.open(tools, lease, tmp_path)
    refused, redacted = [
        await lines._checked(each, {}, {}) for each in lines._jobs([0, 1], None, {}) if isinstance(each, Job)
    ]
    assert getattr(refused, "code", "") == "content_filter"
    assert isinstance(redacted, Job) and redacted.prompt == Chat((ChatTurn("user", marker("cards")),))
    intake = await intake_of(wire)
    intake._tools = tools
    await tools.store.require()
    await tools.headroom.look()
    with pytest.raises(Rejected, match="falcon"):
        await intake.accept(json.dumps(body("project falcon")).encode(), "first")
    assert (await intake.accept(json.dumps(body("fine")).encode(), "second")).startswith("job_")
