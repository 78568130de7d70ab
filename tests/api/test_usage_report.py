"""GET /v1/usage in its process: how much one answer may have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
from api_in_process import LocalApi, api_in_process, key_of

from api.usage import MAX_ROWS
from streaming.jobs.usage import FIRST_DAY
from streaming.keys import partition_key
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

RED = {"Authorization": "Bearer sk-red"}
DAYS, NAMES = 6, 1_000


@pytest.fixture
async def api(wire: RedisClient) -> AsyncIterator[LocalApi]:
    async with api_in_process(wire, {"red": key_of("sk-red", "red")}) as api:
        yield api


async def test_an_answer_has_no_more_rows_than_its_process_can_write_at_once(api: LocalApi, wire: RedisClient) -> None:
    """What names fewer columns or days is answered, also while others ask for too much."""
    last = datetime.now(UTC).date()
    for ago in range(DAYS):
        day = str(last.toordinal() - ago - FIRST_DAY)
        names = [f"sim user {number}" for number in range(NAMES)]
        await wire.redis.sadd(partition_key(0, "usage_names", day, "red"), *names)
        counts = {partition_key(0, "usage", day, "red", name): (1).to_bytes(8) for name in names}
        await wire.redis.mset(counts)
    assert DAYS * NAMES > MAX_ROWS

    async def asked(by: str) -> tuple[int, int]:
        answer = await api.client.get("/v1/usage", params={"by": by}, headers=RED)
        found = answer.json()
        return answer.status_code, len(found.get("data", ())) or found["error"]["param"]

    for _ in range(2):
        assert await asked("day,key") == (400, "by")
        assert await asked("day") == (200, DAYS)
        assert await asked("key,model") == (200, NAMES)
