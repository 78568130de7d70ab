"""`penstock jobs`: columns, texts of answers, and each change of a watched job, said once and in order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from house import House, eventually

from cli.jobs import answer_of, change, interruption
from cli.output import Exit
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


@pytest.mark.parametrize(("name", "data", "said"), [
    ("queued", {"position": 3}, "queued, 3 ahead"), ("queue.position", {"position": None}, ""),
    ("started", {"worker": "w1", "attempt": 1}, "started on w1, attempt 1"), ("delta", {"text": "x"}, ""),
])  # fmt: skip
def test_what_an_event_means(name: str, data: dict[str, Any], said: str) -> None:
    assert change(StreamEvent(name, "1-0", data)) == said


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
        eventually(lambda: any("continued by" in line for line in said()))
        house.post(f"/v1/jobs/{job_id}/cancel", None)
        assert watching.wait(60) == Exit.ENDED_BADLY
    heir = next(name for name in workers if name != victim)
    assert f"started on {victim}, attempt 1" in said() and said()[-1].startswith("cancelled")
    assert any(line.startswith(f"{victim} was lost; continued by {heir} after") for line in said())
