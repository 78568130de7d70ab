"""Real processes: what must not queue, or cannot start in time, is refused at once, also where a slot is for others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from house import House, eventually, key_rows, serving
from redis import Redis

from streaming.keys import partition_key

SLOTS = 4


@pytest.fixture
def door(tmp_path: Path) -> Iterator[House]:
    """An API process, a scheduler and a worker of four slots; two tenants, and four partitions."""
    settings = "[worker]\nreserved_slots = 1\ntenant_slots = 1\n" + key_rows(flood="", light="")
    (tmp_path / "penstock.toml").write_text(settings)
    environ = {"PENSTOCK_SIM_SLOTS": str(SLOTS), "PENSTOCK_SIM_STEP_MS": "10", "PENSTOCK_REDIS_PARTITIONS": "4"}
    with serving(tmp_path, "workers", "scheduler", **environ) as house:
        yield house


def ask(house: House, tenant: str, tokens: int = 6_000, **queue: Any) -> tuple[int, dict[str, str], Any]:
    """Post a job of a tenant; what is answered."""
    model = json.loads(house.request("GET", "/v1/models", headers=key(tenant))[2])["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "Name a river."}], "max_tokens": tokens}
    status, headers, answer = house.post("/v1/jobs", body | {"queue": queue}, key(tenant))
    return status, headers, json.loads(answer)


def key(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {tenant}"}


def reaches(house: House, tenant: str, job: str, status: str) -> None:
    """Until this job has this status."""

    def is_there() -> bool:
        found = json.loads(house.request("GET", f"/v1/jobs/{job}", headers=key(tenant))[2])
        return bool(found["status"] == status)

    eventually(is_there)


def is_told(house: House, name: str) -> None:
    """Until the worker has said in every partition for whom its free slot is not: until its next claim there."""
    with Redis.from_url(house.redis_url) as store:

        def said() -> bool:
            keys = [key for p in range(4) for key in store.keys(partition_key(p, "worker", "*"))]
            return bool(keys) and all(name in str(store.hget(key, "closed")) for key in keys)

        eventually(said)


def is_full(house: House) -> None:
    """Until the worker's claims have said in every partition that it has no free slot."""
    with Redis.from_url(house.redis_url) as store:
        eventually(lambda: not any(store.exists(partition_key(p, "idle", "sim")) for p in range(4)))


def try_at_once(house: House, tenant: str, **queue: Any) -> dict[str, Any] | None:
    """Post a job that must not queue. The error of its refusal; None if it was accepted: then it is taken back."""
    status, headers, answer = ask(house, tenant, do_not_queue=True, **queue)
    if status == 202:
        house.post(f"/v1/jobs/{answer['id']}/cancel", {}, key(tenant))
        return None
    error: dict[str, Any] = answer["error"]
    assert (status, error["code"]) == (503, "no_capacity") and int(headers["retry-after"]) >= 1
    return error


def begin(house: House, tenant: str, **queue: Any) -> None:
    status, _, job = ask(house, tenant, **queue)
    assert status == 202, job
    reaches(house, tenant, job["id"], "in_progress")


@pytest.mark.slow
def test_a_slot_for_others_is_not_free_and_a_limit_that_nothing_can_meet_is_refused(door: House) -> None:
    """Three slots run lines of a batch, and the fourth is reserved from them; then a chat has it, too."""
    status, _, short = ask(door, "light", tokens=20)
    assert status == 202, "from now on, the pace of work and the two tenants are known"
    reaches(door, "light", short["id"], "completed")
    for _ in range(SLOTS - 1):
        begin(door, "flood", priority="batch")
    for name, lane in (("lane:batch", "batch"), ("tenant:flood", "standard")):  # kept from the tenant in every lane
        is_told(door, name)
        for _ in range(5):
            assert try_at_once(door, "flood", priority=lane), "a slot that is for others is free for it"
    eventually(lambda: (try_at_once(door, "flood", priority="batch") or {}).get("eta_ms"))  # a plan knows of the jobs
    job = eventually(lambda: (answer := ask(door, "light", do_not_queue=True))[0] == 202 and answer[2]["id"])
    reaches(door, "light", str(job), "in_progress")
    is_full(door)
    for lane in ("standard", "batch"):

        def is_late(lane: str = lane) -> bool:
            status, headers, answer = ask(door, "light", priority=lane, deadline_ms=1)
            if status == 202:
                return False
            error = answer["error"]
            assert (status, error["code"], error["param"]) == (429, "deadline_unreachable", "queue.deadline_ms")
            assert int(headers["retry-after"]) >= 1
            return bool(error["eta_ms"] > 10)

        eventually(is_late)  # once a plan is fresh: no slot is free, and none will be within a millisecond
    status, _, answer = ask(door, "light", deadline_ms=3_600_000)
    assert status == 202, answer
