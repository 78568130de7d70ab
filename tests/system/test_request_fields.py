"""Fields of requests that not every engine has, through real processes: each reaches the engine by every endpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest
from batching import begin, client, ended, line
from house import House
from openai import OpenAI

from penstock.engine import Sampling
from workers.engines.sim.text import sampling_text, token_text

pytestmark = pytest.mark.slow

FIELDS: dict[str, Any] = {"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "logit_bias": {"50256": -100, "7": 2}}
SAMPLED = Sampling(top_k=40, min_p=0.05, repetition_penalty=1.1, logit_bias={7: 2.0, 50256: -100.0})


def expected(question: str, tokens: int) -> str:
    """What the simulated engine says to a chat with FIELDS: its text depends on each of them."""
    prompt = f"user: {question}{sampling_text(SAMPLED)}"
    return "".join([token_text(prompt, index) for index in range(tokens)])


@pytest.fixture(scope="module")
def openai(house: House) -> OpenAI:
    house.start("workers")
    house.start_api()
    house.start("offline")
    house.wait_ready()
    return client(house)


def test_further_sampling_reaches_the_engine_from_every_endpoint(openai: OpenAI) -> None:
    """Chat, stream, job, response and line of a batch; the job shows the fields as they were sent."""
    messages: Any = [{"role": "user", "content": "q"}]
    whole = openai.chat.completions.create(model="sim", messages=messages, max_tokens=5, n=2, extra_body=FIELDS)
    assert [choice.message.content for choice in whole.choices] == [expected("q", 5)] * 2
    stream = openai.chat.completions.create(
        model="sim", messages=messages, max_tokens=5, stream=True, extra_body=FIELDS
    )
    assert "".join([chunk.choices[0].delta.content or "" for chunk in stream]) == expected("q", 5)
    response = openai.responses.create(model="sim", input="q", max_output_tokens=5, extra_body=FIELDS)
    assert response.output_text == expected("q", 5)
    asked = {"model": "sim", "messages": messages, "max_tokens": 5, **FIELDS}
    made = openai.post("/jobs", body=asked, cast_to=dict[str, Any])
    job = openai.get(f"/jobs/{made['id']}?wait=30&include=input", cast_to=dict[str, Any])
    assert job["result"]["choices"][0]["message"]["content"] == expected("q", 5)
    assert FIELDS.items() <= job["input"].items()
    batch = ended(openai, begin(openai, [line(1, "q", max_tokens=5, **FIELDS)]))
    assert batch.output_file_id
    row = json.loads(openai.files.content(batch.output_file_id).text)
    assert row["response"]["body"]["choices"][0]["message"]["content"] == expected("q", 5)
