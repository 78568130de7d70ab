"""Embeddings, rankings and token ids through real processes, by the official client: whole, in jobs and batches, in
groups, and through the death of workers."""

from __future__ import annotations

import base64
import json
import os
import signal
from array import array
from pathlib import Path
from typing import Any

import httpx2
import pytest
from batching import client, ended, jsonl
from house import House, module_house, serving
from openai import OpenAI
from openapi_document import SCHEMAS, conforms

from workers.engines.sim.answers import SIZE, score, token_ids, vector

pytestmark = pytest.mark.slow

TEXTS = ["a river", "the wide river", "a mill at the weir", "ünïcode 😀"]


house = module_house(
    "workers", "offline", "workers",
    PENSTOCK_SIM_FAULTS="true", PENSTOCK_SIM_SLOTS="4", PENSTOCK_REDIS_PARTITIONS="3",
)  # fmt: skip
"""Two workers, several partitions; requests may ask for faults."""


ANSWERS = {
    "/v1/embeddings": "EmbeddingList",
    "/v1/rerank": "Ranking",
    "/tokenize": "TokenIds",
    "/detokenize": "TokenText",
    "/v1/jobs": "Job",
}


@pytest.fixture
def openai(house: House) -> OpenAI:
    return client(house)


def post(house: House, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    status, _, answer = house.post(path, {"model": "sim"} | body)
    found = json.loads(answer)
    assert conforms(found, SCHEMAS[ANSWERS[path] if status < 300 else "Error"])
    return status, found


# --- embeddings ------------------------------------------------------------------------------------------------------


def test_vectors_come_in_order_by_the_official_client(openai: OpenAI) -> None:
    """By default it asks for base64; floats are the same numbers, one text is a list of one, token ids are taken."""
    made = openai.embeddings.create(model="sim", input=TEXTS)
    assert [each.index for each in made.data] == [0, 1, 2, 3]
    assert [each.embedding for each in made.data] == [vector(text, SIZE).tolist() for text in TEXTS]
    assert made.usage.prompt_tokens == made.usage.total_tokens > 0 and made.model == "sim"
    floats = openai.embeddings.create(model="sim", input=TEXTS, encoding_format="float")
    assert [array("f", each.embedding) for each in floats.data] == [vector(text, SIZE) for text in TEXTS]
    (one,) = openai.embeddings.create(model="sim", input=TEXTS[3]).data
    assert one.embedding == vector(TEXTS[3], SIZE).tolist()
    for ids, texts in (([1, 2, 3], ["1\n2\n3"]), ([[1, 2, 3], [4]], ["1\n2\n3", "4"])):
        made = openai.embeddings.create(model="sim", input=ids)
        assert [each.embedding for each in made.data] == [vector(text, SIZE).tolist() for text in texts]
        assert made.usage.prompt_tokens == sum(len(text.split()) for text in texts)


def test_a_job_is_answered_as_its_request_would_be(house: House, openai: OpenAI) -> None:
    """Its input is shown as it was sent; its events hold the vectors; it counts no tokens of output."""
    asked = {"endpoint": "/v1/embeddings", "model": "sim", "input": TEXTS, "encoding_format": "base64"}
    made = openai.post("/jobs", body=asked, cast_to=dict[str, Any])
    job = openai.get(f"/jobs/{made['id']}?wait=30&include=input", cast_to=dict[str, Any])
    expected = [base64.b64encode(vector(text, SIZE).tobytes()).decode() for text in TEXTS]
    assert [each["embedding"] for each in job["result"]["data"]] == expected
    assert asked.items() <= job["input"].items()
    assert job["usage"]["completion_tokens"] == 0 and job["usage"]["prompt_tokens"] > 0
    assert json.loads(house.get(f"/v1/jobs/{made['id']}/result")[1]) == job["result"]
    events = house.get(f"/v1/jobs/{made['id']}/events")[1]
    assert events.count(b"event: delta") == 1 and ",".join(expected).encode() in events and b'"tokens":0' in events


def test_a_batch_takes_lines_of_embeddings(openai: OpenAI) -> None:
    """In order, equal lines are computed once, and a bad line fails alone."""
    inputs: list[Any] = ["a", ["b", "c"], "a", [1, 2], ""]
    lines = [
        {"custom_id": f"r-{number}", "method": "POST", "url": "/v1/embeddings", "body": {"model": "sim", "input": each}}
        for number, each in enumerate(inputs)
    ]
    file = openai.files.create(file=jsonl(lines), purpose="batch")
    batch = openai.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    done = ended(openai, batch)
    assert done.request_counts and done.request_counts.to_dict() == {"total": 5, "completed": 4, "failed": 1}
    assert done.to_dict()["lines_distinct"] == 3
    rows = [json.loads(row) for row in openai.files.content(done.output_file_id or "").text.splitlines()]
    found = [[array("f", each["embedding"]) for each in row["response"]["body"]["data"]] for row in rows]
    assert found == [[vector(text, SIZE) for text in texts] for texts in (["a"], ["b", "c"], ["a"], ["1\n2"])]
    assert done.usage and done.usage.output_tokens == 0 and done.usage.input_tokens > 0


def test_a_worker_that_dies_costs_only_its_groups(tmp_path: Path) -> None:
    """Killed once two of four groups have their vectors: another one computes the rest, and each vector is there
    once."""
    settings = {"PENSTOCK_SIM_SLOTS": "2", "PENSTOCK_SIM_PREFILL_MS": "700", "PENSTOCK_WORKER_TENANT_SLOTS": "0"}
    with serving(tmp_path, **settings) as house:
        worker = house.start("workers")
        house.wait_ready()
        texts = [f"text {number}" for number in range(200)]
        asked = {"endpoint": "/v1/embeddings", "model": "sim", "input": texts, "encoding_format": "base64"}
        job_id = json.loads(house.post("/v1/jobs", asked)[2])["id"]
        with httpx2.stream("GET", f"{house.url}/v1/jobs/{job_id}/events", timeout=30) as events:
            for line in events.iter_lines():
                if line == "event: delta":
                    os.kill(worker.pid, signal.SIGKILL)
                    break
        house.start("workers")
        job = json.loads(house.get(f"/v1/jobs/{job_id}?wait=60")[1])
        assert [each["outcome"] for each in job["attempt_log"]] == ["lost", "completed"]
        expected = [base64.b64encode(vector(text, SIZE).tobytes()).decode() for text in texts]
        assert [each["embedding"] for each in job["result"]["data"]] == expected
        events = house.request("GET", f"/v1/jobs/{job_id}/events")[2].decode()
        assert events.count("event: delta") == 4 and "stream.reset" not in events


# --- rankings --------------------------------------------------------------------------------------------------------


def test_documents_are_ranked(house: House) -> None:
    """The best first, with their places in the request; texts only where they are wanted."""
    status, ranked = post(house, "/v1/rerank", query="a wide river", documents=TEXTS)
    scores = [score("a wide river", text) for text in TEXTS]
    order = sorted(range(4), key=lambda index: -scores[index])
    assert status == 200 and [each["index"] for each in ranked["results"]] == order
    assert [each["relevance_score"] for each in ranked["results"]] == [scores[index] for index in order]
    assert all("document" not in each for each in ranked["results"]) and ranked["usage"]["total_tokens"] > 0
    documents = [{"text": text} for text in TEXTS]
    _, two = post(house, "/v1/rerank", query="a wide river", documents=documents, top_n=2, return_documents=True)
    assert [each["document"]["text"] for each in two["results"]] == [TEXTS[index] for index in order[:2]]
    many = [f"document {number}" for number in range(150)]
    _, all_of_them = post(house, "/v1/rerank", query="document 149", documents=many)
    assert all_of_them["results"][0]["index"] == 149 and len(all_of_them["results"]) == 150
    assert sorted(each["index"] for each in all_of_them["results"]) == list(range(150))


# --- token ids -------------------------------------------------------------------------------------------------------


def test_a_prompt_is_tokenized_as_an_answer_counts_it(house: House, openai: OpenAI) -> None:
    """A text and a conversation; and no token of output is counted."""
    text = "Tell me about rivers, please."
    status, found = post(house, "/tokenize", prompt=text)
    assert status == 200 and found == {"count": 7, "tokens": token_ids(text), "max_model_len": 8192}
    messages: Any = [{"role": "user", "content": text}]
    _, chat = post(house, "/tokenize", messages=messages)
    answer = openai.chat.completions.create(model="sim", messages=messages, max_tokens=1)
    assert answer.usage and answer.usage.prompt_tokens == chat["count"] == len(chat["tokens"])
    status, back = post(house, "/detokenize", tokens=found["tokens"])
    assert status == 200 and all(str(each) in back["prompt"] for each in found["tokens"])
    job = json.loads(house.get("/v1/jobs?limit=1")[1])["data"][0]
    assert job["usage"]["total_tokens"] == 0 and job["status"] == "completed"
