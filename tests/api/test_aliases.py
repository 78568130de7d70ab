"""Aliases at the door: wherever a client names a model, an alias of it does as well, and the job knows the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process, key_of
from batching import MODELS, batch_record
from hand import claiming
from openapi_document import SCHEMAS, conforms

from api.openai.batch_lines import envelope, request_of
from api.openai.errors import ApiError
from api.settings import ModerationSettings
from streaming.fleet.aliases import Aliases
from streaming.fleet.settings import ModelSettings
from streaming.redis.client import RedisClient

KEYS = {
    "red": key_of("sk-red", "red"),
    "blue": key_of("sk-blue", "blue", admin=True),
    "by-model": key_of("sk-by-model", "red", models=("sim",)),
    "by-alias": key_of("sk-by-alias", "red", models=("gpt-4o",)),
    "by-pattern": key_of("sk-by-pattern", "red", models=("claude-*",)),
}
GENERAL = {"gpt-4o": "sim", "claude-*": "sim"}
ALIASES = Aliases(GENERAL, {"red": {"mine": "sim", "gpt-4o": "other"}})
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def auth(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name}"}


@pytest.fixture
async def api(wire: RedisClient) -> AsyncIterator[LocalApi]:
    async with api_in_process(RedisClient.open(wire.settings), KEYS) as api:
        api.services.models["other"] = ModelSettings(engine="sim")
        api.services.aliases = ALIASES
        yield api


async def queued(api: LocalApi, path: str, body: dict[str, Any], key: str = "blue") -> Any:
    """The job that such a request puts into the queue, as it is shown."""
    asked = {"queue": {"on_disconnect": "continue"}, **body}
    got = await api.client.post(path, json=asked, headers=auth(key) | {"Prefer": "respond-async"})
    assert got.status_code == 202, got.text
    return got.json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/v1/rerank", {"query": "hello", "documents": ["a"]}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/jobs", CHAT),
        ("/v1/jobs", {"endpoint": "/v1/completions", "prompt": "hello"}),
    ],
)
async def test_an_alias_is_the_models_name(api: LocalApi, path: str, body: dict[str, Any]) -> None:
    """At each endpoint: exact, by a pattern, and again from what was prepared for the first request; and the tenant's
    own meaning of it."""
    for name in ("gpt-4o", "claude-3", "gpt-4o"):
        assert (await queued(api, path, body | {"model": name}))["model"] == "sim"
    for name, model in {"mine": "sim", "gpt-4o": "other", "claude-3": "sim"}.items():
        assert (await queued(api, path, body | {"model": name}, "red"))["model"] == model
    for name in ("mine", "gone", "GPT-4o", "gpt-4o "):
        refused = await api.client.post(path, json=body | {"model": name}, headers=auth("blue"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_response_knows_the_model(api: LocalApi) -> None:
    got = await api.client.post(
        "/v1/responses", json={"model": "gpt-4o", "input": "x", "background": True}, headers=auth("blue")
    )
    assert got.json()["model"] == "sim"
    assert not (await api.client.get("/v1/jobs?model=other", headers=auth("blue"))).json()["data"]
    for name in ("sim", "gpt-4o", "claude-x"):
        found = (await api.client.get(f"/v1/jobs?model={name}", headers=auth("blue"))).json()["data"]
        assert [each["model"] for each in found] == ["sim"], name


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_names_the_model(api: LocalApi, wire: RedisClient, stream: bool) -> None:
    """In its body and in X-Served-By."""
    body = CHAT | {"model": "gpt-4o", "stream": stream}
    reply = asyncio.create_task(api.client.post("/v1/chat/completions", json=body, headers=auth("blue")))
    hand = await claiming(wire)
    assert hand.claim.job.model == "sim"
    await hand.write(["hi"])
    await hand.finish()
    got = await reply
    shown = json.loads(got.text.split("data: ")[1]) if stream else got.json()
    assert got.headers["x-served-by"] == shown["model"] == "sim"


async def test_a_request_without_a_model_has_the_default(api: LocalApi) -> None:
    """Which may be an alias; without one, `model` is required."""
    refused = await api.post("/v1/chat/completions", CHAT, **auth("blue"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    api.services.aliases = Aliases(GENERAL, {}, "gpt-4o")
    api.services.prepared.clear()
    for body in (CHAT, CHAT, CHAT | {"model": None}):
        assert (await queued(api, "/v1/chat/completions", body))["model"] == "sim"
    assert (await queued(api, "/v1/chat/completions", CHAT | {"model": "other"}))["model"] == "other"
    refused = await api.post("/v1/chat/completions", CHAT | {"model": ""}, **auth("blue"))
    assert refused.status_code == 400
    refused = await api.post("/v1/chat/completions", CHAT, **auth("by-pattern"))
    assert refused.status_code == 403, "the default is no way around the models of a key"


async def test_models_are_listed_with_their_aliases(api: LocalApi) -> None:
    """Each with the model that it means, for the caller alone; a pattern is no name."""

    async def seen(key: str) -> dict[str, Any]:
        got = (await api.client.get("/v1/models", headers=auth(key))).json()
        assert conforms(got, SCHEMAS["ModelList"])
        return {each["id"]: each.get("alias_of") for each in got["data"]}

    assert list((await seen("blue")).items()) == [("sim", None), ("other", None), ("gpt-4o", "sim")]
    assert await seen("red") == {"sim": None, "other": None, "mine": "sim", "gpt-4o": "other"}
    assert await seen("by-model") == {"sim": None, "mine": "sim"}
    assert await seen("by-alias") == {"gpt-4o": "other"}
    one = await api.client.get("/v1/models/claude-7", headers=auth("red"))
    assert (one.json()["id"], one.json()["alias_of"]) == ("claude-7", "sim")
    assert (await api.client.get("/v1/models/mine", headers=auth("blue"))).status_code == 404
    assert (await api.client.get("/v1/models/mine", headers=auth("by-alias"))).status_code == 403


@pytest.mark.parametrize(
    ("key", "may", "may_not"),
    [
        ("by-model", ["sim", "mine", "claude-1"], ["other", "gpt-4o", "gone"]),
        ("by-alias", ["gpt-4o"], ["sim", "other", "mine", "claude-1"]),
        ("by-pattern", ["claude-1"], ["sim", "mine", "gpt-4o"]),
    ],
)
async def test_a_key_for_a_model_is_one_for_its_aliases(
    api: LocalApi, key: str, may: list[str], may_not: list[str]
) -> None:
    """And a key for an alias is for nothing else."""
    for name in may:
        await queued(api, "/v1/chat/completions", CHAT | {"model": name}, key)
    for name in may_not:
        refused = await api.client.post("/v1/chat/completions", json=CHAT | {"model": name}, headers=auth(key))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied"), name


async def test_a_name_of_no_model_is_answered_with_the_tenants_aliases(api: LocalApi) -> None:
    """And with no other one's."""
    for key, has_own in (("red", True), ("blue", False)):
        refused = await api.client.post("/v1/chat/completions", json=CHAT | {"model": "gone"}, headers=auth(key))
        assert refused.status_code == 404 and ("mine" in refused.json()["error"]["message"]) is has_own


async def test_a_key_may_be_created_for_an_alias(api: LocalApi) -> None:
    """Of its tenant: another's is none."""
    for tenant, name, status in (("red", "mine", 201), ("blue", "mine", 404), ("blue", "claude-*", 201)):
        body = {"tenant": tenant, "models": [name]}
        got = await api.client.post("/admin/keys", json=body, headers=auth("blue"))
        assert got.status_code == status, got.text


async def test_the_moderation_model_has_aliases(api: LocalApi, wire: RedisClient) -> None:
    """The rules' own name is none of a pattern's."""
    api.services.aliases = Aliases({"omni-moderation-*": "sim", "gpt": "other", "c*": "sim"}, {})
    api.services.moderation = ModerationSettings(model="sim", categories=("hate",))
    asked = {"model": "omni-moderation-latest", "input": "x"}
    reply = asyncio.create_task(api.client.post("/v1/moderations", json=asked, headers=auth("red")))
    hand = await claiming(wire)
    await hand.write(["safe"])
    await hand.finish()
    got = await reply
    assert got.headers["x-served-by"] == got.json()["model"] == "sim"
    rules = await api.client.post("/v1/moderations", json={"input": "x", "model": "content-rules"}, headers=auth("red"))
    assert rules.json()["model"] == "content-rules"
    refused = await api.client.post("/v1/moderations", json={"input": "x", "model": "gpt"}, headers=auth("red"))
    assert refused.status_code == 404


def test_a_line_of_a_batch_means_its_tenants_model() -> None:
    """Also when its job is made, later; then a model that is gone meanwhile keeps its name."""
    found = {}
    for name in ("gpt-4o", "mine", "claude-1", "sim", None):
        body = CHAT | ({} if name is None else {"model": name})
        row = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
        line = envelope(json.dumps(row).encode(), "/v1/chat/completions")
        aliases = Aliases(GENERAL, {"red": {"mine": "sim", "gpt-4o": "other"}}, "claude-1")
        found[name] = request_of(line, batch_record(tenant="red").tenant, aliases, MODELS).model
        if name == "mine":
            with pytest.raises(ApiError):
                request_of(line, "blue", aliases, MODELS)
            assert request_of(line, "blue", aliases, MODELS, validated=True).model == "mine"
            meant = dict[str, str]()
            for now in (aliases, Aliases({}, {"red": {"mine": "other"}}), Aliases({}, {})):
                assert request_of(line, "red", now, MODELS, meant=meant, validated=True).model == "sim"
    assert found == {"gpt-4o": "other", "mine": "sim", "claude-1": "sim", "sim": "sim", None: "sim"}
