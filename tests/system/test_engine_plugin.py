"""Plug-in engines in real worker processes: the example of docs/engines.md, and engines that fail.

Only PYTHONPATH offers them; nothing of them is in Penstock's own folders. What else breaks the protocol is in
tests/workers/engines/test_checked_engine.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from house import House, eventually, unstarted
from redis import Redis

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "engine"
LOST = 75
"""A worker's exit code when its engine has failed."""

FAULTY = """
from echo_engine import Echo

class RaisesInStart(Echo):
    async def start(self, on_step, on_phase):
        raise RuntimeError("no device")

class RaisesInStep(Echo):
    def _next(self, request_id):
        raise RuntimeError("bad kernel")
"""


@contextmanager
def plugged(folder: Path, engine: str, options: str = "", **environ: str) -> Iterator[House]:
    """An API process whose one model, "m", has a plug-in as its engine, and no worker yet."""
    (folder / "penstock.toml").write_text(f'[models.m]\nengine = "{engine}"\n{options}')
    (folder / "faulty.py").write_text(FAULTY)
    with unstarted(folder) as house:
        house.environ |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, EXAMPLE, folder))), **environ}
        house.start_api()
        yield house


def work(house: House) -> subprocess.Popen[bytes]:
    """One more worker."""
    return house.start("workers", "--model", "m")


def submit(house: House, prompt: str, max_tokens: int) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    status, _, answer = house.post("/v1/jobs", body)
    assert status == 202, answer
    return str(json.loads(answer)["id"])


def ended(house: House, job: str) -> dict[str, Any]:
    """The job in its final state."""

    def final() -> dict[str, Any] | None:
        state = json.loads(house.get(f"/v1/jobs/{job}")[1])
        return state if state["status"] in ("completed", "failed", "cancelled", "expired") else None

    return eventually(final, seconds=60)


def test_the_example_answers_and_goes_on_at_the_next_word_after_a_kill(tmp_path: Path) -> None:
    """Text, usage, and why it ended; a limit and a stop string are kept. kill -9 in mid-answer: the next worker
    continues, and no word is there twice."""
    words = [f"w{number}" for number in range(400)]
    with plugged(tmp_path, "echo_engine:Echo", "options.step_ms = 10\n") as house:
        first = work(house)
        house.wait_ready()
        for fields, text, finish, tokens in (
            ({}, "one two three", "stop", {3}),
            ({"max_tokens": 2}, "one two", "length", {2}),
            ({"stop": ["two"]}, "one", "stop", {1, 2}),
        ):
            _, _, body = house.post("/v1/completions", {"model": "m", "prompt": "one two three", **fields})
            answer = json.loads(body)
            (choice,) = answer["choices"]
            assert (choice["text"].strip(), choice["finish_reason"]) == (text, finish)
            assert answer["usage"]["completion_tokens"] in tokens
        with Redis.from_url(house.redis_url) as client:

            def steps() -> int:
                return sum(client.xlen(key) for key in client.scan_iter("*:log:*"))

            before, job = steps(), submit(house, " ".join(words), 400)
            eventually(lambda: steps() > before + 20)
        first.send_signal(signal.SIGKILL)
        work(house)
        state = ended(house, job)
        assert (state["status"], state["attempts"]) == ("completed", 2)
        assert state["result"]["choices"][0]["message"]["content"].split() == words


@pytest.mark.parametrize(
    ("engine", "code", "reason"),
    [
        (
            "faulty:RaisesInStart",
            LOST,
            "the engine does not start: faulty:RaisesInStart: start() raised RuntimeError",
        ),
        ("no_such_module:Echo", 2, "models.m.engine: no_such_module:Echo cannot be imported"),
    ],
)
def test_an_engine_that_does_not_start_ends_its_worker(engine: str, code: int, reason: str, tmp_path: Path) -> None:
    """With the reason; the API process of the same settings needs no plug-in."""
    with plugged(tmp_path, engine) as house:
        assert work(house).wait(60) == code
        assert reason in house.log("workers") and house.get("/healthz")[0] == 200


def test_an_engine_that_breaks_ends_its_worker_and_its_job_is_given_up(tmp_path: Path) -> None:
    """The job fails after its attempts, as a dead letter; it waits for nobody. The log has file and line of the
    plug-in."""
    with plugged(tmp_path, "faulty:RaisesInStep", PENSTOCK_REDIS_MAX_ATTEMPTS="1") as house:
        worker = work(house)
        job = submit(house, "one two three", 8)
        assert worker.wait(60) == LOST
        logged = house.log("workers")
        assert "engine dead: its task ended: RuntimeError: bad kernel" in logged
        assert re.search(r'faulty\.py\\?", line [0-9]+, in _next', logged)
        assert ended(house, job)["status"] == "failed"


def test_a_model_judges_texts_and_one_that_is_away_lets_none_pass(tmp_path: Path) -> None:
    """The example repeats a text, which is its verdict here. Another worker takes what a killed one had; without any,
    the time limit ends it."""
    rules = "options.step_ms = 100\n[moderation]\nmodel = 'm'\ntimeout_s = 8\n"
    with plugged(tmp_path, "echo_engine:Echo", rules) as house:
        first = work(house)
        house.wait_ready()
        asked = {"model": "m", "input": ["safe", "unsafe S10", "unsafe S1 S10"]}
        status, _, body = house.post("/v1/moderations", asked)
        results = json.loads(body)["results"]
        shown = [[name for name, hit in each["categories"].items() if hit] for each in results]
        assert (status, shown) == (200, [[], ["hate"], ["violent_crimes", "hate"]])
        first.kill()
        status, _, body = house.post("/v1/moderations", asked)
        assert status in (408, 503) and b"results" not in body
        work(house)
        house.wait_ready()
        assert house.post("/v1/moderations", asked)[0] == 200
