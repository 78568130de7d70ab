"""A store that the results of accepted jobs would fill: real processes, a small maxmemory, nothing accepted is lost."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from house import Answer, House, eventually, redis_process
from redis import Redis

from streaming.jobs.places import JOB_BYTES, TOKEN_BYTES
from streaming.store.monitor import ADMISSION_SHARE

pytestmark = pytest.mark.slow

WAVES, TOKENS = (250, 50, 50, 50), 1000
"""An answer takes some 25 KB of the store, more while it is written: those of the first wave alone would fill it, and
they all could be accepted before the first of them is long."""
BODY_BYTES = 2048
"""At most, of a job's record and of its entries while it waits."""
OPTIONS = ("--appendonly", "yes", "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
SIM = {"PENSTOCK_SIM_STEP_MS": "5", "PENSTOCK_SIM_PREFILL_MS": "0", "PENSTOCK_SIM_SLOTS": "128"}


def test_400_jobs_whose_results_would_fill_the_store(tmp_path: Path) -> None:
    """They come in four waves, each as fast as it goes. Those that are accepted end as completed, none as poison; the
    others are refused with 503 and a time to come back, before the store is full."""
    with redis_process(tmp_path, None, *OPTIONS) as url, Redis.from_url(url) as store:
        house = House(url, tmp_path)
        house.environ |= SIM
        try:
            house.start("workers", "--id", "worker-1")
            house.start("workers", "--id", "worker-2")
            house.start_api()
            house.wait_ready()
            fits = fitting_at_once(store)
            answers: list[Answer] = []
            with ThreadPoolExecutor(16) as pool:
                for wave in WAVES:
                    came = list(pool.map(lambda number: put(house, number), range(wave)))
                    all_ended(house, accepted(came))
                    answers += came
            judge(house, answers, fits)
            memory = store.info("memory")
            assert memory["maxmemory"] / 2 < memory["used_memory"] < memory["maxmemory"]
            assert "errorstat_OOM" not in store.info("errorstats"), "the store was full before admission ended"
        finally:
            house.close()


def put(house: House, number: int) -> Answer:
    prompt = [{"role": "user", "content": f"job {number}"}]
    return house.post("/v1/jobs", {"model": "sim", "messages": prompt, "max_tokens": TOKENS})


def accepted(answers: list[Answer]) -> list[str]:
    return [json.loads(body)["id"] for status, _, body in answers if status == 202]


def all_ended(house: House, jobs: list[str]) -> None:
    for job in jobs:
        eventually(lambda job=job: job_now(house, job)["status"] not in ("queued", "in_progress"), seconds=120)  # type: ignore[misc]


def job_now(house: House, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(house.get(f"/v1/jobs/{job}")[1])
    return found


def fitting_at_once(store: Redis) -> int:
    """How many jobs fit below 80 % of maxmemory with their bodies and all that they may write, if none of them ends."""
    memory = store.info("memory")
    room = ADMISSION_SHARE * memory["maxmemory"] - memory["used_memory"]
    return int(room / (JOB_BYTES + TOKENS * TOKEN_BYTES + BODY_BYTES))


def judge(house: House, answers: list[Answer], fits: int) -> None:
    statuses = Counter(status for status, _, _ in answers)
    assert statuses.keys() == {202, 503}, statuses
    assert fits >= 30, "the store is too small to tell"
    assert statuses[202] >= fits, f"the store has room for {fits}: {statuses}"
    assert statuses[503] >= 50, f"the store has no room for all: {statuses}"
    for status, headers, body in answers:
        if status == 503:
            assert int(headers["retry-after"]) > 0 and json.loads(body)["error"]["code"] == "no_capacity"
    jobs = accepted(answers)
    assert Counter(job_now(house, job)["status"] for job in jobs) == {"completed": len(jobs)}
    assert json.loads(house.get("/admin/dlq")[1])["data"] == []
