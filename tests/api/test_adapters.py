"""Adapters at the API: how a request names one, who may, and what its answer and its job show."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process, key_of
from batching import MODELS
from hand import claiming
from msgspec.structs import replace

from api.openai.batch_lines import envelope, request_of, traits
from penstock.engine import Capabilities, ModelCard
from streaming.fleet.aliases import NO_ALIASES, Aliases
from streaming.fleet.processes import Fleet
from streaming.fleet.settings import ModelSettings
from streaming.redis.client import RedisClient

KEYS = {
    "all": key_of("sk-all", "red", admin=True),
    "base": key_of("sk-base", "red", models=("sim",)),
    "one": key_of("sk-one", "red", models=("sim:sql",)),
    "bare": key_of("sk-bare", "red", models=("sql",)),
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture
async def api(wire: RedisClient) -> AsyncIterator[LocalApi]:
    async with api_in_process(RedisClient.open(wire.settings), KEYS) as api:
        api.services.models["sim"] = ModelSettings(engine="sim", adapters={"sql": "/sql", "law": "/law"})
        api.services.models["other"] = ModelSettings(engine="sim", adapters={"law": "/law"})
        api.services.aliases = Aliases({"gpt-4o": "sim:sql"}, {})
        yield api


def auth(name: str = "all") -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name}"}


async def asked(api: LocalApi, model: str, key: str = "all", path: str = "/v1/chat/completions", **body: Any) -> Any:
    body = {"queue": {"on_disconnect": "continue"}, "model": model} | (body or CHAT)
    return await api.client.post(path, json=body, headers=auth(key) | {"Prefer": "respond-async"})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": ["hello", "you"], "n": 2}),
        ("/v1/responses", {"input": "hello", "background": True}),
        ("/v1/messages", CHAT),
        ("/tokenize", {"prompt": "hello"}),
        ("/v1/jobs", CHAT),
    ],
)
async def test_a_request_names_an_adapter(api: LocalApi, wire: RedisClient, path: str, body: dict[str, Any]) -> None:
    """In full, alone if it is the only one of its name, or by an alias. The job waits in the lane of the model."""
    for name in ("sim:sql", "sql", "gpt-4o", "sim:sql"):
        got = await asked(api, name, path=path, **body)
        assert got.status_code in (200, 202) and got.json()["model"] == "sim:sql", got.text
        job = (await claiming(wire)).claim.job
        assert (job.model, job.adapter, job.v) == ("sim", "sql", 7)
    plain = await asked(api, "sim", path=path, **body)
    job = (await claiming(wire)).claim.job
    assert (plain.json()["model"], job.adapter, job.v) == ("sim", "", 7 if path == "/v1/messages" else 1)


async def test_an_unknown_adapter_is_404_with_the_known_ones(api: LocalApi) -> None:
    """Also one of another model, and one that two models have."""
    for name in ("sim:none", "other:sql", "law", "sim:", ":sql", "sim:sql:"):
        error = (await asked(api, name)).json()["error"]
        assert error["code"] == "model_not_found" and "sim:law, sim:sql" in error["message"], name


@pytest.mark.parametrize(
    ("key", "may", "may_not"),
    [("base", ["sim", "sim:sql", "sql"], ["other", "other:law"]), ("one", ["sim:sql", "sql"], ["sim", "sim:law"]),
     ("bare", ["sql"], ["sim", "sim:law"])],
)  # fmt: skip
async def test_a_key_is_for_models_or_adapters(api: LocalApi, key: str, may: list[str], may_not: list[str]) -> None:
    """One for a model is for its adapters, too; a list of models has no others."""
    for names, status in ((may, 202), (may_not, 403)):
        assert [(await asked(api, name, key)).status_code for name in names] == [status] * len(names)
    listed = {each["id"] for each in (await api.client.get("/v1/models", headers=auth(key))).json()["data"]}
    assert listed.isdisjoint(may_not)


async def test_models_are_listed_with_their_adapters(api: LocalApi) -> None:
    """As vLLM's are: behind their model, which they name."""
    data = (await api.client.get("/v1/models", headers=auth())).json()["data"]
    shown = {each["id"]: (each.get("parent"), each.get("root")) for each in data}
    assert [*shown][:5] == ["sim", "sim:sql", "sim:law", "other", "other:law"]
    assert (shown["sim"], shown["sim:law"]) == ((None, None), ("sim", "sim"))
    for name, of in (("sim:sql", None), ("sql", "sim:sql"), ("gpt-4o", "sim:sql")):
        one = (await api.client.get(f"/v1/models/{name}", headers=auth())).json()
        assert (one["id"], one["parent"], one.get("alias_of")) == (name, "sim", of)


async def test_what_the_engine_does_not_serve_is_refused(api: LocalApi, wire: RedisClient) -> None:
    """Once a worker has loaded the model: an adapter that it lacks, and vectors with any."""
    can = Capabilities(embed=True)
    card = ModelCard(name="sim", engine="sim", context=99, max_output=9, capabilities=can, created=1, adapters=("sql",))
    await Fleet(wire).publish_card(card)
    await api.services.learn_cards()
    api.services.cards = await Fleet(wire).cards()
    assert (await asked(api, "sim:sql")).status_code == 202
    refused = (await asked(api, "sim:law")).json()["error"]
    assert (refused["param"], "serves sql" in refused["message"]) == ("model", True)
    refused = (await asked(api, "sim:sql", path="/v1/embeddings", input="a")).json()["error"]
    assert (refused["param"], "'sim'" in refused["message"]) == ("model", True)


async def test_an_adapter_of_a_model_that_sees_images_takes_them(api: LocalApi) -> None:
    can = Capabilities(images=True)
    card = ModelCard(name="sim", engine="sim", context=9999, max_output=9, capabilities=can, created=1)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    body = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 4}
    for adapters, status in ((("sql",), 202), ((), 400)):
        api.services.cards = {"sim": replace(card, adapters=adapters)}
        assert (await asked(api, "sim:sql", **body)).status_code == status


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_names_the_adapter(api: LocalApi, wire: RedisClient, stream: bool) -> None:
    """In its body, in X-Served-By, in the job and in lists, of which a filter for the model has it, too."""
    body = CHAT | {"model": "sql", "stream": stream}
    reply = asyncio.create_task(api.client.post("/v1/chat/completions", json=body, headers=auth()))
    hand = await claiming(wire)
    await hand.write(["hi"])
    await hand.finish()
    got = await reply
    shown = json.loads(got.text.split("data: ")[1]) if stream else got.json()
    assert got.headers["x-served-by"] == shown["model"] == "sim:sql"
    job = (await api.client.get(f"/v1/jobs/{got.headers['x-job-id']}", headers=auth())).json()
    assert (job["model"], job["served_by"], job["result"]["model"]) == ("sim:sql", "sim:sql", "sim:sql")
    for name, count in (("sim", 1), ("sim:sql", 1), ("sql", 1), ("sim:law", 0)):
        found = (await api.client.get(f"/v1/jobs?model={name}", headers=auth())).json()["data"]
        assert [each["model"] for each in found] == ["sim:sql"] * count


async def test_an_idempotency_key_tells_adapters_apart(api: LocalApi) -> None:
    """The same body joins; another adapter with the same key is another request."""
    keyed = auth() | {"Idempotency-Key": "k", "Prefer": "respond-async"}
    jobs = [
        await api.client.post("/v1/chat/completions", json=CHAT | {"model": name}, headers=keyed)
        for name in ("sim:sql", "sim:sql", "sim:law")
    ]
    assert jobs[0].json()["id"] == jobs[1].json()["id"]
    assert jobs[2].status_code == 409 or jobs[2].json()["error"]["code"] == "idempotency_key_reused"


def test_equal_lines_of_two_adapters_are_not_duplicates() -> None:
    """Nor do they share the group of a prompt; an unknown adapter refuses its line."""
    models = MODELS | {"sim": ModelSettings(engine="sim", adapters={"a": "/a", "b": "/b"})}
    found = []
    for name in ("sim", "sim:a", "sim:b", "a"):
        body = CHAT | {"model": name, "temperature": 0}
        line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
        request = request_of(envelope(json.dumps(line).encode(), "/v1/chat/completions"), "", NO_ALIASES, models)
        found.append(traits(request, None))
    assert {each.model for each in found} == {"sim"}
    assert len({each.digest for each in found}) == 3 and found[1].digest == found[3].digest
    assert not set(found[0].groups) & set(found[1].groups)
