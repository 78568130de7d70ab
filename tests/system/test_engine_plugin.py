"""Plug-in engines in real worker processes: the example of docs/engines.md, and engines that break the protocol.

Only PYTHONPATH offers them; nothing of them is in Penstock's own folders.
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
import asyncio, threading
from dataclasses import replace
from penstock.engine import EngineHealth, Piece
from echo_engine import Echo

class RaisesInStart(Echo):
    async def start(self, on_step, on_phase):
        raise RuntimeError("no device")

class NoCard(Echo):
    async def start(self, on_step, on_phase):
        await super().start(on_step, on_phase)

class RaisesInStep(Echo):
    def _next(self, request_id):
        raise RuntimeError("bad kernel")

class WrongId(Echo):
    def _next(self, request_id):
        return Piece("nobody", text="x ", n=1)

class TextAfterEnd(Echo):
    def _next(self, request_id):
        piece = super()._next(request_id)
        if piece.last:
            self._late = asyncio.get_running_loop().call_later(0.01, self._on_step, [Piece(request_id, text="x ", n=1)])
        return piece
    async def start(self, on_step, on_phase):
        self._on_step = on_step
        return await super().start(on_step, on_phase)

class NoText(Echo):
    def _next(self, request_id):
        return Piece(request_id, text=None, n=1)

class Endless(Echo):
    def _next(self, request_id):
        return Piece(request_id, text="x ", n=1)

class Threaded(Echo):
    async def start(self, on_step, on_phase):
        def step(pieces):
            threading.Thread(target=on_step, args=(pieces,)).start()
        return await super().start(step, on_phase)

class RaisesInSubmit(Echo):
    def submit(self, request):
        if "bad" in str(request.prompt):
            raise KeyError("a secret detail")
        super().submit(request)
"""


class Served:
    """A house whose one model, "m", has a plug-in as its engine."""

    def __init__(self, house: House, engine: str) -> None:
        self.house, self._engine = house, engine

    def work(self) -> subprocess.Popen[bytes]:
        """One more worker."""
        return self.house.start("workers", "--model", "m")

    def job(self, prompt: str, **fields: Any) -> str:
        messages = [{"role": "user", "content": prompt}]
        status, _, body = self.house.post("/v1/jobs", {"model": "m", "messages": messages, **fields})
        assert status == 202, body
        return str(json.loads(body)["id"])

    def state(self, job: str) -> dict[str, Any]:
        return dict(json.loads(self.house.get(f"/v1/jobs/{job}")[1]))

    def ended(self, job: str) -> dict[str, Any]:
        """The job in its final state."""
        final = ("completed", "failed", "cancelled", "expired")
        found = eventually(lambda: (state := self.state(job))["status"] in final and state, seconds=60)
        assert isinstance(found, dict)
        return found

    def words(self, job: str) -> list[str]:
        """Of its answer."""
        answer = json.loads(self.house.get(f"/v1/jobs/{job}/result")[1])
        return str(answer["choices"][0]["message"]["content"]).split()

    def completion(self, **fields: Any) -> dict[str, Any]:
        status, _, body = self.house.post("/v1/completions", {"model": "m", **fields})
        assert status == 200, body
        return dict(json.loads(body))

    def chunks(self, **fields: Any) -> list[dict[str, Any]]:
        """Of a streamed completion."""
        status, _, body = self.house.post("/v1/completions", {"model": "m", "stream": True, **fields})
        assert status == 200, body
        lines = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
        assert lines.pop() == b"[DONE]"
        return [json.loads(line) for line in lines]


@contextmanager
def plugged(folder: Path, engine: str, options: str = "", **environ: str) -> Iterator[Served]:
    """An API process, and no worker yet."""
    (folder / "penstock.toml").write_text(f'[models.m]\nengine = "{engine}"\n{options}')
    (folder / "faulty.py").write_text(FAULTY)
    with unstarted(folder) as house:
        house.environ |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, EXAMPLE, folder))), **environ}
        house.start_api()
        yield Served(house, engine)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The example, with one worker."""
    with plugged(tmp_path_factory.mktemp("echo"), "echo_engine:Echo", "options.step_ms = 5\n") as served:
        served.work()
        served.house.wait_ready()
        yield served


# --- the example -----------------------------------------------------------------------------------------------------


def test_it_answers_whole(served: Served) -> None:
    """Text, usage, and why it ended; a limit and a stop string are kept."""
    answer = served.completion(prompt="one two three")
    assert answer["choices"][0]["text"].split() == ["one", "two", "three"]
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 3
    limited = served.completion(prompt="one two three", max_tokens=2)["choices"][0]
    assert (limited["text"].split(), limited["finish_reason"]) == (["one", "two"], "length")
    stopped = served.completion(prompt="one two three", stop=["two"])["choices"][0]
    assert (stopped["text"].split(), stopped["finish_reason"]) == (["one"], "stop")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_lists_and_choices(served: Served, n: int, stream: bool) -> None:
    """Each choice has the words of its prompt, whole and streamed."""
    prompts = ["one two", "three four five", "six"]
    texts: dict[int, str] = {}
    if stream:
        for chunk in served.chunks(prompt=prompts, n=n):
            for choice in chunk["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    else:
        texts = {each["index"]: each["text"] for each in served.completion(prompt=prompts, n=n)["choices"]}
    assert {index: text.split() for index, text in texts.items()} == {
        index: prompts[index // n].split() for index in range(n * len(prompts))
    }


def test_a_chat(served: Served) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}
    status, _, answer = served.house.post("/v1/chat/completions", body)
    assert status == 200 and json.loads(answer)["choices"][0]["message"]["content"].split() == ["hello", "there"]


def test_a_running_job_is_cancelled(served: Served) -> None:
    job = served.job("word " * 3000, max_tokens=3000)
    eventually(lambda: served.state(job)["status"] == "in_progress")
    assert served.house.post(f"/v1/jobs/{job}/cancel", {})[0] in (200, 202)
    assert served.ended(job)["status"] == "cancelled"
    assert served.completion(prompt="still here")["choices"][0]["text"].split() == ["still", "here"]


def test_what_it_cannot_do_is_refused(served: Served) -> None:
    """By the capabilities of its card, before the engine sees it."""
    status, _, body = served.house.post("/v1/completions", {"model": "m", "prompt": "x", "presence_penalty": 1.0})
    assert status == 400, body


def test_the_card_names_the_engine_as_the_settings_do(served: Served) -> None:
    with Redis.from_url(served.house.redis_url) as client:
        cards = [client.hgetall(key) for key in client.scan_iter("*") if client.type(key) == b"hash" and b"card" in key]
    assert any(b'"engine":"echo_engine:Echo"' in value for card in cards for value in card.values())


def test_a_job_goes_on_at_the_next_word_after_a_kill(tmp_path: Path) -> None:
    """kill -9 in mid-answer: the next worker continues, and no word is there twice."""
    words = [f"w{number}" for number in range(400)]
    with plugged(tmp_path, "echo_engine:Echo", "options.step_ms = 10\n") as served:
        first = served.work()
        job = served.job(" ".join(words), max_tokens=400)
        eventually(lambda: _steps(served) > 20)
        first.send_signal(signal.SIGKILL)
        served.work()
        state = served.ended(job)
        assert (state["status"], state["attempts"]) == ("completed", 2)
        assert served.words(job) == words


def test_a_long_prompt_without_a_limit_is_answered_up_to_the_longest_answer(tmp_path: Path) -> None:
    """It must not end its worker, and so become a dead letter."""
    with plugged(tmp_path, "echo_engine:Echo", "options.step_ms = 0\n") as served:
        served.work()
        job = served.job("word " * 5000)
        state = served.ended(job)
        assert (state["status"], state["attempts"]) == ("completed", 1)
        assert served.words(job) == ["word"] * 4095


def _steps(served: Served) -> int:
    """Steps of the workers that are in their logs."""
    with Redis.from_url(served.house.redis_url) as client:
        return sum(client.xlen(key) for key in client.scan_iter("*:log:*"))


# --- engines that break the protocol ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("RaisesInStart", "start() raised RuntimeError: no device"),
        ("NoCard", "start() returned no ModelCard: a NoneType"),
    ],
)
def test_an_engine_that_does_not_start_ends_its_worker(engine: str, reason: str, tmp_path: Path) -> None:
    """With the reason, and without taking a job."""
    with plugged(tmp_path, f"faulty:{engine}") as served:
        assert served.work().wait(60) == LOST
        assert f"the engine does not start: faulty:{engine}: {reason}" in served.house.log("workers")


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("RaisesInStep", "engine dead: its task ended: RuntimeError: bad kernel"),
        ("WrongId", "engine dead: faulty:WrongId: a piece for request 'nobody', which does not run"),
        ("NoText", "engine dead: faulty:NoText: a step is no list of Piece: Expected `str`, got "),
        ("Threaded", "engine dead: faulty:Threaded: it called on_step from another thread"),
    ],
)
def test_an_engine_that_breaks_ends_its_worker_and_its_job_is_given_up(
    engine: str, reason: str, tmp_path: Path
) -> None:
    """The job fails after its attempts, as a dead letter; it waits for nobody."""
    with plugged(tmp_path, f"faulty:{engine}", PENSTOCK_REDIS_MAX_ATTEMPTS="1") as served:
        worker = served.work()
        job = served.job("one two three", max_tokens=8)
        assert worker.wait(60) == LOST
        logged = served.house.log("workers")
        assert reason in logged
        if engine == "RaisesInStep":
            assert re.search(r'faulty\.py\\?", line [0-9]+, in _next', logged), "file and line of the plug-in"
        assert served.ended(job)["status"] == "failed"


def test_text_after_the_end_is_told_and_changes_no_answer(tmp_path: Path) -> None:
    """The answer was complete; the worker ends because its engine cannot be trusted any more."""
    with plugged(tmp_path, "faulty:TextAfterEnd") as served:
        worker = served.work()
        job = served.job("one two three")
        assert worker.wait(60) == LOST
        assert "which does not run: unknown, or it has ended" in served.house.log("workers")
        assert served.words(job) == ["one", "two", "three"]


def test_an_error_for_one_request_fails_that_one(tmp_path: Path) -> None:
    """The worker and its other jobs go on; the owner is told that, and nothing of the engine's inside."""
    with plugged(tmp_path, "faulty:RaisesInSubmit") as served:
        worker = served.work()
        good, bad = served.job("one two " * 50), served.job("a bad prompt")
        assert served.ended(bad)["status"] == "failed"
        status, _, body = served.house.request("GET", f"/v1/jobs/{bad}/result")
        assert status >= 500 and b"engine_error" in body and b"secret" not in body
        assert served.ended(good)["status"] == "completed" and worker.poll() is None


def test_more_tokens_than_the_limit_fail_that_job_alone(tmp_path: Path) -> None:
    """It has the tokens up to its limit, it is no dead letter, and its worker takes the next job."""
    with plugged(tmp_path, "faulty:Endless") as served:
        worker = served.work()
        for _ in range(2):
            job = served.job("one two three", max_tokens=8)
            state = served.ended(job)
            assert (state["status"], state["error"]["code"], state["attempts"]) == ("failed", "engine_error", 1)
            assert state["usage"]["completion_tokens"] == 8
        assert worker.poll() is None


def test_a_plug_in_that_is_missing_ends_a_worker_with_the_fix(tmp_path: Path) -> None:
    """The API process of the same settings needs no plug-in."""
    with plugged(tmp_path, "no_such_module:Echo") as served:
        worker = served.work()
        assert worker.wait(60) == 2
        assert "models.m.engine: there is no module 'no_such_module'" in served.house.log("workers")
        assert served.house.get("/healthz")[0] == 200
