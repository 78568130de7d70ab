"""An API process as a whole: how it ends."""

from __future__ import annotations

import asyncio
import http.client
import json
from contextlib import closing

from house import House

from streaming.fleet.processes import Fleet
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings


async def test_a_process_that_lets_its_streams_end_is_shown_as_draining(empty_house: House) -> None:
    """To whoever told it to end, and wonders why it is still there."""
    empty_house.start("workers", PENSTOCK_SIM_STEP_MS="50")
    process = empty_house.start_api()
    empty_house.wait_ready()
    body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "stream": True}
    wire = RedisClient.open(RedisSettings(url=empty_house.redis_url))

    async def states() -> list[str]:
        return [each.state for each in await Fleet(wire).processes("api")]

    with closing(http.client.HTTPConnection("127.0.0.1", empty_house.port, timeout=60)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200
        assert await states() == ["ready"]
        process.terminate()
        async with asyncio.timeout(30):
            while await states() != ["draining"]:
                await asyncio.sleep(0.01)
    await wire.close()
