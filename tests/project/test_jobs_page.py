"""docs/jobs.md: the diagram of a job's life has the states of the code; real processes go along each of its arrows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import MODEL, ROOT, blocks, commands, curl, penstock, served_by
from house import House, eventually
from redis import Redis

from streaming.jobs.job import JobState
from streaming.keys import partition_key

PAGE = ROOT / "docs" / "jobs.md"
ARROW = re.compile(r"^\s*(\S+) --> (\S+?)(?::.*)?$", re.MULTILINE)
DRAWN = {(begin, end) for begin, end in ARROW.findall(blocks(PAGE, "mermaid")[0]) if "[*]" not in (begin, end)}


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with served_by(tmp_path, PENSTOCK_SIM_FAULTS="true", PENSTOCK_SIM_STEP_MS="20") as house:
        yield house


def submit(house: House, prompt: str = "hello", max_tokens: int = 4000, **queue: Any) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "queue": queue}
    status, _, answer = house.post("/v1/jobs", body)
    assert status == 202, answer
    return str(json.loads(answer)["id"])


def job(house: House, job_id: str, wait_s: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(house.get(f"/v1/jobs/{job_id}?wait={wait_s}")[1])
    return found


def status(house: House, job_id: str, wait_s: int = 0) -> str:
    return str(job(house, job_id, wait_s)["status"])


def reaches(house: House, job_id: str, state: str) -> None:
    eventually(lambda: status(house, job_id) == state)


def test_the_diagram_has_the_states_of_the_code() -> None:
    assert {state for arrow in DRAWN for state in arrow} == {state.value for state in JobState}
    final = {state.value for state in JobState if state.final}
    assert not any(begin in final for begin, _ in DRAWN)
    ends = {begin for begin, end in ARROW.findall(blocks(PAGE, "mermaid")[0]) if end == "[*]"}
    assert ends == final


@pytest.mark.slow
def test_real_processes_go_along_each_arrow(house: House) -> None:
    """First what happens to a job that no worker has begun, then what happens to one that runs."""
    seen = set()

    def ended(job_id: str, begin: str, end: str) -> None:
        found = job(house, job_id, 30)
        assert (found["status"], found["attempts"] > 0) == (end, begin == "in_progress"), found
        seen.add((begin, end))

    cancelled, expired, failed, moved = (submit(house, max_queue_ms=ms) for ms in (None, 1, None, None))
    assert status(house, moved) == "queued"
    house.post(f"/v1/jobs/{cancelled}/cancel", None)
    ended(cancelled, "queued", "cancelled")
    ended(expired, "queued", "expired")
    with Redis.from_url(house.redis_url) as redis:
        redis.hset(partition_key(0, "job", failed), "lane", "")
    house.post(f"/v1/jobs/{failed}/cancel", None)
    ended(failed, "queued", "failed")

    worker = house.start("workers")
    reaches(house, moved, "in_progress")
    seen.add(("queued", "in_progress"))
    worker.kill()
    reaches(house, moved, "queued")
    seen.add(("in_progress", "queued"))
    house.start("workers")
    reaches(house, moved, "in_progress")
    house.post(f"/v1/jobs/{moved}/cancel", None)
    ended(moved, "in_progress", "cancelled")
    ended(submit(house, max_tokens=3), "in_progress", "completed")
    ended(submit(house, "[[fail@5]]"), "in_progress", "failed")
    ended(submit(house, deadline_ms=2000), "in_progress", "expired")
    assert seen == DRAWN


@pytest.mark.slow
def test_the_commands_work_as_typed(house: House) -> None:
    """The first one prints the id that the others take."""
    house.start("workers")
    job_id = ""
    for line in commands(PAGE):
        if line.startswith("curl"):
            code, body = curl(house, line)
            assert code == 202 and json.loads(body)["status"] == "queued"
            continue
        if "jobs cancel" in line:  # that job has ended
            job_id = penstock(house, "penstock submit 'Another one.' --max-tokens 5000").strip()
        said = penstock(house, line.replace("JOB_ID", job_id))
        if not job_id:
            job_id = said.strip()
            assert job(house, job_id, 30)["status"] == "completed"
