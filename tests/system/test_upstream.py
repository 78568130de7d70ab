"""`penstock up --upstream` in front of a real llama-server: chat, stream, job, batch, and the death of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_instance import Instance, said_here
from house import eventually
from llama_process import LlamaProcess
from stream_reader import StreamReader

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct.F16"
"""As the file of the weights is called, without its ending."""
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


def chat(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": STORY, "max_tokens": tokens, "temperature": 0, **more}


def answered(instance: Instance, tokens: int) -> dict[str, Any]:
    status, answer = instance.ask("/v1/chat/completions", chat(tokens))
    assert status == 200, answer
    return dict(answer)


@pytest.fixture(scope="module")
def llama(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaProcess]:
    server = LlamaProcess(real_model, tmp_path_factory.mktemp("llama") / "log")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def instance(llama: LlamaProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    instance = Instance(tmp_path_factory.mktemp("up"), "--upstream", llama.url, batches=True)
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
    reader = StreamReader(instance.port, "/v1/chat/completions", chat(80, stream=True))
    eventually(lambda: len(reader.text()) > len(whole) // 4)
    assert not reader.is_whole
    llama.kill()
    llama.start()
    reader.join(60)
    assert reader.is_whole and reader.text() == whole
    _, job = instance.ask(f"/v1/jobs/{reader.job}")
    assert "lost" not in {attempt["outcome"] for attempt in job["attempt_log"]}


def test_a_batch_runs_there(instance: Instance) -> None:
    """Its lines are computed by the server, in their order."""
    lines, out = instance.folder / "in.jsonl", instance.folder / "out.jsonl"
    lines.write_text('{"prompt": "Name a river."}\n{"prompt": "Name a lake."}\n')
    words = ("--data-dir", str(instance.folder / "data"), "--max-tokens", "6", "-o", str(out))
    _, code, errors = said_here("batch", "run", str(lines), *words)
    assert code == 0, errors
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(answers) == 2 and all(answer["error"] is None for answer in answers)
