"""`penstock jobs`: columns, texts of answers, and each change of a watched job, said once and in order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from house import House, eventually

from cli.jobs import COLUMNS, answer_of, attempts_in_words, changes, columns_of, interruption
from cli.output import ENDED_BADLY
from penstock.client import StreamEvent

CALL = {"name": "weather", "arguments": '{"city": "Oslo"}'}
CHOICE = {"message": {"content": None, "tool_calls": [{"type": "function", "function": CALL}]}}
SHOWN = 'weather({"city": "Oslo"})'


@pytest.mark.parametrize(("result", "shown"), [
    ({"choices": [{"message": {"content": "a"}}, {"message": {"content": ""}}, {"text": "b"}]}, "a\n\n\n\nb"),
    ({"choices": [CHOICE, {"message": {"content": "a"}}]}, f"{SHOWN}\n\na"),
    (
        {
            "object": "response",
            "output": [{"type": "message", "content": [{"text": "a"}]}, {"type": "function_call"} | CALL],
        },
        f"a\n{SHOWN}",
    ),
    ({"object": "list", "data": [{"embedding": "ü=="}]}, '{"object": "list", "data": [{"embedding": "ü=="}]}'),
])  # fmt: skip
def test_an_answer_shows_its_texts_and_its_calls(result: dict[str, Any], shown: str) -> None:
    """A call has no text, and still says something."""
    assert answer_of(result) == shown


def test_endpoints_have_a_column_where_jobs_came_by_several() -> None:
    chats, vectors = [{"endpoint": "/v1/chat/completions"}] * 3, {"endpoint": "/v1/embeddings"}
    assert columns_of([]) == columns_of(chats) == COLUMNS[:-1]
    assert columns_of([*chats, vectors, {"tenant": "a", "preview": "Name a river."}]) == (
        "id", "status", "lane", "model", "endpoint", "tenant", "created_at", "took", "tokens", "prompt",
    )  # fmt: skip


def test_attempts_whose_server_was_away_count_as_none() -> None:
    log = [{"outcome": "returned"}, {"outcome": "returned"}, {"outcome": "lost"}, {"outcome": None}]
    assert attempts_in_words({"attempts": 4, "attempt_log": log}) == "4, of which 2 count as none: the server was away"
    assert attempts_in_words({"attempts": 2, "attempt_log": log[2:]}) == "2"
    assert attempts_in_words({"attempts": 1, "attempt_log": None}) == "1"


@pytest.mark.parametrize(("worker", "outcome", "said"), [
    ("w2", "lost", "w1 was lost; continued by w2 after"),
    ("w1", "lost", "w1 was lost and started again; continued after"),
    ("w1", "handed_back", "w1 was stopped and started again; continued after"),
    ("w1", "returned", "the server of w1 was away; continued after"),
])  # fmt: skip
def test_who_goes_on_with_an_answer(worker: str, outcome: str, said: str) -> None:
    """A worker that goes on with its own has started again, if it was the one that was away."""
    previous = {"worker": "w1", "outcome": outcome, "pause_ms": 600}
    event = StreamEvent("started", "1-0", {"worker": worker, "attempt": 2, "previous": previous})
    assert interruption(event).startswith(said)


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
    """Not that of the look: whoever comes late is told all of it, in the order in which it happened."""
    assert [(each.at, each.said) for each in changes({}, DONE)] == [
        (100.0, "accepted, in lane batch of m"),
        (101.0, "attempt 1 begins on worker-1"),
        (103.0, "attempt 1 ends after 2.00 s: its worker died (worker-1)"),
        (103.5, "attempt 2 begins on worker-2"),
        (106.0, "completed after 6.00 s, first token after 1.50 s, 300 tokens"),
    ]
    assert [each.at for each in changes(WRITES, LOST)] == [None, 103.0]
    failed = RUNS | {"status": "failed", "completed_at": 102.0, "error": {"code": "poison", "message": "m"}}
    assert words(RUNS, failed) == ["failed after 2.00 s: poison"]


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


def test_a_place_is_said_again_when_it_changes() -> None:
    """With the reason, where there is one; not when nothing is known."""
    moved = QUEUED | {"queue_position": 1, "eta_ms": None, "queue_reason": "no worker is ready"}
    assert words(QUEUED, moved) == ["waits, 1 ahead: no worker is ready"]
    assert words(QUEUED, QUEUED | {"queue_position": None}) == []


@pytest.mark.slow
def test_a_lost_worker_is_watched(empty_house: House, tmp_path: Path) -> None:
    """Of real processes: kill -9 in the middle, then the heir and the end; the text of the answer is not shown."""
    house = empty_house
    house.environ["PENSTOCK_SIM_STEP_MS"] = "10"
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
