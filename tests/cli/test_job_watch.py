"""`penstock jobs watch`: each change of a job is said once, in the order in which it came."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from house import House, eventually, redis_process

from cli.jobs import changes
from cli.output import ENDED_BADLY

QUEUED: dict[str, Any] = {
    "id": "job_1", "status": "queued", "model": "m", "priority": "batch", "created_at": 100.0, "started_at": None,
    "first_token_at": None, "completed_at": None, "queue_position": 3, "eta_ms": 4200, "queue_reason": None,
    "attempt_log": [], "usage": None, "error": None,
}  # fmt: skip


def attempt(worker: str, began: float, ended: float | None = None, outcome: str | None = None) -> dict[str, Any]:
    return {"worker": worker, "started_at": began, "ended_at": ended, "tokens": None, "outcome": outcome}


RUNS = QUEUED | {"status": "in_progress", "queue_position": None, "attempt_log": [attempt("worker-1", 101.0)]}
WRITES = RUNS | {"first_token_at": 101.5}
LOST = WRITES | {"status": "queued", "attempt_log": [attempt("worker-1", 101.0, 103.0, "lost")]}
HEIR = LOST | {"status": "in_progress", "attempt_log": [*LOST["attempt_log"], attempt("worker-2", 103.5)]}
DONE = HEIR | {
    "status": "completed",
    "completed_at": 106.0,
    "attempt_log": [*LOST["attempt_log"], attempt("worker-2", 103.5, 106.0, "completed")],
    "usage": {"completion_tokens": 300},
}


def words(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [each.said for each in changes(before, now)]


def test_what_has_happened_has_its_own_time() -> None:
    """Not that of the look: a job that has ended is told as it went."""
    assert [each.at for each in changes({}, DONE)] == [100.0, 101.0, 103.0, 103.5, 106.0]
    assert [each.at for each in changes(WRITES, LOST)] == [None, 103.0]


def test_every_change_is_said_once() -> None:
    """From the queue over a lost worker to the end."""
    said = [words(before, now) for before, now in zip(
        ({}, QUEUED, QUEUED, RUNS, WRITES, LOST, HEIR, DONE), (QUEUED, QUEUED, RUNS, WRITES, LOST, HEIR, DONE, DONE),
        strict=True,
    )]  # fmt: skip
    assert said == [
        ["accepted, in lane batch of m", "waits, 3 ahead, about 4.20 s"],
        [],
        ["attempt 1 begins on worker-1"],
        [],
        ["waits for a worker again", "attempt 1 ends after 2.00 s: its worker died (worker-1)"],
        ["attempt 2 begins on worker-2"],
        ["completed after 6.00 s, first token after 1.50 s, 300 tokens"],
        [],
    ]


def test_whoever_comes_late_is_told_all_of_it() -> None:
    """The first look at a job that has ended says what happened, in the order in which it did."""
    assert words({}, DONE) == [
        "accepted, in lane batch of m",
        "attempt 1 begins on worker-1",
        "attempt 1 ends after 2.00 s: its worker died (worker-1)",
        "attempt 2 begins on worker-2",
        "completed after 6.00 s, first token after 1.50 s, 300 tokens",
    ]


def test_a_place_is_said_again_when_it_changes() -> None:
    """With the reason, where there is one; not when nothing is known."""
    moved = QUEUED | {"queue_position": 1, "eta_ms": None, "queue_reason": "no worker is ready"}
    assert words(QUEUED, moved) == ["waits, 1 ahead: no worker is ready"]
    assert words(QUEUED, QUEUED | {"queue_position": None}) == []


def test_a_failure_names_its_code() -> None:
    failed = RUNS | {"status": "failed", "completed_at": 102.0, "error": {"code": "poison", "message": "m"}}
    assert words(RUNS, failed) == ["failed after 2.00 s: poison"]


@pytest.mark.slow
def test_a_lost_worker_is_watched(tmp_path: Path) -> None:
    """Of real processes: kill -9 in the middle, then the heir and the end; the text of the answer is not shown."""
    with redis_process(tmp_path, None, "--appendonly", "yes") as url:
        house = House(url, tmp_path)
        house.environ["PENSTOCK_SIM_STEP_MS"] = "10"
        try:
            house.start_api()
            workers = {name: house.start("workers", "--id", name) for name in ("worker-1", "worker-2")}
            house.wait_ready()
            body = {"model": "sim", "max_tokens": 8000, "messages": [{"role": "user", "content": "x"}]}
            job_id = json.loads(house.post("/v1/jobs", body)[2])["id"]
            command = [sys.executable, "-m", "cli", "jobs", "watch", job_id, "--url", house.url, "--json"]
            with (tmp_path / "seen").open("wb") as seen, subprocess.Popen(command, stdout=seen) as watching:

                def said() -> list[str]:
                    return [json.loads(line)["change"] for line in (tmp_path / "seen").read_text().splitlines()]

                eventually(lambda: any("first tokens" in line for line in said()))
                victim = json.loads(house.get(f"/v1/jobs/{job_id}")[1])["attempt_log"][0]["worker"]
                workers[victim].kill()
                eventually(lambda: any("attempt 2" in line for line in said()))
                house.post(f"/v1/jobs/{job_id}/cancel", None)
                assert watching.wait(60) == ENDED_BADLY
            heir = next(name for name in workers if name != victim)
            assert f"attempt 1 begins on {victim}" in said() and f"attempt 2 begins on {heir}" in said()
            assert any(line.endswith(f"its worker died ({victim})") for line in said())
            assert said()[-1].startswith("cancelled after ")
        finally:
            house.close()
