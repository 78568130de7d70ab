"""Fields that only a model's server reads are not lost with a worker."""

from __future__ import annotations

from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process
from fake_upstream import MODEL, FakeUpstream, serving
from sim_worker import recorder, until
from upstream_bench import FAST
from upstream_worker import StartUpstream, start_upstream

from streaming.fleet.settings import ModelSettings
from streaming.redis.client import RedisClient
from workers.engines.upstream.settings import UpstreamSettings

__all__ = ["recorder", "start_upstream"]  # fixtures

pytestmark = pytest.mark.slow

FURTHER = {"top_a": 0.3, "chat_template_kwargs": {"mode": "brief"}, "guided": [{"a": None}]}
ASKED = {
    "model": "sim",
    "messages": [{"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}}],
    "max_tokens": 40,
    **FURTHER,
}


def settings_of(upstream: FakeUpstream) -> UpstreamSettings:
    return UpstreamSettings(**FAST, urls=(upstream.url,), name=MODEL)  # type: ignore[arg-type]


async def submitted(api: LocalApi, body: dict[str, Any]) -> str:
    return str((await api.post("/v1/jobs", body)).json()["id"])


async def shown(api: LocalApi, job: str, **query: int) -> Any:
    return (await api.client.get(f"/v1/jobs/{job}", params=query)).json()


def same(sent: dict[str, Any]) -> dict[str, Any]:
    """What of a body are passed fields."""
    return {name: value for name, value in sent.items() if name in FURTHER}


@pytest.mark.parametrize("kind", ["vllm", "other"])
async def test_a_worker_that_takes_over_sends_them_again(
    wire: RedisClient, start_upstream: StartUpstream, kind: str
) -> None:
    """After a kill in the middle of the answer, whether the text is continued or begun anew."""
    upstream = FakeUpstream(kind, step_s=0.05)
    async with serving(upstream), api_in_process(RedisClient.open(wire.settings)) as api:
        first = await start_upstream(settings_of(upstream), model="sim")
        api.services.models = {"sim": ModelSettings(engine="upstream")}
        await api.services.fleet.publish_card(first.worker._card)
        api.services.cards = await api.services.fleet.cards()
        job = await submitted(api, ASKED)
        await until(lambda: _begun(first))
        first.task.cancel()
        for each in first.engine._live.values():  # type: ignore[attr-defined]
            each.task.cancel()
        await start_upstream(settings_of(upstream), model="sim")
        done = await shown(api, job, wait=30)
        assert (done["status"], done["attempts"]) == ("completed", 2), done
    before, *after = upstream.sent
    assert after and same(before.body) == FURTHER
    assert [same(each.body) for each in after] == [FURTHER] * len(after)
    turns = [each.body["messages"][0] for each in upstream.sent if "messages" in each.body]
    assert all(turn["cache_control"] == {"type": "ephemeral"} for turn in turns)


async def _begun(running: Any) -> bool:
    return any(attempt.seq > 3 for attempt in running.worker._attempts.values())
