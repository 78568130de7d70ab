"""Kill -9 around a time that jobs and batches wait for: each begins once, and nothing is lost."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from batching import answers_are_right, begin, client, content, line
from house import House, eventually
from redis import Redis

from streaming.batches.store import BatchProgress
from streaming.jobs.codec import encode
from streaming.keys import partition_key

pytestmark = pytest.mark.slow

JOBS = 40
BODY = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
DELAY_S = 2.0


def test_jobs_start_at_their_time_whoever_dies_then(empty_house: House) -> None:
    """None before it; all of them soon after, once, although worker and API process are killed when it comes."""
    house = empty_house
    house.environ |= {"PENSTOCK_REDIS_LEASE_MS": "1000", "PENSTOCK_REDIS_MAX_ATTEMPTS": "50"}
    worker, api = house.start("workers"), house.start_api()
    house.wait_ready()
    queue = {"delay_ms": int(1000 * DELAY_S)}
    jobs = [json.loads(house.post("/v1/jobs", {**BODY, "queue": queue})[2])["id"] for _ in range(JOBS)]

    def shown() -> list[dict[str, Any]]:
        return [json.loads(house.get(f"/v1/jobs/{job_id}")[1]) for job_id in jobs]

    time.sleep(DELAY_S - 0.2)
    worker.kill()
    api.kill()
    house.start("workers")
    house.start_api()
    eventually(lambda: {job["status"] for job in shown()} == {"completed"}, seconds=60)
    for job in shown():
        assert job["started_at"] >= job["not_before"] - 0.002 and job["usage"]["completion_tokens"] == 5
    with Redis.from_url(house.redis_url) as store:
        assert not store.exists(partition_key(0, "scheduled"))


def test_each_time_of_a_schedule_begins_one_batch_whoever_dies_then(empty_house: House) -> None:
    """Offline processes are killed when it comes, sooner and later; a time that none of them saw is caught up with."""
    house = empty_house
    house.environ |= {"PENSTOCK_REDIS_LEASE_MS": "500"}
    house.start("workers")
    house.start_api()
    openai, lines = client(house), [line(number) for number in range(3)]
    plan = begin(openai, lines, extra_body={"schedule": {"cron": "0 0 1 1 *"}})
    offline = house.start("offline")

    def come() -> None:
        """Let the next time be now."""
        with Redis.from_url(house.redis_url) as store:
            progress = BatchProgress(next_ms=int(1000 * time.time()))
            store.hset(partition_key(0, "batch", plan.id), "progress", encode(progress))
            store.zadd(partition_key(0, "due"), {plan.id: 1}, xx=True)

    def batches() -> list[str]:
        found = openai.batches.list(limit=100).data
        return [each.id for each in found if each.to_dict()["schedule"] is None]

    def last() -> Any:
        return openai.batches.retrieve(plan.id).to_dict()["last_batch_id"]

    with Redis.from_url(house.redis_url) as store:
        eventually(lambda: (store.zscore(partition_key(0, "due"), plan.id) or 0) > 1000 * time.time() + 5000)
    for number, pause_s in enumerate((None, 0.0, 0.05, 0.2, 1.2)):
        if pause_s == 0.0:
            offline.kill()
            offline.wait()
        come()
        if pause_s is not None:
            time.sleep(pause_s)
            offline.kill()
            offline.wait()
            offline = house.start("offline")
        eventually(lambda: last() is not None, seconds=60)
        assert last() == batches()[0] and len(batches()) == number + 1
    eventually(lambda: {openai.batches.retrieve(each).status for each in batches()} == {"completed"}, seconds=60)
    for each in batches():
        done = openai.batches.retrieve(each)
        answers_are_right(content(openai, done.output_file_id), lines)
        assert done.metadata == {"schedule": plan.id}
