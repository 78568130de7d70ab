"""`penstock up --upstream` in front of a real llama-server: chat, stream, job, batch, and the death of the server."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_instance import ROOT, Instance
from house import eventually
from llama_process import LlamaProcess

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct.F16"
"""As the file of the weights is called, without its ending."""
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


def chat(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": STORY, "max_tokens": tokens, "temperature": 0, **more}


def answered(instance: Instance, tokens: int) -> dict[str, Any]:
    status, answer = instance.ask("/v1/chat/completions", chat(tokens))
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


class StreamReader(threading.Thread):
    """Reads one streamed chat in the background."""

    def __init__(self, port: int, tokens: int) -> None:
        super().__init__(daemon=True)
        self.text, self.finish, self.job = "", "", ""
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._body = json.dumps(chat(tokens, stream=True))
        self.start()

    def run(self) -> None:
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/chat/completions", self._body, headers)
        reply = self._connection.getresponse()
        self.job = reply.headers["X-Job-Id"] or ""
        for line in reply:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    self.text += choice["delta"].get("content") or ""
                    self.finish = choice["finish_reason"] or self.finish
        self._connection.close()


@pytest.fixture(scope="module")
def llama(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaProcess]:
    server = LlamaProcess(real_model, tmp_path_factory.mktemp("llama") / "log")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def instance(llama: LlamaProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    instance = Instance(tmp_path_factory.mktemp("up"), "--upstream", llama.url)
    yield instance
    instance.close()


def test_a_chat_and_a_job_get_the_servers_answer(instance: Instance, llama: LlamaProcess) -> None:
    """The text that the server itself gives, and its counts."""
    body = {"messages": STORY, "max_tokens": 16, "temperature": 0, "cache_prompt": False}
    own = llama.ask("/v1/chat/completions", body)
    answer = answered(instance, 16)
    assert answer["choices"][0]["message"]["content"] == own["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens"] == own["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 16
    status, job = instance.ask("/v1/jobs", chat(16))
    assert status == 202
    _, ended = instance.ask(f"/v1/jobs/{job['id']}?wait=60")
    assert ended["result"]["choices"][0]["message"] == answer["choices"][0]["message"]


def test_a_stream_survives_the_death_of_the_server(instance: Instance, llama: LlamaProcess) -> None:
    """kill -9 in mid-stream, and a new process: the reader has the text of an unbroken run, in one stream."""
    whole = answered(instance, 80)["choices"][0]["message"]["content"]
    reader = StreamReader(instance.port, 80)
    eventually(lambda: len(reader.text) > len(whole) // 4)
    assert not reader.finish
    llama.kill()
    llama.start()
    reader.join(60)
    assert (reader.text, reader.finish) == (whole, "length")
    _, job = instance.ask(f"/v1/jobs/{reader.job}")
    assert "lost" not in {attempt["outcome"] for attempt in job["attempt_log"]}


def test_a_batch_runs_there(instance: Instance) -> None:
    """Its lines are computed by the server, in their order."""
    (instance.folder / "in.jsonl").write_text('{"prompt": "Name a river."}\n{"prompt": "Name a lake."}\n')
    words = ("--data-dir", "data", "--max-tokens", "6", "-o", "out.jsonl")
    done = instance.run("batch", "run", "in.jsonl", *words)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (instance.folder / "out.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["error"] is None for line in lines)


def test_doctor_says_what_the_server_can_do(instance: Instance, llama: LlamaProcess, tmp_path: Path) -> None:
    """And names one that does not answer."""
    (tmp_path / "penstock.toml").write_text(
        f'[models.m]\nengine = "upstream"\noptions.urls = ["{llama.url}", "http://127.0.0.1:1/v1"]\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "cli", "doctor", "-v"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "250"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"upstream {llama.url}: m: llama-server" in done.stdout
    assert (
        "2048 tokens; runs 1 request at once; continues chats by token ids; texts by token ids; goes on" in done.stdout
    )
    assert "fail  upstream http://127.0.0.1:1/v1" in done.stdout


def test_up_says_what_is_wrong_with_an_address(tmp_path: Path) -> None:
    """Before anything is started."""
    for words, said in (
        (["--upstream", "http://127.0.0.1:1/v1"], "http://127.0.0.1:1/v1 cannot be used"),
        (["--upstream", "127.0.0.1:1"], "expected an address such as http://"),
        (["--engine", "upstream"], "no server is named"),
        (["--upstream", "http://127.0.0.1:1/v1", "--engine", "sim"], "--upstream needs no --engine sim"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "cli", "up", "--port", "0", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "250"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0 and said in done.stderr, done.stderr
