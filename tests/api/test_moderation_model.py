"""A moderation model: POST /v1/moderations with its name asks a worker, and says what it has answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process, key_of
from hand import Hand, claiming
from openai import AsyncOpenAI
from openapi_document import SCHEMAS, conforms

from api.openai.content import input_rules
from api.settings import ModerationSettings
from penstock.config import ConfigError
from penstock.content import ContentSettings
from streaming.fleet.settings import ModelSettings
from streaming.jobs.job import Chat, Job, JobState
from streaming.jobs.settings import QuotaSettings
from streaming.redis.client import RedisClient
from telemetry.metrics import Metrics

GUARD = ModerationSettings(model="sim", categories=("crimes", "hate"))
KEYS = {
    "red": key_of("sk-red", "red"),
    "only": key_of("sk-only", "red", models=("other",)),
    "full": key_of("sk-full", "full", quotas=QuotaSettings(jobs=1)),
}
RED, ONLY, FULL = ({"Authorization": f"Bearer sk-{name}"} for name in ("red", "only", "full"))


@pytest.fixture
async def api(wire: RedisClient) -> AsyncIterator[LocalApi]:
    async with api_in_process(RedisClient.open(wire.settings), KEYS) as api:
        api.services.models["other"] = ModelSettings(engine="sim")
        api.services.moderation = GUARD
        yield api


async def judged(
    api: LocalApi, wire: RedisClient, answers: dict[str, str], asked: Any, **headers: str
) -> tuple[int, Any, list[Job]]:
    """The answer to a request while a worker answers as many texts: what `answers` says of each."""
    named = RED | {name.replace("_", "-"): value for name, value in headers.items()}
    reply = asyncio.create_task(api.client.post("/v1/moderations", json=asked, headers=named))
    jobs = []
    for _ in answers:
        hand = await claiming(wire)
        assert isinstance(hand.claim.job.prompt, Chat)
        text = hand.claim.job.prompt.turns[-1].content
        await hand.write([answers[str(text)]])  # type: ignore[arg-type]
        await hand.finish()
        jobs.append(hand.claim.job)
    got = await reply
    return got.status_code, got.json(), jobs


async def test_the_model_says_what_it_finds(api: LocalApi, wire: RedisClient) -> None:
    """In OpenAI's shape, for each text, with all categories; what it names otherwise is "other"."""
    answers = {"": "safe", "b": "\n\nunsafe\nS2", "c": "unsafe\nS1, S2", "d": "Unsafe", "e": "unsafe\nS77"}
    status, body, jobs = await judged(
        api, wire, answers, {"model": "sim", "input": list(answers)}, Idempotency_Key="one"
    )
    assert status == 200, body
    assert body["model"] == "sim" and conforms(body, SCHEMAS["Moderation"])
    shown = [[name for name, hit in each["categories"].items() if hit] for each in body["results"]]
    assert shown == [[], ["hate"], ["crimes", "hate"], ["other"], ["other"]]
    assert [each["flagged"] for each in body["results"]] == [False, True, True, True, True]
    assert all(list(each["categories"]) == ["crimes", "hate", "other"] for each in body["results"])
    assert {(job.tenant, job.model, job.sampling.temperature) for job in jobs} == {("red", "sim", 0)}
    assert len({job.id for job in jobs}) == 5, "each text is judged, whatever the idempotency key"
    async with AsyncOpenAI(base_url=f"{api.client.base_url}/v1", api_key="sk-red") as client:
        asking = asyncio.create_task(client.moderations.create(input="x", model="sim"))
        hand = await claiming(wire)
        await hand.write(["safe"])  # type: ignore[arg-type]
        await hand.finish()
        assert (await asking).results[0].flagged is False


async def test_rules_are_looked_at_too(api: LocalApi, wire: RedisClient) -> None:
    """What a rule keeps from models is not sent to this one, and what a rule redacts comes redacted."""
    found = {"falcon": ContentSettings(deny=("falcon",), default=True),
             "cards": ContentSettings(detect=("card",), action="redact", default=True)}  # fmt: skip
    api.services.content = input_rules(found, {}, Metrics.start("", "api"))
    answers = {"[redacted: cards]": "unsafe\nS1"}
    asked = {"model": "sim", "input": ["the falcon", "4111111111111111"]}
    status, body, _ = await judged(api, wire, answers, asked)
    shown = [[name for name, hit in each["categories"].items() if hit] for each in body["results"]]
    assert status == 200 and shown == [["falcon"], ["cards", "crimes"]]


@pytest.mark.parametrize("answer", ["perhaps", "", "safe, but not for work", "I cannot judge this.\nunsafe"])
async def test_what_is_no_verdict_is_none(api: LocalApi, wire: RedisClient, answer: str) -> None:
    status, body, _ = await judged(api, wire, {"a": answer}, {"model": "sim", "input": "a"})
    assert (status, body["error"]["code"]) == (503, "no_verdict")


async def test_without_a_worker_the_time_limit_ends_it(api: LocalApi) -> None:
    """And nothing is left in the queue."""
    api.services.moderation = ModerationSettings(model="sim", timeout_s=0.3)
    reply = await api.post("/v1/moderations", {"model": "sim", "input": ["a", "b"]}, **RED)
    assert reply.status_code in (408, 503) and "retry-after" in reply.headers

    async def ended() -> bool:
        listed = (await api.client.get("/v1/jobs", headers=RED)).json()["data"]
        return [each["status"] in ("cancelled", "expired") for each in listed] == [True, True]

    async with asyncio.timeout(30):
        while not await ended():
            await asyncio.sleep(0.05)


async def test_a_refused_put_takes_back_the_others(api: LocalApi) -> None:
    """The tenant may keep one job: of two texts none is judged, and it is not waited for."""
    reply = await api.post("/v1/moderations", {"model": "sim", "input": ["a", "b"]}, **FULL)
    assert reply.status_code == 429, reply.text
    async with asyncio.timeout(30):
        while [each["status"] for each in (await api.client.get("/v1/jobs", headers=FULL)).json()["data"]] != [
            "cancelled"
        ]:
            await asyncio.sleep(0.05)


async def test_a_client_that_leaves_takes_its_texts_along(api: LocalApi, wire: RedisClient) -> None:
    """The one that runs and the one that waits; they would have had the time of the limit."""
    asked = {"model": "sim", "input": ["a", "b"]}
    asking = asyncio.create_task(api.client.post("/v1/moderations", json=asked, headers=RED))
    hand = await claiming(wire)
    asking.cancel()
    async with asyncio.timeout(20):
        while "cancelled" not in [
            each["status"] for each in (await api.client.get("/v1/jobs", headers=RED)).json()["data"]
        ]:
            await asyncio.sleep(0.05)
    with pytest.raises(ValueError):
        await Hand.claiming(wire)
    assert hand.claim.job.tenant == "red"


@pytest.mark.parametrize("reason", ["length", "content_filter"])
async def test_a_verdict_that_was_cut_off_is_none(api: LocalApi, wire: RedisClient, reason: str) -> None:
    asking = asyncio.create_task(api.post("/v1/moderations", {"model": "sim", "input": "a"}, **RED))
    hand = await claiming(wire)
    await hand.write(["safe"])  # type: ignore[arg-type]
    await hand.finish(reason=reason)
    assert (await asking).json()["error"]["code"] == "no_verdict"


async def test_a_failure_of_the_model_is_told(api: LocalApi, wire: RedisClient) -> None:
    asking = asyncio.create_task(api.post("/v1/moderations", {"model": "sim", "input": "a"}, **RED))
    hand = await claiming(wire)
    await hand.finish(JobState.CANCELLED)
    assert (await asking).status_code >= 400


async def test_what_is_refused(api: LocalApi) -> None:
    """An unknown name, a key that is not for the model, and more texts than choices."""
    for asked, headers, status in (
        ({"model": "omni-moderation-latest", "input": "x"}, RED, 404),
        ({"model": "sim", "input": "x"}, ONLY, 403),
        ({"model": "sim", "input": ["x"] * 65}, RED, 400),
    ):
        assert (await api.client.post("/v1/moderations", json=asked, headers=headers)).status_code == status
    api.services.moderation = ModerationSettings()
    reply = await api.post("/v1/moderations", {"model": "sim", "input": "x"}, **RED)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert (await api.client.get("/v1/jobs", headers=RED)).json()["data"] == []


def test_the_settings_name_a_model_that_is_served() -> None:
    with pytest.raises(ConfigError, match="no-such"):
        ModerationSettings(model="no-such").check(["sim"])
