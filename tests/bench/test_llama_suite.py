"""llama.cpp's server tests: what the front changes of requests and answers, and what the plugin changes of a test.

Those tests are not part of this tree: the suite here is our own, with the same parts.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from house import House

from bench.conformance.exceptions import LLAMA
from bench.conformance.llama_cases import LEFT_OUT
from bench.conformance.llama_front import LIMIT, address, answer_to, body_for, serving_llama
from bench.conformance.suites import (
    FAILED,
    LLAMA_FILE,
    LLAMA_TESTS,
    PASSED,
    SKIPPED,
    LlamaPorts,
    SuiteMissing,
    run_llama,
    suite_of,
    version_of,
)

PORTS = LlamaPorts(real=7, keyed=8, tools=9)

UTILS = """
import os
import re

class ServerProcess:
    api_key = chat_template = chat_template_file = None
    server_reranking = False
    server_port = int(os.environ["PORT"])

    def start(self):
        raise AssertionError("a server of its own")

def match_regex(regex, text):
    return re.search(regex, text) is not None
"""

TESTS = """
import pytest
from utils import *

def started(**options):
    server = ServerProcess()
    for name, value in options.items():
        setattr(server, name, value)
    server.start()
    return server.server_port

def test_ports():
    ports = [started(), started(api_key="x"), started(server_reranking=True), started(chat_template_file="x")]
    assert ports == [7, 8, 9, 9]

def test_template():
    started(chat_template="chatml")

def test_text():
    assert match_regex("its model's text", "ours") and not match_regex("anything", "")

def test_completion_with_grammar():
    assert match_regex("a{5}", "bbbbb")

@pytest.mark.parametrize("n_prompt,n_predicted", [(77, 8)])
def test_counts(n_prompt, n_predicted):
    assert 26 == n_prompt and not 0 == n_prompt
    assert 9 == n_predicted

@pytest.mark.slow
def test_slow():
    pass
"""


def write_suite(folder: Path, **tests: str) -> None:
    place = folder / LLAMA_TESTS
    (place / "unit").mkdir(parents=True)
    (place / "conftest.py").write_text("from utils import *\n")
    (place / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: slow\n")
    (place / "utils.py").write_text(UTILS)
    (place / LLAMA_FILE).write_text(TESTS)
    for name, text in tests.items():
        (place / "unit" / f"{name}.py").write_text(text)


@pytest.mark.slow
def test_a_test_runs_against_the_server_that_fits_and_asks_for_any_text(tmp_path: Path) -> None:
    """A regular expression of a grammar stays; a file that is left out is not run."""
    (left_out, reason), *_ = LEFT_OUT.items()
    write_suite(tmp_path, **{left_out: "def test_never():\n    raise AssertionError\n"})
    assert suite_of(tmp_path) == LLAMA
    found = {each.case: each for each in run_llama(tmp_path, PORTS, tmp_path)}
    group = Path(LLAMA_FILE).stem
    assert {name.removeprefix(f"{group}::"): each.status for name, each in found.items()} == {
        "test_ports": PASSED,
        "test_template": SKIPPED,
        "test_text": PASSED,
        "test_completion_with_grammar": FAILED,
        "test_counts[77-8]": FAILED,
        f"{left_out}::test_never": SKIPPED,
    }
    assert found[f"{left_out}::test_never"].reason == reason
    assert "assert 9 == 8" in found[f"{group}::test_counts[77-8]"].message
    assert [each.case for each in run_llama(tmp_path, PORTS, tmp_path, "test_text")] == [f"{group}::test_text"]


@pytest.mark.slow
def test_the_python_of_the_checkout_runs_its_tests(tmp_path: Path) -> None:
    write_suite(tmp_path)
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text("#!/bin/sh\nexit 1\n")
    own.chmod(0o755)
    with pytest.raises(SuiteMissing, match="no report"):
        run_llama(tmp_path, PORTS, tmp_path)


def test_a_checkout_names_its_version_by_its_tag(tmp_path: Path) -> None:
    assert version_of(LLAMA, tmp_path) == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"], ["tag", "b1234"]):
        subprocess.run([*git, *words], check=True)
    assert version_of(LLAMA, tmp_path) == "b1234"


# --- front -----------------------------------------------------------------------------------------------------------


def test_addresses_of_their_server_become_those_of_the_api() -> None:
    for path in ("/chat/completions", "/responses", "/embeddings", "/rerank", "/models"):
        assert address(path) == f"/v1{path}"
    assert address("/completion") == address("/completions") == address("/v1/completions") == "/v1/completions"
    assert address("/tokenize") == "/tokenize" and address("/slots") == "/slots"


def test_bodies_get_the_model_and_the_names_of_the_api() -> None:
    def body(path: str, **fields: object) -> object:
        return json.loads(body_for(path, json.dumps(fields).encode(), "m"))

    assert body("/v1/chat/completions", model="other", n_predict=1) == {"model": "m", "n_predict": 1}
    assert body("/completion", prompt="a", n_predict=3) == {"model": "m", "prompt": "a", "max_tokens": 3}
    assert body("/completion", prompt="a") == {"model": "m", "prompt": "a", "max_tokens": LIMIT}
    assert body("/completion", n_predict=-1) == {"model": "m"}
    assert body("/completion", logit_bias=[[5, -1]], n_predict=1)["logit_bias"] == {"5": -1}  # type: ignore[index]
    assert body("/tokenize", content="a", add_special=True) == {"model": "m", "prompt": "a", "add_special_tokens": True}
    assert body_for("/completion", b"[1]", "m") == b"[1]" and body_for("/completion", b"", "m") == b""


def test_answers_get_the_names_of_their_server_and_errors_stay() -> None:
    choices = [{"text": "a", "finish_reason": "stop"}, {"text": "b", "finish_reason": "length"}]
    told = json.dumps({"choices": choices}).encode()
    assert json.loads(answer_to("/completion", 200, told)) == [
        {"content": "a", "stop": True},
        {"content": "b", "stop": True},
    ]
    assert answer_to("/v1/completions", 200, told) == told and answer_to("/completion", 400, told) == told
    assert json.loads(answer_to("/detokenize", 200, b'{"prompt": "a"}')) == {"content": "a"}


@pytest.fixture(scope="module")
def door(house: House) -> Iterator[httpx2.Client]:
    with (
        serving_llama(house.url, "sim") as port,
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        yield client


@pytest.mark.slow
def test_the_front_passes_on_what_penstock_answers(door: httpx2.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    answer = door.post("/chat/completions", json=chat)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    assert answer.json()["system_fingerprint"].startswith("b")
    refused = door.post("/chat/completions", json=chat | {"temperature": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    assert door.get("/models").json()["data"][0]["id"] == "sim" and door.get("/slots").status_code == 404


@pytest.mark.slow
def test_the_front_streams_the_text_of_the_whole_answer(door: httpx2.Client) -> None:
    asked = {"prompt": "Hi", "n_predict": 5}
    whole = door.post("/completion", json=asked).json()["content"]
    lines = door.post("/completion", json=asked | {"stream": True}).text.split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(each["content"] for each in events) == whole != ""
    assert [each["stop"] for each in events] == [False] * (len(events) - 1) + [True]
    assert "data: [DONE]" in lines
    tokens = door.post("/tokenize", json={"content": "Hi"}).json()["tokens"]
    assert door.post("/detokenize", json={"tokens": tokens}).json()["content"]
