"""Messages that are followed while the test itself writes what workers would, and the store loses what they wrote."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from flow import until
from hand import LEASE_MS, Hand, lapse
from house import House, module_house
from stream_reader import StreamReader, events_in

from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

pytestmark = pytest.mark.slow

house = module_house(PENSTOCK_REDIS_LEASE_MS=str(LEASE_MS))
BODY = {"model": "sim", "max_tokens": 99, "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
async def wire(house: House) -> AsyncIterator[RedisClient]:
    wire = RedisClient.open(RedisSettings(url=house.redis_url, lease_ms=LEASE_MS))
    yield wire
    await wire.close()


@pytest.mark.parametrize("lost", ["its log", "its epoch"])
async def test_what_is_followed_is_never_joined_with_another_text(house: House, wire: RedisClient, lost: str) -> None:
    """The store lost what was shown and another worker began anew; or, by another reader's cursor, the numbers of the
    job's events did. Either is told, with the path to read it anew, where each event has a number of its own."""
    made = await asyncio.to_thread(house.post, "/v1/messages", BODY, {"Prefer": "respond-async"})
    job_id = json.loads(made[2])["id"]
    path = f"/v1/messages/msg_{job_id}"
    first = await Hand.claiming(wire)
    live = StreamReader(house.port, f"{path}?stream=true")
    await first.write("ab")
    await until(lambda: live.data.count(b'"text_delta"') == 2)
    if lost == "its log":
        await wire.redis.xtrim(partition_key(0, "log", first.lease.id), maxlen=0, approximate=False)
    await lapse(wire, first.lease)
    if lost == "its epoch":
        await Queue(wire).reset(job_id, (await JobReader(wire).record(job_id)).resets)
    second = await Hand.claiming(wire)
    await second.write("c")
    await second.finish()
    await live.read_out()
    *had, last = events_in(live.data)
    assert (last.name, last.id, last.data["error"]["code"]) == ("error", "", "stream_reset")
    assert f"{path}?stream=true" in last.data["error"]["message"]
    assert [event.data["delta"]["text"] for event in had if event.name == "content_block_delta"] == ["a", "b"]
    anew = StreamReader(house.port, f"{path}?stream=true")
    await anew.read_out()
    whole = events_in(anew.data)
    text = "".join(event.data["delta"]["text"] for event in whole if event.name == "content_block_delta")
    assert whole[-1].name == "message_stop" and text == ("c" if lost == "its log" else "abc")
    if lost == "its epoch":
        assert not {event.id for event in whole} & {event.id for event in had}
